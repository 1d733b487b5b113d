"""Attention of a stage: KV is written where the plan keeps it, and read from there by key tiles."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from wafer_emu.kv_cache import refuse_fault
from wafer_emu.layout import no_matrix
from wafer_emu.program import Append, Attention
from wafer_emu.stage_tensors import Job, StageTensors
from wafer_emu.threads import share_out
from wafer_kernels import attention as attention_kernel
from wafer_kernels.attention import AttentionCost
from wafer_kernels.mesh import part_size
from wafer_kernels.region_attention import Block, Heads, finish, gather, ring_pass
from wafer_kernels.region_cache import Cache, append

__all__ = ["attend", "attention_bytes", "write_kv", "write_tile"]

Int64 = npt.NDArray[np.int64]


def attention_bytes(here: StageTensors, operation: Attention) -> Int64:
    """Bytes set aside for key tiles, queries and their states on every core (core,)."""
    region = here.layout.region
    most = np.zeros(region.cores, np.int64)
    for tiles, query_tile_bytes, key_buffer_bytes in here.clock.ring_attention(operation).space(
        operation.chunk
    ):
        taken = key_buffer_bytes + here.layout.rows(tiles).sizes * query_tile_bytes
        most = np.maximum(most, np.repeat(taken, region.columns))
    return most


def write_tile(here: StageTensors, operation: Append, job: Job) -> None:
    """Write the tile's keys and values to where their KV lives, home and hosts."""
    cache = job.kv.layer(job.layer, job.kept)
    first = operation.first_position
    end = first + operation.sources[0].rows
    for part in job.parts:
        low, high = max(part.first, first), min(part.first + part.tokens, end)
        if low < high:
            write_kv(here, operation, cache, part.host, low, high)


def write_kv(
    here: StageTensors, operation: Append, cache: Cache, host: int, low: int, high: int
) -> None:
    """Write keys and values of tokens ``low`` to ``high - 1``, all kept by one host."""
    vector, first = 0, operation.first_position
    for source in operation.sources:
        matrix = here.held[source]
        append(here.arena.bytes, here.layout.grid, matrix, first, cache, low, high, vector)
        vector += source.columns // cache.width


def attend(here: StageTensors, operation: Attention, job: Job, work: Int64) -> None:
    """Query blocks one after another: keys in front of the block, then its own.

    Raises
    ------
    KernelError
        If KV is not where the stage's table says: names core, block and cycle.
    """
    tiling, cost = here.clock.tiling(operation), here.clock.attention_cost(operation)
    mla = here.model.mla
    heads = Heads(
        operation.heads, operation.heads // operation.kv_heads, tiling.units, tiling.splits,
        operation.key_width, operation.value_width, 0 if mla is None else mla.kv_lora_rank,
        tiling.key_tile, tiling.query_tile, int(here.kind), here.model.softmax_scale,
        operation.window or 0, work,
    )  # fmt: skip
    expand = no_matrix() if operation.expand is None else here.weight(operation.expand, job.layer)
    cache, arena, grid = job.kv.layer(job.layer, job.kept), here.arena.bytes, here.layout.grid
    for size, before in tiling.query_blocks(cost.rows, operation.chunk):
        block = Block(before, size, operation.prefix + before)
        gather(arena, grid, here.held[operation.query], heads, block)
        seen = block.position
        if operation.window is not None:
            seen = min(seen, operation.window - 1)
        passes = _earlier_keys(cost, block.position, seen) + _own_keys(cost, block)
        for first, count in passes:
            faults = np.zeros((here.layout.region.columns, 4), np.int64)
            share_out(
                ring_pass, here.layout.region.columns,
                int(count.sum()) * size * operation.heads * operation.key_width,
                arena, grid, cache, heads, block, first, count, expand, job.cycle, faults,
            )  # fmt: skip
            refuse_fault(here.arena, faults, job.request, job.layer, job.cycle)
        finish(arena, grid, here.held[operation.target], heads, block)


def _earlier_keys(cost: AttentionCost, position: int, seen: int) -> list[tuple[Int64, Int64]]:
    """Passes over the ``seen`` keys in front of a block: first key and keys (row, split) of each.

    Splits hold consecutive keys; a pass deals whole granules evenly to the rows.
    """
    result = []
    full = cost.rows * cost.key_tile
    for turn in range(-(-part_size(seen, cost.splits, 0) // full)):
        first = np.zeros((cost.rows, cost.splits), np.int64)
        count = np.zeros_like(first)
        start = position - seen
        for split in range(cost.splits):
            own = part_size(seen, cost.splits, split)
            key, left = start + turn * full, min(full, max(0, own - turn * full))
            granules = -(-left // cost.key_granule)
            for row in range(cost.rows):
                first[row, split] = key
                count[row, split] = min(
                    left, part_size(granules, cost.rows, row) * cost.key_granule
                )
                key += count[row, split]
                left -= count[row, split]
            start += own
        result.append((first, count))
    return result


@lru_cache(maxsize=1024)
def _own_tile(cost: AttentionCost, tokens: int) -> int:
    """Keys of a tile that the clock cuts a block's own keys into."""
    return int(attention_kernel.own_tile(cost, tokens)[0])


def _own_keys(cost: AttentionCost, block: Block) -> list[tuple[Int64, Int64]]:
    """Passes over a block's own keys: tile b goes to split b mod s, row (b div s) mod R."""
    size = _own_tile(cost, block.tokens)
    passes = -(-block.tokens // (cost.rows * cost.splits * size))
    tile = np.arange(passes * cost.rows * cost.splits).reshape(passes, cost.rows, cost.splits)
    first = block.position + tile * size
    count = np.clip(block.position + block.tokens - first, 0, size)
    return list(zip(first, count, strict=True))
