"""Attention of one chunk on a region: every cycle against the twin, and what must hold anyway."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import attention as naive
from wafer_kernels.attention import (
    AttentionCost,
    diagonal_cycles,
    diagonal_pass,
    own_bounds,
    own_tile,
    prefix_bound,
    prefix_cycles,
    prefix_pass,
    prefix_pass_closed_form,
    ring,
    row_queries,
    shift_cycles,
    step_cycles,
)
from wafer_kernels.attention_count import block_busy, block_pairs, key_tiles, visible_pairs
from wafer_kernels.mesh import part_size
from wafer_kernels.systolic import simd_core, systolic_core, tile_cycles

few = settings(max_examples=60, deadline=None)
count = st.integers(1, 5)
tokens = st.integers(1, 45)
prefixes = st.integers(0, 60)
windows = st.one_of(st.just(0), st.integers(1, 30))
skips = st.integers(0, 1)


def region(core, rows, *, splits=1, granules=2, window=0, causal_skip=1, **changed):
    """A region of ``core``s; query tile and key granule are the sides of a systolic array."""
    granule = max(core.columns, 1)
    cost = AttentionCost(
        core=core,
        rows=rows,
        splits=splits,
        units=1,
        query_tile=max(core.rows, 1),
        key_tile=granule * granules,
        key_granule=granule,
        key_width=4,
        value_width=3,
        element_bytes=2,
        step_cycles=5,
        vector_lanes=2,
        vector_issue_millicycles=300,
        link_bytes_per_cycle=8,
        shift_latency_cycles=4,
        window=window,
        causal_skip=causal_skip,
    )
    return cost._replace(**changed)


systolic = st.builds(systolic_core, count, count, st.sampled_from(["os", "ws", "is"]))
simd = st.builds(simd_core, count, st.integers(0, 2500), vector_axis=st.integers(0, 1))
cores = st.one_of(systolic, simd)


def regions(window=windows, causal_skip=skips):
    return st.builds(
        region,
        cores,
        count,
        splits=st.integers(1, 4),
        granules=count,
        window=window,
        causal_skip=causal_skip,
        units=st.integers(1, 3),
        key_width=count,
        value_width=count,
        element_bytes=st.integers(1, 2),
        step_cycles=st.integers(0, 9),
        vector_lanes=count,
        vector_issue_millicycles=st.integers(0, 2500),
        link_bytes_per_cycle=st.integers(1, 40),
        shift_latency_cycles=st.integers(0, 60),
    )


def twin(cost, chunk, prefix=0):
    def product(m, k, n):
        return tile_cycles(cost.core, m, k, n, cost.element_bytes)

    return naive.Block(cost, product, chunk, prefix)


def busy(cost, chunk, prefix):
    found = np.zeros((cost.splits, cost.rows), np.int64)
    block_busy(cost, chunk, prefix, found)
    return block_pairs(cost, chunk, key_tiles(cost, chunk, prefix)), found


def block_cycles(cost, chunk, prefix):
    return prefix_cycles(cost, chunk, prefix) + diagonal_cycles(cost, chunk)


@few
@given(st.integers(0, 50), count, st.integers(0, 4))
def test_part_is_a_deal(total, parts, index):
    assert part_size(total, parts, index % parts) == naive.part(total, parts, index % parts)


@few
@given(regions(), tokens, st.integers(0, 12), st.integers(0, 12))
def test_step_and_shift_are_the_equations(cost, chunk, queries, keys):
    assert step_cycles(cost, queries, keys) == twin(cost, chunk).step(queries, keys)
    assert shift_cycles(cost, keys) == twin(cost, chunk).shift(keys)


@few
@given(regions(), tokens, st.integers(-60, 44), st.integers(1, 20))
def test_queries_and_visible_pairs_of_any_key_tile(cost, chunk, first, size):
    keys = range(first, min(first + size, chunk))
    if not keys:
        keys = range(chunk - 1, chunk)
    block = twin(cost, chunk)
    assert visible_pairs(cost, chunk, keys[0], keys[-1]) == block.pairs(keys)
    for row in range(cost.rows):
        assert row_queries(cost, chunk, row, keys[0], keys[-1]) == block.queries(row, keys)


@few
@given(regions(), tokens, st.data())
def test_ring_with_absent_tiles_and_rows_that_are_not_free_yet(cost, chunk, data):
    tiles, free = [], []
    for _ in range(cost.rows):
        first, size = data.draw(st.integers(-30, chunk - 1)), data.draw(st.integers(0, 6))
        tiles.append(range(first, min(first + size, chunk)))
        free.append(data.draw(st.integers(0, 300)))
    expected = twin(cost, chunk).ring(tiles, free)
    found = np.array(free, np.int64)
    first_keys = np.array([keys.start for keys in tiles], np.int64)
    sizes = np.array([len(keys) for keys in tiles], np.int64)
    last = ring(cost, chunk, first_keys, sizes, found)
    assert found.tolist() == expected
    worked = [after for before, after in zip(free, expected, strict=True) if after > before]
    assert last == max(worked, default=0)


def test_a_late_row_takes_tiles_no_faster_than_its_second_buffer_empties():
    """4 rows, all early but row 0: each of its tiles is sent when the step before the last ends."""
    cost = region(simd_core(4), 4, key_width=1, value_width=1, shift_latency_cycles=900)
    sizes = np.full(4, 2, np.int64)
    free = np.array([10_000, 0, 0, 0], np.int64)
    ring(cost, 4, -2 * np.arange(4, 0, -1), sizes, free)
    step, shift = step_cycles(cost, 1, 2), shift_cycles(cost, 2)
    assert step < shift
    # finishes: 10000 + step, + shift, the third tile is there by then, the fourth a shift later
    assert free[0] == 10_000 + 2 * shift + 2 * step


@few
@given(regions(), tokens)
def test_diagonal_of_every_split_is_the_twin(cost, chunk):
    block = twin(cost, chunk)
    for split in range(cost.splits):
        for size in range(cost.key_granule, cost.key_tile + 1, cost.key_granule):
            found = diagonal_pass(cost, chunk, size, split)
            assert found == block.split_diagonal(split, size)
            if split == 0:
                assert 0 < own_bounds(cost, chunk)[size // cost.key_granule - 1] <= found
    cycles, size = block.own_tile()
    assert own_tile(cost, chunk) == (size, cycles)
    assert diagonal_cycles(cost, chunk) == cycles


@few
@given(regions(), tokens, prefixes)
def test_prefix_is_the_twin(cost, chunk, prefix):
    assert prefix_cycles(cost, chunk, prefix) == twin(cost, chunk, prefix).prefix_cycles()


@few
@given(regions(window=st.just(0)), tokens, prefixes)
def test_earlier_keys_are_bounded_from_below_and_exactly_where_compute_hides_shifts(
    cost, chunk, prefix
):
    least = prefix_bound(cost, chunk, prefix)
    assert least <= twin(cost, chunk, prefix).prefix_cycles()
    hidden = cost._replace(rows=1, splits=1)
    assert prefix_bound(hidden, chunk, prefix) == prefix_cycles(hidden, chunk, prefix)


@few
@given(regions(), tokens, st.integers(1, 40), st.integers(0, 20))
def test_one_pass_is_the_twin(cost, chunk, keys, distance):
    keys = min(keys, cost.rows * cost.key_tile)
    block, first = twin(cost, chunk), -keys - distance
    expected = block.ring(block.deal(range(first, first + keys)), [0] * cost.rows)
    assert prefix_pass(cost, chunk, first, keys) == max(expected)


@few
@given(regions(window=st.just(0)), tokens, st.integers(1, 60))
def test_closed_form_of_a_pass_stands_only_where_it_is_the_ring(cost, chunk, keys):
    keys = min(keys, cost.rows * cost.key_tile)
    closed = prefix_pass_closed_form(cost, chunk, keys)
    assert closed in (-1, prefix_pass(cost, chunk, -keys, keys))


def test_closed_form_stands_where_compute_hides_the_shifts():
    cost = region(systolic_core(4, 4), 3, link_bytes_per_cycle=64)
    step = step_cycles(cost, 8, 8)  # 20 queries: 8 on rows 0 and 1, 4 on row 2
    assert prefix_pass_closed_form(cost, 20, 24) == 3 * step == prefix_pass(cost, 20, -24, 24)


def test_closed_form_does_not_stand_where_a_shift_shows():
    cost = region(systolic_core(4, 4), 3, link_bytes_per_cycle=1, shift_latency_cycles=1000)
    assert prefix_pass_closed_form(cost, 20, 24) == -1
    # each tile waits for its shift twice, and only the last step shows behind them
    step, shift = step_cycles(cost, 8, 8), shift_cycles(cost, 8)
    assert prefix_pass(cost, 20, -24, 24) == 2 * shift + step


@few
@given(regions(), tokens, prefixes)
def test_busy_of_every_split_and_row_is_the_twin(cost, chunk, prefix):
    block = twin(cost, chunk, prefix)
    _, found = busy(cost, chunk, prefix)
    assert found.tolist() == block.busy()


@few
@given(regions(st.just(0), st.just(1)), st.integers(1, 400), st.integers(0, 400))
def test_causal_pairs_are_exact_for_any_shape(cost, chunk, prefix):
    pairs, _ = busy(cost, chunk, prefix)
    assert pairs == chunk * prefix + chunk * (chunk + 1) // 2


@few
@given(regions(st.integers(1, 30), st.just(1)), tokens, prefixes)
def test_windowed_pairs_are_exact_for_any_shape(cost, chunk, prefix):
    pairs, _ = busy(cost, chunk, prefix)
    assert pairs == sum(min(prefix + t + 1, cost.window) for t in range(chunk))


@few
@given(regions(), tokens, prefixes)
def test_no_row_is_busy_for_longer_than_the_block_takes(cost, chunk, prefix):
    _, found = busy(cost, chunk, prefix)
    assert found.max() <= block_cycles(cost, chunk, prefix)


def test_under_a_window_later_splits_meet_more_queries():
    narrow = region(systolic_core(3, 1), 1, splits=2, window=1, key_width=40)
    splits = [diagonal_pass(narrow, 4, 2, split) for split in range(2)]
    assert splits[0] < splits[1]
    tiles_of_1 = [diagonal_pass(narrow, 4, 1, split) for split in range(2)]
    assert diagonal_cycles(narrow, 4) == min(max(splits), max(tiles_of_1))
    cost = region(systolic_core(1, 1), 1, splits=2, window=3)
    # of 2 queries after 2 keys, the first sees both keys and the second the later one
    assert prefix_cycles(cost, 2, 2) == step_cycles(cost, 2, 1) > step_cycles(cost, 1, 1)


@few
@given(regions(), tokens, prefixes, st.integers(1, 20))
def test_a_longer_chunk_is_never_faster(cost, chunk, prefix, more):
    assert prefix_cycles(cost, chunk + more, prefix) >= prefix_cycles(cost, chunk, prefix)
    assert diagonal_cycles(cost, chunk + more) >= diagonal_cycles(cost, chunk)


@few
@given(regions(window=st.just(0)), tokens, st.integers(0, 30), st.integers(1, 10))
def test_a_longer_prefix_of_whole_granules_is_never_faster(cost, chunk, granules, more):
    granule = cost.splits * cost.key_granule
    cycles = prefix_cycles(cost, chunk, granules * granule)
    assert prefix_cycles(cost, chunk, (granules + more) * granule) >= cycles


@few
@given(regions(causal_skip=st.just(0)), tokens, prefixes)
def test_without_causal_skip_every_query_meets_every_key_kept(cost, chunk, prefix):
    kept = min(prefix, cost.window - 1) if cost.window else prefix
    assert busy(cost, chunk, prefix)[0] == chunk * (kept + chunk)


@few
@given(regions(st.just(0), st.just(1)), tokens, prefixes)
def test_charging_the_masked_half_is_never_faster(cost, chunk, prefix):
    whole = cost._replace(causal_skip=0)
    assert block_cycles(whole, chunk, prefix) >= block_cycles(cost, chunk, prefix)


def test_one_token_on_one_core_is_one_step():
    cost = region(simd_core(1), 1)
    assert diagonal_cycles(cost, 1) == step_cycles(cost, 1, 1)
    assert prefix_cycles(cost, 1, 0) == 0


@pytest.mark.parametrize("splits", [1, 2, 3, 4])
def test_one_row_is_a_sum_of_steps(splits):
    """7 queries on a 4 x 4 array after 40 keys: no ring, so nothing ever waits."""
    cost = region(systolic_core(4, 4), 1, splits=splits)
    per_split = 40 // splits + (40 % splits > 0)
    full, rest = divmod(per_split, 8)
    expected = full * step_cycles(cost, 7, 8) + step_cycles(cost, 7, rest)
    assert prefix_cycles(cost, 7, 40) == expected
    one, two = step_cycles(cost, 7, 7), step_cycles(cost, 7, 4) + step_cycles(cost, 3, 3)
    own = min(one, two) if splits == 1 else step_cycles(cost, 7, 4)
    assert diagonal_cycles(cost, 7) == own  # in one tile of 7 or two of 4 and 3


def test_masked_tiles_cost_nothing_and_diagonal_tiles_cost_all():
    """2 rows, 16 tokens, tiles of 4: tiles 0..3 are met by 4, 3, 2, 1 query tiles."""
    cost = region(systolic_core(4, 4), 2, granules=1, link_bytes_per_cycle=10**6)
    _, found = busy(cost, 16, 0)
    one, two = step_cycles(cost, 4, 4), step_cycles(cost, 8, 4)
    # query tiles 0, 2 sit on row 0 and 1, 3 on row 1
    assert found.tolist() == [[two + one + one, two + two + one + one]]
    _, whole = busy(cost._replace(causal_skip=0), 16, 0)
    assert whole.tolist() == [[4 * two, 4 * two]]
