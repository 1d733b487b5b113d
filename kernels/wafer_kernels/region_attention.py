"""Attention on a region: queries stay on their row of cores, key tiles travel around the rows.

A column of cores works on ``units`` (head, key split) pairs. Its cores hold two buffers of key
tiles, one in use and one arriving, the queries of their row and what each has gathered so far. Keys
come from wherever KV lives, and every read checks that the bytes there are the ones meant.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wafer_kernels._jit import kernel
from wafer_kernels.numeric import Float32, Int64, product_add
from wafer_kernels.numeric_attention import (
    SoftmaxState,
    attend,
    attention_finish,
    attention_reset,
    merge,
)
from wafer_kernels.region import (
    Bytes,
    Grid,
    Kind,
    Matrix,
    copy_bytes,
    load,
    load_span,
    store,
    store_span,
    values_at,
)
from wafer_kernels.region_cache import Cache, read_vector

__all__ = [
    "Block",
    "Heads",
    "finish",
    "gather",
    "ring_pass",
]


class Heads(NamedTuple):
    """How heads and keys are shared out, and the working memory of a core.

    ``group`` query heads share a key head. ``latent`` is the width of the part of a cached vector
    that is expanded into keys and values, 0 where these are cached themselves.
    """

    heads: int
    group: int
    units: int
    splits: int
    key_width: int
    value_width: int
    latent: int
    key_tile: int
    query_tile: int
    kind: int
    scale: float
    window: int
    work: Int64
    """Address of the working memory of each core (core,): two key buffers, queries, states."""


class Block(NamedTuple):
    """Queries that attend together: rows of the query matrix and their first position."""

    first_row: int
    tokens: int
    position: int


@kernel()
def _queries(block: Block, heads: Heads, rows: int, row: int) -> int:
    """Query tokens of a row of cores; query tiles are dealt cyclically."""
    tile = heads.query_tile
    tiles = -(-block.tokens // tile)
    mine = (tiles - row + rows - 1) // rows
    short = tiles * tile - block.tokens if mine > 0 and (tiles - 1 - row) % rows == 0 else 0
    return mine * tile - short


@kernel()
def _token(heads: Heads, rows: int, row: int, query: int) -> int:
    """Token of the block that is a row's query."""
    tile = heads.query_tile
    return (query // tile * rows + row) * tile + query % tile


@kernel()
def _addresses(heads: Heads, local: int, queries: int) -> tuple[int, int, int]:
    """Bytes of one key buffer; addresses of a core's queries and of its states."""
    element = 4 if heads.kind == Kind.FLOAT32 else 2
    buffer = heads.units * heads.key_tile * (heads.key_width + heads.value_width) * element
    at = heads.work[local] + 2 * buffer
    return buffer, at, at + heads.units * queries * heads.key_width * element


@kernel()
def _load_state(memory: Bytes, states: int, unit: int, queries: int, width: int) -> SoftmaxState:
    values = np.empty(queries * (width + 2), np.float32)
    load(values, memory, states + unit * 4 * values.size, Kind.FLOAT32)
    return SoftmaxState(
        values[:queries],
        values[queries : 2 * queries],
        values[2 * queries :].reshape(queries, width),
    )


@kernel()
def _store_state(memory: Bytes, states: int, unit: int, state: SoftmaxState) -> None:
    queries, width = state.values.shape
    at = states + unit * 4 * queries * (width + 2)
    store(memory, at, Kind.FLOAT32, state.peaks)
    store(memory, at + 4 * queries, Kind.FLOAT32, state.sums)
    store(memory, at + 8 * queries, Kind.FLOAT32, state.values.reshape(-1))


@kernel()
def gather(arena: Bytes, grid: Grid, query: Matrix, heads: Heads, block: Block) -> None:
    """Bring the block's queries to the cores of their row and head, and start with no keys."""
    rows, columns = grid.row_place.size, grid.column_place.size
    element = 4 if heads.kind == Kind.FLOAT32 else 2
    for j in range(columns):
        one = np.empty(heads.key_width, np.float32)
        for i in range(rows):
            queries = _queries(block, heads, rows, i)
            local = grid.row_place[i] * columns + grid.column_place[j]
            memory = arena[grid.first_core + local]
            _, at, states = _addresses(heads, local, queries)
            state = SoftmaxState(
                np.empty(queries, np.float32),
                np.empty(queries, np.float32),
                np.empty((queries, heads.value_width), np.float32),
            )
            attention_reset(state)
            for unit in range(heads.units):
                head = (j * heads.units + unit) // heads.splits
                if head >= heads.heads:
                    continue
                for q in range(queries):
                    row = block.first_row + _token(heads, rows, i, q)
                    load_span(one, arena, grid, query, row, head * heads.key_width)
                    store(memory, at, heads.kind, one)
                    at += heads.key_width * element
                _store_state(memory, states, unit, state)


@kernel()
def _fetch(
    keys: Float32,
    values: Float32,
    arena: Bytes,
    grid: Grid,
    cache: Cache,
    heads: Heads,
    expand: Matrix,
    head: int,
    first: int,
    now: int,
    fault: Int64,
) -> None:
    """Read keys and values (key, width) of a head; latents are expanded on the way."""
    if heads.latent == 0:
        shared = head // heads.group
        for key in range(keys.shape[0]):
            read_vector(keys[key], arena, cache, first + key, shared, now, fault)
            other = heads.heads // heads.group + shared
            read_vector(values[key], arena, cache, first + key, other, now, fault)
        return
    rotary = cache.width - heads.latent
    plain = heads.key_width - rotary
    vector = np.empty(cache.width, np.float32)
    latents = np.empty((keys.shape[0], heads.latent), np.float32)
    for key in range(keys.shape[0]):
        read_vector(vector, arena, cache, first + key, 0, now, fault)
        latents[key] = vector[: heads.latent]
        keys[key, plain:] = vector[heads.latent :]
    weight = np.empty((heads.latent, plain + heads.value_width), np.float32)
    for k in range(heads.latent):
        load_span(weight[k], arena, grid, expand, k, head * weight.shape[1])
    expanded = np.zeros((keys.shape[0], weight.shape[1]), np.float32)
    product_add(expanded, latents, weight)
    keys[:, :plain] = expanded[:, :plain]
    values[:] = expanded[:, plain:]


@kernel()
def ring_pass(
    arena: Bytes,
    grid: Grid,
    cache: Cache,
    heads: Heads,
    block: Block,
    first: Int64,
    count: Int64,
    expand: Matrix,
    now: int,
    faults: Int64,
    first_column: int,
    last_column: int,
) -> None:
    """Send one key tile from every row of cores around the ring of rows.

    A tile is kept as keys by column, then values by row.

    Parameters
    ----------
    arena, grid, cache, heads, block
        Memories, the region, the layer's KV, and who attends.
    first, count
        First token and number of keys of the tile that each row starts with (row, split).
    expand
        Weights that turn latents into keys and values; without rows where there are none.
    now
        Cycle at which the task started.
    faults
        Result: code, core, token and slot of a wrong read, a row for each column (column, 4).
    first_column, last_column
        Columns of cores that work, in logical order, the last one not among them.
    """
    rows, columns = grid.row_place.size, grid.column_place.size
    element = 4 if heads.kind == Kind.FLOAT32 else 2
    key_elements = heads.key_tile * heads.key_width
    unit_bytes = heads.key_tile * (heads.key_width + heads.value_width) * element
    for j in range(first_column, last_column):
        for i in range(rows):
            local = grid.row_place[i] * columns + grid.column_place[j]
            memory = arena[grid.first_core + local]
            for unit in range(heads.units):
                head, split = divmod(j * heads.units + unit, heads.splits)
                if head >= heads.heads or count[i, split] == 0:
                    continue
                keys = np.empty((count[i, split], heads.key_width), np.float32)
                values = np.empty((count[i, split], heads.value_width), np.float32)
                _fetch(keys, values, arena, grid, cache, heads, expand, head, first[i, split],
                       now, faults[j])  # fmt: skip
                at = heads.work[local] + unit * unit_bytes
                across = np.empty((heads.key_width, count[i, split]), np.float32)
                for key in range(count[i, split]):
                    for d in range(heads.key_width):
                        across[d, key] = keys[key, d]
                store(memory, at, heads.kind, across.reshape(-1))
                store(memory, at + key_elements * element, heads.kind, values.reshape(-1))
        for step in range(rows):
            for i in range(rows):
                _attend_tile(arena, grid, heads, block, i, j, (i + step) % rows, step, first, count)
            for i in range(rows):
                sender = grid.row_place[(i + 1) % rows] * columns + grid.column_place[j]
                receiver = grid.row_place[i] * columns + grid.column_place[j]
                size = heads.units * unit_bytes
                copy_bytes(
                    arena[grid.first_core + receiver],
                    heads.work[receiver] + (step + 1) % 2 * size,
                    arena[grid.first_core + sender],
                    heads.work[sender] + step % 2 * size,
                    size,
                )


@kernel()
def _attend_tile(
    arena: Bytes,
    grid: Grid,
    heads: Heads,
    block: Block,
    i: int,
    j: int,
    tile: int,
    step: int,
    first: Int64,
    count: Int64,
) -> None:
    """Let the queries of core (i, j) meet the tile in its buffer, which started on row ``tile``."""
    rows, columns = grid.row_place.size, grid.column_place.size
    queries = _queries(block, heads, rows, i)
    if queries == 0:
        return
    local = grid.row_place[i] * columns + grid.column_place[j]
    memory = arena[grid.first_core + local]
    element = 4 if heads.kind == Kind.FLOAT32 else 2
    buffer, at, states = _addresses(heads, local, queries)
    positions = np.empty(queries, np.int64)
    for query in range(queries):
        positions[query] = block.position + _token(heads, rows, i, query)
    for unit in range(heads.units):
        head, split = divmod(j * heads.units + unit, heads.splits)
        if head >= heads.heads:
            continue
        keys = count[tile, split]
        if keys == 0 or first[tile, split] > positions[-1]:
            continue
        q_address = at + unit * queries * heads.key_width * element
        k_address = heads.work[local] + step % 2 * buffer + unit * (buffer // heads.units)
        v_address = k_address + heads.key_tile * heads.key_width * element
        q = np.empty(queries * heads.key_width, np.float32)
        k = np.empty(heads.key_width * keys, np.float32)
        v = np.empty(keys * heads.value_width, np.float32)
        q_tile = values_at(q, memory, q_address, heads.kind).reshape(queries, -1)
        k_tile = values_at(k, memory, k_address, heads.kind).reshape(-1, keys)
        v_tile = values_at(v, memory, v_address, heads.kind).reshape(keys, -1)
        scores = np.zeros((queries, keys), np.float32)
        product_add(scores, q_tile, k_tile)
        state = _load_state(memory, states, unit, queries, heads.value_width)
        seen = first[tile, split] + np.arange(keys)
        attend(state, scores, v_tile, heads.scale, positions, seen, heads.window)
        _store_state(memory, states, unit, state)


@kernel()
def finish(arena: Bytes, grid: Grid, target: Matrix, heads: Heads, block: Block) -> None:
    """Merge the key splits of every head along the rows of cores and hand the results out."""
    rows, columns = grid.row_place.size, grid.column_place.size
    for i in range(rows):
        queries = _queries(block, heads, rows, i)
        if queries == 0:
            continue
        result = np.empty((queries, heads.value_width), np.float32)
        for head in range(heads.heads):
            place, unit = divmod(head * heads.splits, heads.units)
            local = grid.row_place[i] * columns + grid.column_place[place]
            _, _, states = _addresses(heads, local, queries)
            memory = arena[grid.first_core + local]
            state = _load_state(memory, states, unit, queries, heads.value_width)
            for split in range(1, heads.splits):
                place, unit = divmod(head * heads.splits + split, heads.units)
                local = grid.row_place[i] * columns + grid.column_place[place]
                _, _, states = _addresses(heads, local, queries)
                memory = arena[grid.first_core + local]
                merge(state, _load_state(memory, states, unit, queries, heads.value_width))
            attention_finish(result, state)
            for q in range(queries):
                row = block.first_row + _token(heads, rows, i, q)
                store_span(arena, grid, target, row, head * heads.value_width, result[q])
