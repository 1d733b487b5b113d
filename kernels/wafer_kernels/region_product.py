"""Products on a region: weights resident, by shifts of both operands or by sums along columns.

Sums are float32 and lie in the core's memory until the last step; then they are rounded to the kind
of the target.
"""

from __future__ import annotations

import numpy as np

from wafer_kernels._jit import kernel
from wafer_kernels.numeric import Float32, Int64, add_bias, product_add
from wafer_kernels.region import (
    Bytes,
    Grid,
    Kind,
    Matrix,
    copy_block,
    copy_rows,
    load,
    load_span,
    part_start,
    store,
    store_span,
    values_at,
)

__all__ = ["compute_shift", "row_vectors"]
ROW_BLOCK = 8  # rows of cores whose part of A stays in the host's cache over all columns


@kernel()
def _first_slice(rows: int, columns: int, row: int, column: int) -> int:
    """Slice that a logical core multiplies first in a compute-shift product; others follow.

    The longer side circulates one slice a core; the shorter side is skewed by its share of them.
    """
    if columns >= rows:
        return (row * columns // rows + column) % columns
    return (column * rows // columns + row) % rows


@kernel()
def compute_shift(
    arena: Bytes,
    grid: Grid,
    a: Matrix,
    a_rows: Int64,
    b: Matrix,
    c: Matrix,
    c_rows: Int64,
    bias: Matrix,
    shares: Float32,
    arriving_a: Int64,
    arriving_b: Int64,
    sums_at: Int64,
    first_core: int,
    last_core: int,
) -> None:
    """Multiply rows of A by B in ``max(R, C)`` steps, each on one slice of the inner index.

    In a step every core multiplies the slices of A and B that have arrived in its buffers: what
    the chain of shifts from the cores that hold them delivers.

    Parameters
    ----------
    arena, grid
        Memories (core, byte) and the region.
    a, a_rows
        Left operand, and its rows that are multiplied (m,).
    b
        Right operand, the weights (inner, n).
    c, c_rows
        Target, and its rows that receive the products (m,).
    bias
        Row added to every product, a copy on every line of cores; no rows: none.
    shares
        Factor of each product (m,), which is then added to the target; empty: it replaces it.
    arriving_a, arriving_b
        Address of each core's buffers (core,) [byte].
    sums_at
        Address of each core's float32 sums (core,) [byte]. It may be that of the target, if the
        target's rows are dealt like the products and have room for float32: rounding goes from the
        first sum to the last, so that a narrower value never overwrites a sum to come.
    first_core, last_core
        Cores that work, the last one not among them, in logical order down the columns of one block
        of ``ROW_BLOCK`` rows after another.
    """
    rows, columns = grid.row_place.size, grid.column_place.size
    slices, inner = max(rows, columns), b.line.size
    starts = np.array([part_start(inner, slices, s) for s in range(slices + 1)])
    for core in range(first_core, last_core):
        block, rest = divmod(core, ROW_BLOCK * columns)
        height = min(ROW_BLOCK, rows - ROW_BLOCK * block)
        j, i = divmod(rest, height)
        i += ROW_BLOCK * block
        low, high = part_start(a_rows.size, rows, i), part_start(a_rows.size, rows, i + 1)
        first, width = b.bounds[j], b.bounds[j + 1] - b.bounds[j]
        if high == low or width == 0:
            continue
        line = grid.row_place[i]
        local = line * columns + grid.column_place[j]
        here, memory = grid.first_core + local, arena[grid.first_core + local]
        skew = _first_slice(rows, columns, i, j)
        scratch = np.zeros((high - low) * width, np.float32)
        store(memory, sums_at[local], Kind.FLOAT32, scratch)
        left = np.empty((high - low) * -(-inner // slices), np.float32)
        right = np.empty(-(-inner // slices) * width, np.float32)
        for step in range(slices):
            s = skew + step if skew + step < slices else skew + step - slices
            k, depth = starts[s], starts[s + 1] - starts[s]
            copy_rows(arena, here, arriving_a[local], grid, a, a_rows[low:high], k, depth)
            copy_block(arena, here, arriving_b[local], grid, b, k, depth, j)
            a_slice = values_at(left[: (high - low) * depth], memory, arriving_a[local], a.kind)
            b_slice = values_at(right[: depth * width], memory, arriving_b[local], b.kind)
            sums = values_at(scratch, memory, sums_at[local], Kind.FLOAT32)
            product_add(
                sums.reshape(high - low, width),
                a_slice.reshape(high - low, depth),
                b_slice.reshape(depth, width),
            )
            if sums_at[local] % 4 > 0:  # a copy was added to
                store(memory, sums_at[local], Kind.FLOAT32, sums)
        row, offset = np.empty((1, width), np.float32), np.empty(width, np.float32)
        if bias.line.size > 0:
            load_span(offset, arena, grid, bias, line, first)
        for r in range(high - low):
            load(row[0], memory, sums_at[local] + 4 * r * width, Kind.FLOAT32)
            if bias.line.size > 0:
                add_bias(row, offset)
            if shares.size > 0:
                load_span(offset, arena, grid, c, c_rows[low + r], first)
                for n in range(width):
                    row[0, n] = offset[n] + shares[low + r] * row[0, n]
            store_span(arena, grid, c, c_rows[low + r], first, row[0])


@kernel()
def row_vectors(
    products: Float32,
    arena: Bytes,
    grid: Grid,
    a: Matrix,
    a_rows: Int64,
    b: Matrix,
    bias: Matrix,
    first_column: int,
    last_column: int,
) -> None:
    """Multiply rows of A, one after another, by weights that stay where they are.

    Each core multiplies its block by its part of the row; the sum passes down each column of cores.
    The sums are the same bits as those of an undivided product.

    Parameters
    ----------
    products
        Result (m, n), as it leaves the last row of cores.
    arena, grid, a, a_rows, b, bias
        As in ``compute_shift``.
    first_column, last_column
        Columns of cores that work, in logical order, the last one not among them.
    """
    rows, inner = grid.row_place.size, b.line.size
    for j in range(first_column, last_column):
        first, width = b.bounds[j], b.bounds[j + 1] - b.bounds[j]
        if width == 0:
            continue
        sums = np.zeros((a_rows.size, width), np.float32)
        for i in range(rows):
            k, end = part_start(inner, rows, i), part_start(inner, rows, i + 1)
            left = np.empty((a_rows.size, end - k), np.float32)
            right = np.empty((end - k, width), np.float32)
            for r in range(a_rows.size):
                load_span(left[r], arena, grid, a, a_rows[r], k)
            for r in range(end - k):
                load_span(right[r], arena, grid, b, k + r, first)
            product_add(sums, left, right)
        if bias.line.size > 0:
            offset = np.empty(width, np.float32)
            load_span(offset, arena, grid, bias, grid.row_place[0], first)
            add_bias(sums, offset)
        products[:, first : first + width] = sums
