"""MeshGEMM, Cannon and the least-common-multiple grid: from a product to its dataflow and back.

All three are compute-shift products on rings of cores; they differ in where the members of a ring
lie (so how far a shift goes) and in how k is cut. The costs of a step are worked out here, once per
run of like rows, run of like columns and interval of slices, for the kernel in compute_shift.py.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wafer_kernels._jit import kernel
from wafer_kernels.compute_shift import (
    FROM_EAST,
    FROM_SOUTH,
    OWN,
    TO_NORTH,
    TO_WEST,
    Shifts,
    last_starts,
)
from wafer_kernels.mesh import (
    COMMON_MULTIPLE,
    GemmTiming,
    GridCost,
    GridDetail,
    alignment_cycles,
    grid_padded_macs,
    part_size,
    ring_hops,
    ring_places,
    slice_starts,
)
from wafer_kernels.systolic import ceil_div, tile_cycles, transfer_cycles

__all__ = ["Axis", "ring_axis", "shift_gemm"]


class Axis(NamedTuple):
    """One side of the grid, in logical order: m or n dealt along it, and the ring that it forms."""

    part: NDArray[np.int64]  # (length,) elements of m or n at each member
    offset: NDArray[np.int64]  # (length,) its first slice
    place: NDArray[np.int64]  # (length,) physical
    hops: NDArray[np.int64]  # (length,) of the shift from member j + 1 to j
    rate: NDArray[np.int64]  # (length,) of the slowest link of that shift [byte/cycle]
    flight: NDArray[np.int64]  # (length,) hops, crossings and ramps of that shift [cycle]


class Cut(NamedTuple):
    """How k is cut into slices, and how many logical tiles one core holds."""

    slices: int
    short: int  # elements of a short slice
    longer: int  # slices that are one element longer; they come first
    m_tiles: int  # along m
    n_tiles: int


def ring_axis(
    grid: GridCost,
    algorithm: int,
    parts: NDArray[np.int64],
    slices: int,
    link_rate: NDArray[np.int64],
    link_extra: NDArray[np.int64],
) -> Axis:
    """Ring over a line of cores whose links have the given rates and extra cycles."""
    length = parts.size
    place, hops = ring_places(algorithm, length), ring_hops(algorithm, length)
    ends = np.sort(np.stack((place, np.roll(place, -1)), axis=1), axis=1)
    extra_before = np.concatenate(([0], np.cumsum(link_extra)))
    extra = extra_before[ends[:, 1]] - extra_before[ends[:, 0]]
    flight = hops * grid.hop_cycles + 2 * grid.ramp_cycles + extra
    unbounded = np.iinfo(np.int64).max
    bounds = np.append(np.where(link_rate > 0, link_rate, unbounded), unbounded)
    slowest = np.minimum.reduceat(bounds, ends.ravel())[::2]  # of links ends[0] .. ends[1] - 1
    rate = np.where(slowest < unbounded, slowest, 0)
    return Axis(parts, slice_starts(slices, length), place, hops, rate, flight)


def _cut(grid: GridCost, k: int, algorithm: int) -> Cut:
    if algorithm == COMMON_MULTIPLE:
        slices = lcm(grid.rows, grid.columns)
        return Cut(slices, ceil_div(k, slices), 0, slices // grid.rows, slices // grid.columns)
    slices = max(grid.rows, grid.columns)
    return Cut(slices, k // slices, k % slices, 1, 1)


def _parts(total: int, length: int, tiles: int, algorithm: int) -> NDArray[np.int64]:
    """Elements at each of `length` members; the least-common-multiple grid pads them all alike."""
    if algorithm == COMMON_MULTIPLE:
        return np.full(length, tiles * ceil_div(total, length * tiles), np.int64)
    return np.array([part_size(total, length, member) for member in range(length)], np.int64)


@kernel()
def _work(grid: GridCost, cut: Cut, turned: bool, row_part: int, k: int, column_part: int) -> int:
    """Cycles of a core's products in one step; `turned` if the grid's columns are the rows here."""
    m, n = (column_part, row_part) if turned else (row_part, column_part)
    product = tile_cycles(grid.core, m // cut.m_tiles, k, n // cut.n_tiles, grid.element_bytes)
    return cut.m_tiles * cut.n_tiles * product + grid.step_cycles


@kernel()
def _sent(grid: GridCost, moved_bytes: int, rate: int, ramp_bytes: int) -> int:
    """Serialisation of a tile on its link, or of both tiles of a core on its shared ramp."""
    cycles = transfer_cycles(moved_bytes, rate)
    if grid.shared_ramp == 1:
        cycles = max(cycles, transfer_cycles(ramp_bytes, grid.link_bytes_per_cycle))
    return cycles


def _run_bounds(axis: Axis, extra: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the members of an axis stop being alike; `extra` is (members, others)."""
    traits = np.stack((axis.part, axis.rate, np.roll(axis.rate, 1), axis.flight))
    breaks = (traits[:, 1:] != traits[:, :-1]).any(axis=0)
    breaks |= (extra[1:] != extra[:-1]).any(axis=1)
    return np.concatenate(([0], np.flatnonzero(breaks) + 1, [axis.part.size]))


@kernel()
def _step_costs(
    grid: GridCost,
    cut: Cut,
    turned: bool,
    rows: Axis,
    columns: Axis,
    extra: NDArray[np.int64],
    row_bounds: NDArray[np.int64],
    column_bounds: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Costs (row runs, 4, column runs, 5) [cycle] of the step recurrence."""
    costs = np.zeros((row_bounds.size - 1, 4, column_bounds.size - 1, 5), np.int64)
    x_moves, y_moves = columns.part.size > 1, rows.part.size > 1
    for row_run in range(row_bounds.size - 1):
        i = row_bounds[row_run]
        for run in range(column_bounds.size - 1):
            j = column_bounds[run]
            x_width = rows.part[i] * grid.element_bytes if x_moves else 0
            y_width = columns.part[j] * grid.element_bytes if y_moves else 0
            for interval in range(4):
                now = cut.short + (1 if interval < 2 else 0)
                then = cut.short + (1 if interval in (1, 2) else 0)
                ramp_now, ramp_then = (x_width + y_width) * now, (x_width + y_width) * then
                cost = costs[row_run, interval, run]
                if x_moves:
                    sent = _sent(grid, x_width * now, columns.rate[j], ramp_now)
                    cost[FROM_EAST] = sent + columns.flight[j]
                    cost[TO_WEST] = _sent(grid, x_width * then, columns.rate[j - 1], ramp_then)
                if y_moves:
                    sent = _sent(grid, y_width * now, rows.rate[i], ramp_now)
                    cost[FROM_SOUTH] = sent + rows.flight[i]
                    cost[TO_NORTH] = _sent(grid, y_width * then, rows.rate[i - 1], ramp_then)
                product = _work(grid, cut, turned, rows.part[i], then, columns.part[j])
                cost[OWN] = max(
                    product + extra[i, j], cost[FROM_EAST], cost[TO_WEST], cost[TO_NORTH]
                )
    return costs


def _shifts(
    grid: GridCost, cut: Cut, turned: bool, rows: Axis, columns: Axis, extra: NDArray[np.int64]
) -> Shifts:
    row_bounds, column_bounds = _run_bounds(rows, extra), _run_bounds(columns, extra.T)
    length, ring = rows.part.size, columns.part.size
    delay = np.zeros(length, np.int64)
    if length > 1:
        tiles = cut.n_tiles if turned else cut.m_tiles
        delay = np.diff(rows.offset, append=cut.slices) // tiles
    bounds = [0, min(cut.longer, 1), cut.longer, min(cut.longer + 1, ring), ring]
    return Shifts(
        steps=cut.slices,
        columns=ring,
        planes=max(1, int(delay.max())) + 1,
        slice_bounds=np.array(bounds if cut.longer > 0 else [0, 0, 0, 0, ring]),
        column_bounds=column_bounds,
        row_offset=rows.offset,
        row_delay=delay,
        row_run=np.repeat(np.arange(row_bounds.size - 1), np.diff(row_bounds)),
        costs=_step_costs(grid, cut, turned, rows, columns, extra, row_bounds, column_bounds),
    )


def _work_table(
    grid: GridCost, cut: Cut, turned: bool, rows: Axis, columns: Axis, k: int
) -> NDArray[np.int64]:
    """Cycles of a step on a slice of k elements by part of a row and of a column, no extras."""
    row_parts, column_parts = np.unique(rows.part), np.unique(columns.part)
    return np.array(
        [[_work(grid, cut, turned, p, k, q) for q in column_parts] for p in row_parts], np.int64
    )


@kernel()
def _finish_and_busy(
    cut: Cut,
    rows: Axis,
    columns: Axis,
    short_work: NDArray[np.int64],
    long_work: NDArray[np.int64],
    row_kind: NDArray[np.int64],
    column_kind: NDArray[np.int64],
    extra: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cycle of the last product's end, and cycles of work of each core in physical places."""
    finish, busy = np.empty_like(starts), np.empty_like(starts)
    for i in range(rows.part.size):
        for j in range(columns.part.size):
            short = short_work[row_kind[i], column_kind[j]]
            long = long_work[row_kind[i], column_kind[j]]
            last = (rows.offset[i] + columns.offset[j] + cut.slices - 1) % cut.slices
            work = long if last < cut.longer else short
            place = rows.place[i], columns.place[j]
            finish[place] = starts[i, j] + work + extra[i, j]
            steps = cut.longer * long + (cut.slices - cut.longer) * short
            busy[place] = steps + cut.slices * extra[i, j]
    return finish, busy


@kernel()
def _slices_before(cut: Cut, s: int) -> int:
    """Elements of k in slices 0..s-1 of the endless repetition of the slices."""
    turns, rest = s // cut.slices, s % cut.slices
    total = cut.slices * cut.short + cut.longer
    return turns * total + rest * cut.short + min(rest, cut.longer)


@kernel()
def _skew_hops(cut: Cut, lines: Axis, line_tiles: int, ring: Axis) -> int:
    """Element-hops of turning each line of cores by its own offset, the shorter way round."""
    total = 0
    for i in range(lines.part.size):
        for tile_row in range(line_tiles):  # logical lines of one line of cores
            turn = lines.offset[i] + tile_row
            for j in range(ring.part.size):
                border = ring.offset[(j + 1) % ring.part.size] + cut.slices
                if 2 * turn <= cut.slices:  # slices border .. border + turn - 1 go down to j
                    k = _slices_before(cut, border + turn) - _slices_before(cut, border)
                else:
                    up = cut.slices - turn
                    k = _slices_before(cut, border) - _slices_before(cut, border - up)
                width = lines.part[i] // line_tiles
                total += width * k * ring.hops[j]
    return total


def _slowest_shift(grid: GridCost, cut: Cut, lines: Axis, ring: Axis) -> int:
    """Cycles of the slowest shift of the alignment phase: the largest tile on each link."""
    if ring.part.size == 1:
        return 0
    k = cut.short + min(cut.longer, 1)
    moved = int(lines.part[0]) * k * grid.element_bytes
    shifts = zip(ring.rate.tolist(), ring.flight.tolist(), strict=True)
    return max(transfer_cycles(moved, rate) + flight for rate, flight in shifts)


def shift_gemm(
    grid: GridCost,
    detail: GridDetail,
    m: int,
    k: int,
    n: int,
    algorithm: int,
    *,
    aligned_a: bool,
    aligned_b: bool,
) -> GemmTiming:
    """Timing of C[m, n] = A[m, k] B[k, n] by MESHGEMM, CANNON or COMMON_MULTIPLE.

    Parameters are those of `wafer_kernels.gemm.gemm`, which checks them.
    """
    cut = _cut(grid, k, algorithm)
    y = ring_axis(
        grid,
        algorithm,
        _parts(m, grid.rows, cut.m_tiles, algorithm),
        cut.slices,
        detail.y_link_bytes_per_cycle,
        detail.y_link_extra_cycles,
    )
    x = ring_axis(
        grid,
        algorithm,
        _parts(n, grid.columns, cut.n_tiles, algorithm),
        cut.slices,
        detail.x_link_bytes_per_cycle,
        detail.x_link_extra_cycles,
    )
    turned = grid.rows > grid.columns  # the dataflow's columns are the longer side
    rows, columns = (x, y) if turned else (y, x)
    extra = detail.core_extra_cycles[np.ix_(y.place, x.place)]
    extra = np.ascontiguousarray(extra.T if turned else extra)

    a_shift, b_shift = _slowest_shift(grid, cut, y, x), _slowest_shift(grid, cut, x, y)
    alignment = alignment_cycles(
        grid, cut.slices, a_shift, b_shift, int(not aligned_a), int(not aligned_b)
    )
    starts = last_starts(_shifts(grid, cut, turned, rows, columns, extra), alignment)
    long_k = cut.short + min(cut.longer, 1)
    finish, busy = _finish_and_busy(
        cut,
        rows,
        columns,
        _work_table(grid, cut, turned, rows, columns, cut.short),
        _work_table(grid, cut, turned, rows, columns, long_k),
        np.unique(rows.part, return_inverse=True)[1],
        np.unique(columns.part, return_inverse=True)[1],
        extra,
        starts,
    )
    if turned:
        finish, busy = finish.T.copy(), busy.T.copy()

    held_m, held_n = int(y.part.sum()), int(x.part.sum())
    held_k = cut.slices * cut.short + cut.longer
    hops = held_k * (held_m * int(x.hops.sum()) + held_n * int(y.hops.sum()))
    if not aligned_a:
        hops += _skew_hops(cut, y, cut.m_tiles, x)
    if not aligned_b:
        hops += _skew_hops(cut, x, cut.n_tiles, y)
    padded = grid_padded_macs(
        grid.core,
        held_m,
        held_k,
        held_n,
        grid.rows * cut.m_tiles,
        cut.slices,
        grid.columns * cut.n_tiles,
    )
    return GemmTiming(
        cycles=int(finish.max()),
        alignment_cycles=alignment,
        steps=cut.slices,
        start_cycles=np.full((grid.rows, grid.columns), alignment, np.int64),
        finish_cycles=finish,
        busy_cycles=busy,
        useful_macs=m * k * n,
        padded_macs=padded,
        byte_hops=hops * grid.element_bytes,
    )
