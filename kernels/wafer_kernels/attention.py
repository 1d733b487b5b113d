"""Causal attention of one chunk on a region: query tiles stay, key tiles travel around the rows.

Queries of the chunk are cut into tiles of ``query_tile`` tokens that are dealt cyclically to the R
rows of cores; a column of cores works on ``units`` (head, key split) pairs. Keys are cut into
tiles, one a row, and a pass sends every tile once around the ring of rows: on each core a step
multiplies the queries that may see the tile (Q K^T), updates the online softmax, and multiplies by
the values. A tile that no query of a row may see costs that row nothing and is sent on at once.

The keys of the prefix are cut from token 0, those of the chunk itself from the chunk's first token,
so that all prefix tiles are full and only the chunk's own tiles meet the diagonal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_kernels._jit import kernel
from wafer_kernels.mesh import part_size
from wafer_kernels.systolic import CoreCost, tile_cycles, vector_cycles

__all__ = [
    "SCORE_OPERATIONS",
    "AttentionCost",
    "diagonal_cycles",
    "diagonal_pass",
    "own_bounds",
    "own_tile",
    "prefix_bound",
    "prefix_cycles",
    "prefix_pass",
    "prefix_pass_closed_form",
    "row_queries",
    "row_tokens",
    "seeing_tiles",
    "shift_cycles",
    "step_cycles",
]

Int64 = npt.NDArray[np.int64]

# Vector operations of the online softmax (assumed): per score scale, maximum, subtract, exponential
# (4), sum; per accumulator element one multiply when the running maximum moves.
SCORE_OPERATIONS = 8
RESCALE_OPERATIONS = 1


class AttentionCost(NamedTuple):
    """What a ring step costs on one core of a region, all integers.

    ``units`` (head, key split) pairs a column; ``splits`` key splits a head; ``key_tile`` keys a
    tile holds at most, in multiples of ``key_granule``; ``window`` 0 for none; ``causal_skip`` 0
    charges the masked half too.
    """

    core: CoreCost
    rows: int
    splits: int
    units: int
    query_tile: int
    key_tile: int
    key_granule: int
    key_width: int
    value_width: int
    element_bytes: int
    step_cycles: int
    vector_lanes: int
    vector_issue_millicycles: int
    link_bytes_per_cycle: int
    shift_latency_cycles: int
    window: int
    causal_skip: int


@kernel()
def step_cycles(cost: AttentionCost, queries: int, keys: int) -> int:
    """Cycles of one ring step: ``queries`` tokens of a row against a tile of ``keys`` keys."""
    if queries == 0 or keys == 0:
        return 0
    scores = tile_cycles(cost.core, queries, cost.key_width, keys, cost.element_bytes)
    values = tile_cycles(cost.core, queries, keys, cost.value_width, cost.element_bytes)
    softmax = vector_cycles(
        cost.vector_lanes, cost.vector_issue_millicycles, queries * keys, SCORE_OPERATIONS
    )
    rescale = vector_cycles(
        cost.vector_lanes,
        cost.vector_issue_millicycles,
        queries * cost.value_width,
        RESCALE_OPERATIONS,
    )
    return cost.units * (scores + values + softmax + rescale) + cost.step_cycles


@kernel()
def shift_cycles(cost: AttentionCost, keys: int) -> int:
    """Cycles from the start of a step on one row to the arrival of its tile on the next row."""
    tile_bytes = cost.units * keys * (cost.key_width + cost.value_width) * cost.element_bytes
    return -(-tile_bytes // cost.link_bytes_per_cycle) + cost.shift_latency_cycles


@kernel()
def seeing_tiles(cost: AttentionCost, chunk: int, first_key: int, last_key: int) -> tuple[int, int]:
    """First and last query tile that may see keys ``first_key..last_key``; none if last < first.

    Positions count from the chunk's first token; prefix keys are negative.
    """
    tile = cost.query_tile
    low, high = 0, -(-chunk // tile) - 1
    if cost.causal_skip and first_key > 0:
        low = first_key // tile
    if cost.window > 0 and cost.causal_skip:
        high = min(high, (last_key + cost.window - 1) // tile)
    return low, high


@kernel()
def row_tokens(cost: AttentionCost, chunk: int, row: int, low: int, high: int) -> int:
    """Query tokens of ``row`` in query tiles ``low..high``."""
    tile, rows = cost.query_tile, cost.rows
    if high < low:
        return 0
    tiles = -(-chunk // tile)
    count = (high - row) // rows - (low - 1 - row) // rows
    tokens = count * tile
    if count > 0 and high == tiles - 1 and (tiles - 1 - row) % rows == 0:
        tokens -= tiles * tile - chunk
    return tokens


@kernel()
def row_queries(cost: AttentionCost, chunk: int, row: int, first_key: int, last_key: int) -> int:
    """Query tokens of ``row`` in query tiles that may see keys ``first_key..last_key``."""
    low, high = seeing_tiles(cost, chunk, first_key, last_key)
    return row_tokens(cost, chunk, row, low, high)


@kernel()
def _durations(cost: AttentionCost, sizes: Int64, most_queries: int) -> tuple[Int64, Int64]:
    """Table of step cycles (size class, queries) and the class of each tile, for one pass."""
    classes = np.zeros(sizes.size, np.int64)
    distinct = np.zeros(sizes.size, np.int64)
    count = 0
    for tile in range(sizes.size):
        known = 0
        while known < count and distinct[known] != sizes[tile]:
            known += 1
        if known == count:
            distinct[count] = sizes[tile]
            count += 1
        classes[tile] = known
    table = np.full((count, most_queries + 1), -1, np.int64)
    return table, classes


@kernel()
def ring(
    cost: AttentionCost,
    chunk: int,
    first_keys: Int64,
    sizes: Int64,
    free: Int64,
) -> int:
    """Send tiles (one a row, size 0 for none) once around the ring; return the last finish.

    ``free`` (rows,) holds when each row of cores is free, modified in place. A step starts when the
    row is free and its tile has arrived; the tile is sent on at the step's start and lands once the
    receiver's second buffer is free.
    """
    rows, query_tile = cost.rows, cost.query_tile
    most = row_queries(cost, chunk, 0, -1, -1) if cost.window == 0 else chunk
    table, classes = _durations(cost, sizes, most)
    tiles = -(-chunk // query_tile)
    short_row, deficit = (tiles - 1) % rows, tiles * query_tile - chunk
    # A row has x div R query tiles below x, and one more where row < x mod R: kept per key tile for
    # the query tiles low..end - 1 that see it, so that the loop divides nothing.
    every, low_rest = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    end_rest, to_the_end = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    shift = np.zeros(rows, np.int64)
    for tile in range(rows):
        if sizes[tile] > 0:
            key = first_keys[tile]
            low, high = seeing_tiles(cost, chunk, key, key + sizes[tile] - 1)
            end = max(low, high + 1)
            every[tile] = end // rows - low // rows
            low_rest[tile], end_rest[tile] = low % rows, end % rows
            to_the_end[tile] = 1 if end == tiles and end > low else 0
            shift[tile] = shift_cycles(cost, sizes[tile])
    arrival = free.copy()
    started = free.copy()  # start of the step at which each row held its latest tile
    before = free.copy()  # finish of the step before that one
    finish = 0
    for step in range(rows):
        first = started[0]
        for row in range(rows):
            tile = row + step
            if tile >= rows:
                tile -= rows
            if sizes[tile] == 0:
                continue
            if step > 0:
                sender = started[row + 1] if row + 1 < rows else first
                arrival[row] = max(sender, before[row]) + shift[tile]
            count = every[tile] + (row < end_rest[tile]) - (row < low_rest[tile])
            if count == 0:
                started[row] = arrival[row]
                continue
            queries = count * query_tile
            if row == short_row and to_the_end[tile] == 1:
                queries -= deficit
            duration = table[classes[tile], queries]
            if duration < 0:
                duration = step_cycles(cost, queries, sizes[tile])
                table[classes[tile], queries] = duration
            started[row] = max(arrival[row], free[row])
            before[row] = free[row]
            free[row] = started[row] + duration
            finish = max(finish, free[row])
    return finish


@kernel()
def diagonal_pass(cost: AttentionCost, chunk: int, size: int, split: int) -> int:
    """Cycles of the chunk's queries against its own keys in tiles of ``size``, for one key split.

    Tile b of the chunk goes to split ``b mod splits`` and there to row ``(b div splits) mod R``.
    """
    rows, splits = cost.rows, cost.splits
    free = np.zeros(rows, np.int64)
    finish = 0
    for turn in range(-(-chunk // (rows * splits * size))):
        first_keys = np.zeros(rows, np.int64)
        sizes = np.zeros(rows, np.int64)
        for row in range(rows):
            first_keys[row] = ((turn * rows + row) * splits + split) * size
            sizes[row] = max(0, min(size, chunk - first_keys[row]))
        finish = max(finish, ring(cost, chunk, first_keys, sizes, free))
    return finish


@kernel()
def _own_steps(cost: AttentionCost, chunk: int, size: int, row: int) -> int:
    """Cycles that ``row`` is busy with split 0's tiles of ``size`` of the chunk's own keys."""
    most = row_queries(cost, chunk, row, -1, -1) if cost.window == 0 else chunk
    full = np.full(most + 1, -1, np.int64)
    busy = 0
    for first_key in range(0, chunk, size * cost.splits):
        keys = min(size, chunk - first_key)
        queries = row_queries(cost, chunk, row, first_key, first_key + keys - 1)
        if keys < size:
            busy += step_cycles(cost, queries, keys)
            continue
        if full[queries] < 0:
            full[queries] = step_cycles(cost, queries, size)
        busy += full[queries]
    return busy


@kernel()
def own_bounds(cost: AttentionCost, chunk: int) -> Int64:
    """Cycles that the chunk's own keys take at least, for every multiple of the granule (sizes,).

    The rows of the first and the last query tile do their steps of split 0, whatever they wait for.
    Its first tile comes to row 1 last, after all other rows. With tiles for T rows only, row T
    starts once the first tile has come all the way around.
    """
    rows, query_tiles = cost.rows, -(-chunk // cost.query_tile)
    last = (query_tiles - 1) % rows
    bounds = np.empty(cost.key_tile // cost.key_granule, np.int64)
    for index in range(bounds.size):
        size = (index + 1) * cost.key_granule
        keys = min(size, chunk)
        shift = shift_cycles(cost, keys)
        bounds[index] = _own_steps(cost, chunk, size, last)
        tiles = -(-chunk // (size * cost.splits))
        if cost.window == 0 and tiles < min(rows, query_tiles):
            behind = (rows - tiles) * shift + _own_steps(cost, chunk, size, tiles)
            bounds[index] = max(bounds[index], behind)
        elif last != 0:
            bounds[index] = max(bounds[index], _own_steps(cost, chunk, size, 0))
        queries = row_queries(cost, chunk, 1, 0, keys - 1) if rows > 1 else 0
        if queries > 0:
            around = (rows - 1) * shift + step_cycles(cost, queries, keys)
            bounds[index] = max(bounds[index], around)
    return bounds


@kernel()
def own_tile(cost: AttentionCost, chunk: int) -> tuple[int, int]:
    """Size of the tiles that the chunk's own keys are cut into, and the cycles that they take.

    The fastest multiple of the granule up to ``key_tile``: small tiles leave the masked half out,
    large ones save steps. With tiles of one size a longer chunk never takes less time, so neither
    does it with the fastest. Split 0 holds the most tiles, and those with the most queries unless a
    window bounds them. Sizes are tried in the order of their bounds, until no bound is lower than
    what was found.
    """
    best, fastest = 0, 0
    bounds = own_bounds(cost, chunk)
    for index in np.argsort(bounds, kind="mergesort"):
        if best > 0 and bounds[index] > fastest:
            break
        size = (index + 1) * cost.key_granule
        slowest = diagonal_pass(cost, chunk, size, 0)
        if cost.window > 0:
            for split in range(1, cost.splits):
                slowest = max(slowest, diagonal_pass(cost, chunk, size, split))
        if best == 0 or slowest < fastest or (slowest == fastest and size < best):
            best, fastest = size, slowest
    return best, fastest


@kernel()
def diagonal_cycles(cost: AttentionCost, chunk: int) -> int:
    """Cycles of the chunk's queries against its own keys on the slowest key split."""
    return own_tile(cost, chunk)[1]


@kernel()
def prefix_pass(cost: AttentionCost, chunk: int, first_key: int, keys: int) -> int:
    """Cycles of one pass over ``keys`` consecutive prefix keys of one split, by the ring kernel.

    The keys are dealt to the rows in even tiles of whole granules; ``first_key`` is negative.
    """
    rows, granule = cost.rows, cost.key_granule
    granules = -(-keys // granule)
    first_keys = np.zeros(rows, np.int64)
    sizes = np.zeros(rows, np.int64)
    key, left = first_key, keys
    for row in range(rows):
        sizes[row] = min(left, part_size(granules, rows, row) * granule)
        first_keys[row] = key
        key += sizes[row]
        left -= sizes[row]
    return ring(cost, chunk, first_keys, sizes, np.zeros(rows, np.int64))


@kernel()
def prefix_pass_closed_form(cost: AttentionCost, chunk: int, keys: int) -> int:
    """Cycles of :func:`prefix_pass` where compute hides every shift; returns -1 elsewhere.

    With a tile for every row, the fullest row never waits and takes the sum of its steps. With T
    tiles of one granule on T < R rows, every tile reaches row T last, R - T shifts after row 0
    starts it.
    """
    rows, granule = cost.rows, cost.key_granule
    granules = -(-keys // granule)
    queries = row_queries(cost, chunk, 0, -1, -1)
    if granules < rows:
        if keys % granule != 0:
            return -1
        if chunk % cost.query_tile != 0:
            return -1
        first = step_cycles(cost, queries, granule)
        fewest = row_queries(cost, chunk, rows - 1, -1, -1)
        shift = shift_cycles(cost, granule)
        if shift > (step_cycles(cost, fewest, granule) if fewest > 0 else first):
            return -1
        busy_rows = min(rows, chunk // cost.query_tile)
        if busy_rows > granules:
            last = step_cycles(cost, row_queries(cost, chunk, granules, -1, -1), granule)
            behind = (rows - granules) * shift + (granules - 1) * first + last
        else:  # the last row with queries waits for the tiles before its own
            behind = (rows - busy_rows + 1) * shift + (busy_rows - 1) * first
            behind = behind if busy_rows > 1 else 0
        return max(granules * first, behind)
    larger = granules % rows
    small = granules // rows * granule
    large = small + granule
    last = small - (granules * granule - keys)
    if last <= 0:
        return -1
    last_step = step_cycles(cost, queries, last)
    if shift_cycles(cost, large) > last_step:
        return -1
    return (
        larger * step_cycles(cost, queries, large)
        + (rows - larger - 1) * step_cycles(cost, queries, small)
        + last_step
    )


@kernel()
def _pass_bound(cost: AttentionCost, chunk: int, keys: int) -> int:
    """Cycles that row 0, which has the most queries, computes in a pass over ``keys`` keys."""
    rows, granule = cost.rows, cost.key_granule
    granules = -(-keys // granule)
    queries = row_queries(cost, chunk, 0, -1, -1)
    small, larger = granules // rows * granule, granules % rows
    missing = granules * granule - keys  # of the last tile that has keys
    total = larger * step_cycles(cost, queries, small + granule)
    if small > 0:
        total += (rows - larger - 1) * step_cycles(cost, queries, small)
        return total + step_cycles(cost, queries, small - missing)
    whole = step_cycles(cost, queries, granule)
    return total - whole + step_cycles(cost, queries, granule - missing)


@kernel()
def prefix_bound(cost: AttentionCost, chunk: int, prefix: int) -> int:
    """What :func:`prefix_cycles` takes at least, where no window is: the work of the fullest row.

    Splits differ by one key; that of the first is a bound for the slowest of them.
    """
    keys, full = part_size(prefix, cost.splits, 0), cost.rows * cost.key_tile
    total = 0
    if keys >= full:
        total += keys // full * _pass_bound(cost, chunk, full)
    if keys % full > 0:
        total += _pass_bound(cost, chunk, keys % full)
    return total


@kernel()
def _split_cycles(cost: AttentionCost, chunk: int, first_key: int, keys: int) -> int:
    """Cycles of one split's passes over the prefix: full ones of R * key_tile keys, and a last one.

    The edge of a sliding window is met by the ring kernel.
    """
    full = cost.rows * cost.key_tile
    total = 0
    if cost.window > 0 and cost.causal_skip == 1:
        for before in range(0, keys, full):
            total += prefix_pass(cost, chunk, first_key + before, min(keys - before, full))
        return total
    for size, times in ((full, keys // full), (keys % full, 1)):
        if size > 0 and times > 0:
            cycles = prefix_pass_closed_form(cost, chunk, size)
            if cycles < 0:
                cycles = prefix_pass(cost, chunk, -size, size)
            total += times * cycles
    return total


@kernel()
def prefix_cycles(cost: AttentionCost, chunk: int, prefix: int) -> int:
    """Cycles of the chunk's queries against the prefix keys that any of them sees, slowest split.

    Under a window later splits meet more queries. Without one, splits differ by one key, which may
    cost more or less (a fold of an array less); so the first of either size counts.
    """
    seen = min(prefix, cost.window - 1) if cost.window > 0 else prefix
    slowest, first_key = 0, -seen
    for split in range(cost.splits):
        keys = part_size(seen, cost.splits, split)
        if cost.window > 0 or split == 0 or split == seen % cost.splits:
            slowest = max(slowest, _split_cycles(cost, chunk, first_key, keys))
        first_key += keys
    return slowest
