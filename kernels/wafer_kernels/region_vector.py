"""Element-wise work on rows of a region's matrices: norms, rotary embedding, gates, sums.

A row of a matrix lies on a line of cores. A sum over it passes from core to core and continues in
the order of the columns, so it has the bits of the sum over the whole row. Rows may move to
another line of cores where source and target are dealt differently.
"""

from __future__ import annotations

import numpy as np

from wafer_kernels import numeric
from wafer_kernels._jit import kernel
from wafer_kernels.numeric import (
    Float32,
    Int64,
    rms_scale,
    rotate_halves,
    rotate_pairs,
    square_sums_add,
)
from wafer_kernels.region import Bytes, Grid, Kind, Matrix, load, load_span, store, store_span

__all__ = ["add", "gate", "norm", "rotate"]


@kernel()
def _keep_sum(
    total: Float32,
    arena: Bytes,
    grid: Grid,
    matrix: Matrix,
    row: int,
    group: int,
    groups: int,
    work: Int64,
    kept: Int64,
) -> None:
    """Keep the sum of a row's group (1,) on every core that has columns of it; read the last."""
    width, bounds, line = matrix.bounds[-1], matrix.bounds, matrix.line[row]
    first = group * (width // groups)
    for j in range(grid.column_place.size):
        low, high = max(bounds[j], first), min(bounds[j + 1], first + width // groups)
        if low >= high:
            continue
        local = line * grid.column_place.size + grid.column_place[j]
        met = group - bounds[j] // (width // groups)
        slot = matrix.place[row] * kept[grid.column_place[j]] + met
        memory = arena[grid.first_core + local]
        store(memory, work[local] + 4 * slot, Kind.FLOAT32, total)
        load(total, memory, work[local] + 4 * slot, Kind.FLOAT32)


@kernel()
def norm(
    arena: Bytes,
    grid: Grid,
    source: Matrix,
    target: Matrix,
    weight: Matrix,
    groups: int,
    width: int,
    epsilon: float,
    work: Int64,
    kept: Int64,
) -> None:
    """Scale the first ``width`` columns of each of equal groups by their root mean square.

    The columns behind stay as they are; ``target`` may be ``source``. ``weight`` has a copy on
    every line of cores. Sums of squares lie at address ``work`` of each core (core,) [byte], in
    float32: ``kept`` of them (column of cores,) for each of its rows of the target.
    """
    columns = source.bounds[-1]
    for row in range(target.line.size):
        values = np.empty(columns, np.float32)
        scale = np.empty(width, np.float32)
        load_span(values, arena, grid, source, row, 0)
        load_span(scale, arena, grid, weight, target.line[row], 0)
        for group in range(groups):
            first = group * (columns // groups)
            part = values[first : first + width].reshape(1, width)
            sums = np.zeros(1, np.float32)
            square_sums_add(sums, part)
            _keep_sum(sums, arena, grid, target, row, group, groups, work, kept)
            rms_scale(part, part, sums, scale, width, epsilon)
        store_span(arena, grid, target, row, 0, values)


@kernel()
def rotate(
    arena: Bytes,
    grid: Grid,
    target: Matrix,
    heads: int,
    cosine: Float32,
    sine: Float32,
    interleaved: bool,
) -> None:
    """Turn the last ``2 * cosine.shape[1]`` columns of every head, in place (row, plane)."""
    columns = target.bounds[-1]
    width, stride = 2 * cosine.shape[1], columns // heads
    for row in range(target.line.size):
        values = np.empty(columns, np.float32)
        load_span(values, arena, grid, target, row, 0)
        turned = values.reshape(1, heads, stride)[:, :, stride - width :]
        if interleaved:
            rotate_pairs(turned, cosine[row : row + 1], sine[row : row + 1])
        else:
            rotate_halves(turned, cosine[row : row + 1], sine[row : row + 1])
        store_span(arena, grid, target, row, 0, values)


@kernel()
def gate(
    arena: Bytes, grid: Grid, gated: Matrix, up: Matrix, target: Matrix, activation: int
) -> None:
    """Multiply by the activated gate, ``target = f(gated) * up``."""
    columns = target.bounds[-1]
    for row in range(target.line.size):
        left, right = np.empty((1, columns), np.float32), np.empty((1, columns), np.float32)
        load_span(left[0], arena, grid, gated, row, 0)
        load_span(right[0], arena, grid, up, row, 0)
        numeric.gate(left, left, right, activation)
        store_span(arena, grid, target, row, 0, left[0])


@kernel()
def add(arena: Bytes, grid: Grid, source: Matrix, target: Matrix) -> None:
    """Add a matrix to another of its shape, ``target += source``."""
    columns = target.bounds[-1]
    for row in range(target.line.size):
        total, term = np.empty((1, columns), np.float32), np.empty((1, columns), np.float32)
        load_span(total[0], arena, grid, target, row, 0)
        load_span(term[0], arena, grid, source, row, 0)
        numeric.add(total, term)
        store_span(arena, grid, target, row, 0, total[0])
