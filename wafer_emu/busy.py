"""Busy cycles of every core of a region: where the work of a tile program lies.

Balanced dealing gives the cores of a region at most two heights and two widths of their parts, so
that a plane of busy cycles is a table of four entries spread over the region. Waiting for tiles,
sums and messages is not busy: on every core, busy cycles are at most the clock's cycles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from wafer_emu.block_attention import BlockAttention
from wafer_emu.clock import Clock, vector_shape
from wafer_emu.dealing import dealt
from wafer_emu.program import (
    Add,
    Append,
    Attention,
    Embed,
    Experts,
    Gate,
    Lookup,
    Norm,
    Operation,
    Product,
    Rotary,
    Route,
)
from wafer_kernels import attention_count, mesh
from wafer_kernels.attention import RESCALE_OPERATIONS, SCORE_OPERATIONS
from wafer_kernels.gemm import gemm
from wafer_kernels.systolic import tile_cycles, vector_cycles

__all__ = ["busy_map"]

Int64 = npt.NDArray[np.int64]
KEPT_BLOCKS = 16  # planes of one head on one key block


def busy_map(clock: Clock, operations: Iterable[Operation]) -> Int64:
    """Busy cycles of every core for a sequence of operations.

    Parameters
    ----------
    clock
        The clock of the region.
    operations
        What the region does, one after another.

    Returns
    -------
    Int64
        (rows, columns) of the region in physical places, where rings are folded [cycle].
    """
    plane = np.zeros((clock.region.rows, clock.region.columns), np.int64)
    for operation in operations:
        plane += _operation_busy(clock, operation)
    return plane


def _operation_busy(clock: Clock, operation: Operation) -> Int64 | int:
    """Busy cycles of one operation (rows, columns), or of all cores alike."""
    match operation:
        case Attention():
            busy = _attention_busy(clock, operation)
            if operation.expand is not None:
                busy += _product_busy(clock, *clock.expansion_shape(operation))
            return busy
        case Product():
            m, n, k = operation.shape
            return _product_busy(clock, m, k, n)
        case Experts():
            n, k = operation.target.columns, operation.source.columns
            return sum(
                times * _product_busy(clock, rows, k, n)
                for rows, times in clock.expert_rows(operation)
            )
        case Norm() | Rotary() | Gate() | Route() | Add():
            return _vector_busy(clock, *vector_shape(operation))
        case Append():
            return clock.append(operation) if clock.tiers.kv == "sram" else 0
        case Lookup() | Embed():
            return 0  # rows on their way: nothing is computed
    raise TypeError(f"no busy cycles for {operation}")


def _spread(heights: Int64, widths: Int64, cycles: Callable[[int, int], int]) -> Int64:
    """Plane of ``cycles(height, width)`` over rows and columns of cores, one call a pair."""
    tall, row_kind = np.unique(heights, return_inverse=True)
    wide, column_kind = np.unique(widths, return_inverse=True)
    table = np.array([[cycles(int(h), int(w)) for w in wide] for h in tall], np.int64)
    return table[row_kind][:, column_kind]


def _product_busy(clock: Clock, m: int, k: int, n: int) -> Int64:
    rows, columns, grid = clock.region.rows, clock.region.columns, clock.grid

    if clock.weights_stay(m, k, n):

        def of_rows(height: int, width: int) -> int:
            block = tile_cycles(clock.row_vector_core, 1, height, width, grid.element_bytes)
            return m * (block + grid.step_cycles)

        return _spread(dealt(k, rows), dealt(n, columns), of_rows)
    return _compute_shift_busy(clock, m, k, n)


def _compute_shift_busy(clock: Clock, m: int, k: int, n: int) -> Int64:
    rows, columns, grid = clock.region.rows, clock.region.columns, clock.grid
    slices = max(rows, columns)
    short, longer = divmod(k, slices)

    def of_slices(height: int, width: int) -> int:
        long_step = tile_cycles(grid.core, height, short + 1, width, grid.element_bytes)
        short_step = tile_cycles(grid.core, height, short, width, grid.element_bytes)
        return longer * long_step + (slices - longer) * short_step + slices * grid.step_cycles

    return _spread(dealt(m, rows), dealt(n, columns), of_slices)


def _vector_busy(clock: Clock, rows: int, columns: int, instructions: int) -> Int64:
    core, region = clock.wafer.core, clock.region

    def of_elements(height: int, width: int) -> int:
        elements = height * width
        return vector_cycles(
            core.vector_lanes, core.vector_issue_millicycles, elements, instructions
        )

    return _spread(dealt(rows, region.rows), dealt(columns, region.columns), of_elements)


def _attention_busy(clock: Clock, operation: Attention) -> Int64:
    """Ring steps of all query blocks; a column does those of the key split of its first unit.

    Column j holds units ``j u .. j u + u - 1`` of (head, split) pairs in order of heads; columns
    that are left over do nothing.
    """
    if clock.wafer.attention == "products":
        return _block_attention_busy(clock, operation)
    cost, region = clock.attention_cost(operation), clock.region
    busy = np.zeros((cost.splits, cost.rows), np.int64)
    blocks = clock.tiling(operation).query_blocks(region.rows, operation.chunk)
    prefix = np.array(operation.prefix)
    for size, before in blocks:
        earlier = int(clock.earlier_keys(operation, prefix, size, before))
        attention_count.block_busy(cost, size, earlier, busy)
    units = np.arange(region.columns) * cost.units
    logical = busy[units % cost.splits].T * (units < operation.heads * cost.splits)
    plane = np.empty_like(logical)
    row_places = mesh.ring_places(mesh.MESHGEMM, region.rows)
    column_places = mesh.ring_places(mesh.MESHGEMM, region.columns)
    plane[np.ix_(row_places, column_places)] = logical
    return plane


def _block_attention_busy(clock: Clock, operation: Attention) -> Int64:
    """Key blocks of the heads that take turns on each group of columns; the rest is left over."""
    blocks, chunk = clock.block_attention(operation), operation.chunk
    earlier = int(clock.earlier_keys(operation, np.array(operation.prefix), chunk, 0))
    of_a_head = _key_block_busy(blocks, chunk)
    for keys, times in blocks.blocks(earlier):
        if keys and times:
            of_a_head = of_a_head + times * _key_block_busy(blocks, keys)
    groups = clock.region.columns // blocks.width
    heads = np.clip(operation.heads - blocks.turns * np.arange(groups), 0, blocks.turns)
    plane = np.zeros((clock.region.rows, clock.region.columns), np.int64)
    plane[:, : groups * blocks.width] = np.kron(heads, of_a_head)
    return plane


@lru_cache(maxsize=KEPT_BLOCKS)
def _key_block_busy(blocks: BlockAttention, keys: int) -> Int64:
    """Busy cycles of the cores of one head on one block of keys."""
    head, operation = blocks.head, blocks.operation
    chunk, width = operation.chunk, operation.value_width
    scores = gemm(head.timing_grid, chunk, operation.key_width, keys, "gemm-t").busy_cycles
    softmax = _vector_busy(head, chunk, keys, SCORE_OPERATIONS)
    rescale = _vector_busy(head, chunk, width, RESCALE_OPERATIONS)
    return scores + softmax + rescale + _compute_shift_busy(head, chunk, keys, width)
