"""The fastest of several ways of an attention: against all of them walked, one after another."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.test_attention import few, prefixes, regions, tokens
from wafer_kernels.attention import own_bounds, own_tile, prefix_cycles
from wafer_kernels.entries import plain
from wafer_kernels.fastest_tiling import DONE, EXACT, Blocks, fastest_ways

shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
streams = st.one_of(st.just((0, 1.0)), st.tuples(st.integers(1, 900), st.floats(0.1, 50.0)))


def even_blocks(chunk, count):
    """(tokens, tokens before) of even blocks."""
    sizes = [chunk // count + (i < chunk % count) for i in range(count)]
    return [(size, sum(sizes[:i])) for i, size in enumerate(sizes) if size]


def earlier_keys(cost, chunk, size, before, prefix):
    """Keys besides its own that a block meets: those in front of it, or all others, of a window."""
    in_front = prefix + before if cost.causal_skip else prefix
    shown = min(in_front, cost.window - 1) if cost.window else in_front
    return shown if cost.causal_skip else shown + chunk - size


def walked(cost, chunk, blocks, stream, prefix):
    """Cycles of a way: of each block on its own and earlier keys, or of its KV's way here."""
    total = 0
    for size, before in blocks:
        earlier = earlier_keys(cost, chunk, size, before, prefix)
        cycles = own_tile(cost, size)[1] + prefix_cycles(cost, size, earlier)
        total += max(cycles, int(np.ceil((earlier + size) * stream[0] / stream[1])))
    return total


def all_met(cost, chunk, blocks, prefix):
    """Keys that all blocks meet, their own among them."""
    return sum(size + earlier_keys(cost, chunk, size, before, prefix) for size, before in blocks)


@few
@given(
    regions(),
    st.lists(shapes, min_size=1, max_size=4),
    tokens,
    st.lists(prefixes, min_size=1, max_size=4),
    streams,
)
def test_it_is_the_fastest_and_the_first_of_equals(region, shared, chunk, several, stream):
    costs, sizes, before, rows, firsts, expected, keys = [], [], [], [], [0], [], []
    for number, (units, splits, granules, count) in enumerate(shared):
        key_tile = granules * region.key_granule
        costs.append(region._replace(units=units, splits=splits, key_tile=key_tile))
        even = even_blocks(chunk, count)
        sizes += [size for size, _ in even]
        before += [in_front for _, in_front in even]
        rows += [(units, splits, key_tile)] * len(even)
        firsts.append(len(sizes))
        expected.append(
            [7 * number + walked(costs[-1], chunk, even, stream, each) for each in several]
        )
        keys.append([all_met(costs[-1], chunk, even, each) for each in several])
    blocks = Blocks(
        np.array(firsts, np.int64),
        np.array(rows, np.int64),
        np.array(sizes, np.int64),
        np.array(before, np.int64),
        np.zeros(len(sizes), np.int64),
        np.zeros(len(shared), np.int64),
        7 * np.arange(len(shared)),
    )
    cycles, met, chosen = np.full((3, len(several)), -1, np.int64)
    reached = 0
    while reached < len(several):
        reached, way = fastest_ways(
            plain(region),
            tuple(blocks),
            chunk,
            np.array(several, np.int64),
            stream,
            reached,
            cycles,
            met,
            chosen,
        )
        if way == DONE:
            continue
        known = blocks.known[way]
        assert known < EXACT
        for block in range(blocks.first[way], blocks.first[way + 1]):
            size = int(blocks.sizes[block])
            least = int(own_bounds(costs[way], size).min())
            blocks.own[block] = least if known == 0 else own_tile(costs[way], size)[1]
        blocks.known[way] += 1
    assert cycles.tolist() == np.min(expected, axis=0).tolist()
    fastest = np.argmin(expected, axis=0)
    assert chosen.tolist() == fastest.tolist()
    assert met.tolist() == [keys[way][each] for each, way in enumerate(fastest)]
