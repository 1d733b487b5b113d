"""Counts of a query block: against the twin, and against each other."""

import numpy as np
from hypothesis import given

from tests.kernels.test_attention import few, prefixes, regions, tokens, twin
from wafer_kernels.attention import step_cycles
from wafer_kernels.attention_count import block_busy, block_steps, key_tiles


def shapes(steps):
    found = {}
    for queries, keys, times in steps.tolist():
        found[queries, keys] = found.get((queries, keys), 0) + times
    return found


@few
@given(regions(), tokens, prefixes)
def test_steps_of_every_shape_are_the_twin(cost, chunk, prefix):
    assert (
        shapes(block_steps(cost, chunk, key_tiles(cost, chunk, prefix)))
        == twin(cost, chunk, prefix).steps()
    )


@few
@given(regions(), tokens, prefixes)
def test_tiles_hold_every_key_that_is_seen_once(cost, chunk, prefix):
    tiles = key_tiles(cost, chunk, prefix)
    keys = [key for first, size, _ in tiles for key in range(first, first + size)]
    seen = min(prefix, cost.window - 1) if cost.window else prefix
    assert sorted(keys) == list(range(-seen, chunk))
    assert tiles[:, 1].max() <= cost.key_tile
    assert tiles[:, 2].max() < cost.splits


@few
@given(regions(), tokens, prefixes)
def test_busy_cycles_are_the_steps_at_their_cost(cost, chunk, prefix):
    busy = np.zeros((cost.splits, cost.rows), np.int64)
    block_busy(cost, chunk, prefix, busy)
    steps = shapes(block_steps(cost, chunk, key_tiles(cost, chunk, prefix)))
    cycles = sum(count * step_cycles(cost, *shape) for shape, count in steps.items())
    assert busy.sum() == cycles
