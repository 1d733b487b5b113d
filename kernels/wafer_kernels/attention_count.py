"""What a query block of an attention does, counted tile by tile: steps, busy cycles, pairs.

The timing of :mod:`wafer_kernels.attention` takes closed forms where it may; nothing here does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wafer_kernels._jit import kernel
from wafer_kernels.attention import (
    AttentionCost,
    own_tile,
    row_tokens,
    seeing_tiles,
    step_cycles,
)
from wafer_kernels.mesh import part_size

__all__ = ["block_busy", "block_pairs", "block_steps", "key_tiles", "visible_pairs"]

Int64 = npt.NDArray[np.int64]


@kernel()
def visible_pairs(cost: AttentionCost, chunk: int, first_key: int, last_key: int) -> int:
    """(query, key) pairs of the chunk that the mask lets through, keys given inclusively.

    All of them where the masked half is charged too.
    """
    pairs = 0
    for key in range(first_key, last_key + 1):
        if cost.causal_skip == 0:
            pairs += chunk
            continue
        last_query = chunk - 1
        if cost.window > 0:
            last_query = min(last_query, key + cost.window - 1)
        pairs += max(0, last_query - max(key, 0) + 1)
    return pairs


@kernel()
def key_tiles(cost: AttentionCost, chunk: int, prefix: int) -> Int64:
    """All key tiles that one query block meets: (tiles, 3) first key, keys, key split."""
    rows, granule = cost.rows, cost.key_granule
    seen = min(prefix, cost.window - 1) if cost.window > 0 else prefix
    full = rows * cost.key_tile
    own, _ = own_tile(cost, chunk)
    most = -(-chunk // own)
    for split in range(cost.splits):
        most += rows * (-(-part_size(seen, cost.splits, split) // full))
    tiles = np.empty((most, 3), np.int64)
    count, key = 0, -seen
    for split in range(cost.splits):
        keys = part_size(seen, cost.splits, split)
        while keys > 0:
            granules = -(-min(keys, full) // granule)
            for row in range(rows):
                size = min(keys, part_size(granules, rows, row) * granule)
                if size > 0:
                    tiles[count] = key, size, split
                    count += 1
                key += size
                keys -= size
    for first in range(0, chunk, own):
        tiles[count] = first, min(own, chunk - first), first // own % cost.splits
        count += 1
    return tiles[:count]


@kernel()
def _runs(cost: AttentionCost, chunk: int, tiles: Int64) -> Int64:
    """Runs (size, split, first and last query tile that see them, how many) of key tiles alike."""
    runs = np.zeros((tiles.shape[0], 5), np.int64)
    count = 0
    for first_key, size, split in tiles:
        low, high = seeing_tiles(cost, chunk, first_key, first_key + size - 1)
        if count > 0:
            last = runs[count - 1]
            if last[0] == size and last[1] == split and last[2] == low and last[3] == high:
                last[4] += 1
                continue
        runs[count] = size, split, low, high, 1
        count += 1
    return runs[:count]


@kernel()
def block_pairs(cost: AttentionCost, chunk: int, tiles: Int64) -> int:
    """(query, key) pairs of one query block that the mask lets through, of all its key tiles."""
    pairs = 0
    for first_key, size, _ in tiles:
        pairs += visible_pairs(cost, chunk, first_key, first_key + size - 1)
    return pairs


@kernel()
def block_busy(cost: AttentionCost, chunk: int, prefix: int, busy: Int64) -> None:
    """Busy cycles of every (split, row) for one query block, added in place.

    Counts tile by tile over all splits, without closed forms: what a run reports and checks.
    """
    for size, split, low, high, times in _runs(cost, chunk, key_tiles(cost, chunk, prefix)):
        before, cycles = -1, 0
        for row in range(cost.rows):
            queries = row_tokens(cost, chunk, row, low, high)
            if queries != before:  # most rows hold as many as the one before them
                before, cycles = queries, step_cycles(cost, queries, size)
            busy[split, row] += times * cycles


@kernel()
def block_steps(cost: AttentionCost, chunk: int, tiles: Int64) -> Int64:
    """Ring steps of one query block and its key tiles, all rows and splits of a head (steps, 3).

    Of each: queries of a row, keys of a tile, how often they are multiplied; a shape may come more
    than once.
    """
    runs = _runs(cost, chunk, tiles)
    steps = np.empty((runs.shape[0] * cost.rows, 3), np.int64)
    count = 0
    for size, _, low, high, times in runs:
        first = count
        for row in range(cost.rows):
            queries = row_tokens(cost, chunk, row, low, high)
            if queries == 0:
                continue
            if count > first and steps[count - 1, 0] == queries:
                steps[count - 1, 2] += times
                continue
            steps[count] = queries, size, times
            count += 1
    return steps[:count]
