"""Products that use whole lines of cores: SUMMA, all-gather, and the transposed GEMM.

Broadcasts run along a row or column of cores. Where a line has more roots than a router holds
routes, a broadcast is relayed in software: each hop costs a pass through a core's ramp as well
(beta = 2 ramp + 1 cycles, Luczynski et al., arXiv 2404.15888).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wafer_kernels._jit import kernel
from wafer_kernels.gemm_shift import Axis, ring_axis
from wafer_kernels.mesh import (
    MESHGEMM,
    GemmTiming,
    GridCost,
    GridDetail,
    grid_padded_macs,
    part_size,
    slice_starts,
)
from wafer_kernels.systolic import tile_cycles, transfer_cycles, vector_cycles

__all__ = ["allgather_gemm", "broadcast_stage_cycles", "summa_gemm", "transposed_gemm"]


@kernel()
def broadcast_stage_cycles(grid: GridCost) -> int:
    """Cycles per hop of a broadcast: a hop in hardware, or a hop and a relay by a core."""
    roots = grid.rows + grid.columns
    relay = 2 * grid.ramp_cycles + 1 if roots > grid.routes else 0
    return grid.hop_cycles + relay


@kernel()
def _part_runs(total: int, parts: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The larger and the smaller parts of `total` elements dealt to `parts`: runs [first, last)."""
    return (0, total % parts), (total % parts, parts)


def _owners(slices: int, length: int) -> NDArray[np.int64]:
    """Member of a line that holds each slice (slices,)."""
    owners: NDArray[np.int64] = (
        np.searchsorted(slice_starts(slices, length), np.arange(slices), side="right") - 1
    )
    return owners


@kernel()
def _slowest_rate(rates: NDArray[np.int64]) -> int:
    """Rate of a flow over all links of a line; 0 is unbounded."""
    slowest = 0
    for rate in rates:
        if rate > 0 and (slowest == 0 or rate < slowest):
            slowest = rate
    return slowest


@kernel()
def _way(stage_cycles: int, extras: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cycles from member 0 of a line to each member, ramps left out (length,)."""
    way = np.zeros(extras.size + 1, np.int64)
    for link in range(extras.size):
        way[link + 1] = way[link] + stage_cycles + extras[link]
    return way


@kernel()
def _broadcast_cycles(
    grid: GridCost, a_elements: int, b_elements: int, a_rate: int, b_rate: int
) -> tuple[int, int]:
    """Serialisation of a tile of A on its row and of B on its column; 0 on a line of one core."""
    a_bytes = a_elements * grid.element_bytes if grid.columns > 1 else 0
    b_bytes = b_elements * grid.element_bytes if grid.rows > 1 else 0
    a_cycles, b_cycles = transfer_cycles(a_bytes, a_rate), transfer_cycles(b_bytes, b_rate)
    if grid.shared_ramp == 1:
        ramp = transfer_cycles(a_bytes + b_bytes, grid.link_bytes_per_cycle)
        return max(a_cycles, ramp), max(b_cycles, ramp)
    return a_cycles, b_cycles


@kernel()
def _summa(
    grid: GridCost,
    detail: GridDetail,
    row_owner: NDArray[np.int64],
    column_owner: NDArray[np.int64],
    m: int,
    k: int,
    n: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Start of the first step, finish of the last, and busy cycles (rows, columns)."""
    rows, columns = grid.rows, grid.columns
    slices = max(rows, columns)
    stage = broadcast_stage_cycles(grid)
    x_way = _way(stage, detail.x_link_extra_cycles)
    y_way = _way(stage, detail.y_link_extra_cycles)
    a_rate = _slowest_rate(detail.x_link_bytes_per_cycle)
    b_rate = _slowest_rate(detail.y_link_bytes_per_cycle)
    first, busy = np.zeros((rows, columns), np.int64), np.zeros((rows, columns), np.int64)
    ends = np.zeros((rows, columns), np.int64)
    row_ready, column_ready = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
    from_column, from_row = np.zeros(columns, np.int64), np.zeros(rows, np.int64)
    for t in range(slices):
        slice_k = part_size(k, slices, t)
        for j in range(columns):  # 0 at the owner: it only waits until its slice has left
            distance = abs(x_way[j] - x_way[column_owner[t]])
            from_column[j] = distance + 2 * grid.ramp_cycles if j != column_owner[t] else 0
        for i in range(rows):
            distance = abs(y_way[i] - y_way[row_owner[t]])
            from_row[i] = distance + 2 * grid.ramp_cycles if i != row_owner[t] else 0
        posted = np.zeros(columns, np.int64)
        for i in range(rows):
            row_part = part_size(m, rows, i)
            row_posted = 0
            for run_first, run_last in _part_runs(n, columns):
                part = part_size(n, columns, run_first)
                a_cycles, b_cycles = _broadcast_cycles(
                    grid, row_part * slice_k, part * slice_k, a_rate, b_rate
                )
                product = tile_cycles(grid.core, row_part, slice_k, part, grid.element_bytes)
                for j in range(run_first, run_last):
                    a_arrival = row_ready[i] + a_cycles + from_column[j]
                    b_arrival = column_ready[j] + b_cycles + from_row[i]
                    start = max(ends[i, j], a_arrival, b_arrival)
                    work = product + grid.step_cycles + detail.core_extra_cycles[i, j]
                    ends[i, j] = start + work
                    busy[i, j] += work
                    row_posted = max(row_posted, start)
                    posted[j] = max(posted[j], start)
                    if t == 0:
                        first[i, j] = start
            row_ready[i] = row_posted
        column_ready = posted
    return first, ends, busy


def summa_gemm(grid: GridCost, detail: GridDetail, m: int, k: int, n: int) -> GemmTiming:
    """SUMMA: at step t the owners of slice t broadcast it along their row and their column.

    Cores post the buffers of slice t + 1 when they start step t; a broadcast moves once its whole
    line has posted, and overlaps the products of step t.
    """
    slices = max(grid.rows, grid.columns)
    row_owner, column_owner = _owners(slices, grid.rows), _owners(slices, grid.columns)
    first, ends, busy = _summa(grid, detail, row_owner, column_owner, m, k, n)
    return GemmTiming(
        cycles=int(ends.max()),
        alignment_cycles=0,
        steps=slices,
        start_cycles=first,
        finish_cycles=ends,
        busy_cycles=busy,
        useful_macs=m * k * n,
        padded_macs=grid_padded_macs(grid.core, m, k, n, grid.rows, slices, grid.columns),
        byte_hops=grid.element_bytes * (m * k * (grid.columns - 1) + k * n * (grid.rows - 1)),
    )


@kernel()
def _allgather(
    grid: GridCost, detail: GridDetail, m: int, k: int, n: int, move_b: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and duration of the one product of each core (rows, columns)."""
    rows, columns = grid.rows, grid.columns
    stage = broadcast_stage_cycles(grid)
    x_way = _way(stage, detail.x_link_extra_cycles)
    y_way = _way(stage, detail.y_link_extra_cycles)
    a_rate = _slowest_rate(detail.x_link_bytes_per_cycle)
    b_rate = _slowest_rate(detail.y_link_bytes_per_cycle)
    starts, busy = np.zeros((rows, columns), np.int64), detail.core_extra_cycles.copy()
    for i in range(rows):
        for j in range(columns):
            row_part, column_part = part_size(m, rows, i), part_size(n, columns, j)
            b_missing = (k - part_size(k, rows, i)) * column_part if move_b else 0
            a_missing = (k - part_size(k, columns, j)) * row_part
            a_cycles, b_cycles = _broadcast_cycles(grid, a_missing, b_missing, a_rate, b_rate)
            if columns > 1:
                a_cycles += max(x_way[j], x_way[-1] - x_way[j]) + 2 * grid.ramp_cycles
            if rows > 1 and move_b:
                b_cycles += max(y_way[i], y_way[-1] - y_way[i]) + 2 * grid.ramp_cycles
            starts[i, j] = max(a_cycles, b_cycles)
            product = tile_cycles(grid.core, row_part, k, column_part, grid.element_bytes)
            busy[i, j] += product + grid.step_cycles
    return starts, busy


def allgather_gemm(
    grid: GridCost, detail: GridDetail, m: int, k: int, n: int, *, aligned_b: bool
) -> GemmTiming:
    """Gather the whole row panel of A at each core (and the column panel of B), then multiply once.

    With `aligned_b` the column panel of B (the weights) is resident in each core. A core takes in
    its panel through its one ramp, and the farthest tile comes last.
    """
    starts, busy = _allgather(grid, detail, m, k, n, not aligned_b)
    ends = starts + busy
    b_byte_hops = 0 if aligned_b else k * n * (grid.rows - 1)
    return GemmTiming(
        cycles=int(ends.max()),
        alignment_cycles=0,
        steps=1,
        start_cycles=starts,
        finish_cycles=ends,
        busy_cycles=busy,
        useful_macs=m * k * n,
        padded_macs=grid_padded_macs(grid.core, m, k, n, grid.rows, 1, grid.columns),
        byte_hops=grid.element_bytes * (m * k * (grid.columns - 1) + b_byte_hops),
    )


@kernel()
def _reduce_row(
    grid: GridCost,
    detail: GridDetail,
    root: int,
    sent_cycles: int,
    add_cycles: int,
    left: NDArray[np.int64],
    ends: NDArray[np.int64],
    busy: NDArray[np.int64],
) -> None:
    """Chains from both ends of a row to the root; `ends` of the products become ends of the sums.

    A core adds the partial sums of its neighbour to its own, then passes them on, once those of
    the last step have left it (`left`, updated).
    """
    flight = sent_cycles + grid.hop_cycles + 2 * grid.ramp_cycles
    for j in range(1, root + 1):
        departs = max(ends[j - 1], left[j - 1])
        left[j - 1] = departs + sent_cycles
        arrival = departs + flight + detail.x_link_extra_cycles[j - 1]
        ends[j] = max(ends[j], arrival) + add_cycles
        busy[j] += add_cycles
    for j in range(ends.size - 2, root - 1, -1):
        departs = max(ends[j + 1], left[j + 1])
        left[j + 1] = departs + sent_cycles
        arrival = departs + flight + detail.x_link_extra_cycles[j]
        ends[j] = max(ends[j], arrival) + add_cycles
        busy[j] += add_cycles


@kernel()
def _transposed(
    grid: GridCost,
    detail: GridDetail,
    ring: Axis,
    root_of: NDArray[np.int64],
    k: int,
    n: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Finish and busy cycles (rows, columns), rows in the order of the ring."""
    rows, columns = grid.rows, grid.columns
    slices = root_of.size
    x_rate = _slowest_rate(detail.x_link_bytes_per_cycle)
    planes = (slices + rows - 1) // rows + 1
    starts = np.zeros((planes, rows, columns), np.int64)
    ends, busy = np.zeros((rows, columns), np.int64), np.zeros((rows, columns), np.int64)
    sums_left = np.zeros((rows, columns), np.int64)
    for t in range(slices):
        for i in range(rows):
            row_part = ring.part[i]
            s = (ring.offset[i] + t) % slices
            slice_n, left_n = part_size(n, slices, s), part_size(n, slices, (s - 1) % slices)
            delay = (ring.offset[i + 1] if i + 1 < rows else slices) - ring.offset[i]
            now, before = starts[t % planes, i], starts[(t - 1) % planes, i]
            north = starts[(t - 1) % planes, i - 1]
            then = starts[(t - delay) % planes, i]
            south = starts[(t - delay) % planes, (i + 1) % rows]
            extra = detail.core_extra_cycles[ring.place[i]]
            for first, last in _part_runs(k, columns):
                part = part_size(k, columns, first)
                width = part * grid.element_bytes if rows > 1 else 0
                left = transfer_cycles(left_n * width, ring.rate[i - 1])
                sent = transfer_cycles(slice_n * width, ring.rate[i]) + ring.flight[i]
                work = grid.step_cycles + tile_cycles(
                    grid.core, row_part, part, slice_n, grid.element_bytes
                )
                for j in range(first, last):
                    start = ends[i, j]
                    if rows > 1 and t > 0:
                        start = max(start, max(before[j], north[j]) + left)
                    if rows > 1 and t >= delay:
                        start = max(start, max(then[j], south[j]) + sent)
                    now[j] = start
                    ends[i, j] = start + work + extra[j]
                    busy[i, j] += work + extra[j]
            partial = transfer_cycles(row_part * slice_n * grid.element_bytes, x_rate)
            add = 0
            if grid.core.lanes > 0:
                add = vector_cycles(grid.core.lanes, grid.core.issue_millicycles, row_part, slice_n)
            _reduce_row(grid, detail, root_of[s], partial, add, sums_left[i], ends[i], busy[i])
    return ends, busy


def transposed_gemm(grid: GridCost, detail: GridDetail, m: int, k: int, n: int) -> GemmTiming:
    """C[m, n] = A[m, k] B[n, k]^T: B shifts along Y, partial sums of C add up along X.

    A stays (m over rows, k over columns) and n is cut into slices that circulate over the rows, so
    nothing is aligned. Each step ends with chains of adds from both ends of a row to the column
    that keeps this slice of C; successive chains follow each other like a pipeline.
    """
    slices = max(grid.rows, grid.columns)
    parts = np.array([part_size(m, grid.rows, i) for i in range(grid.rows)], np.int64)
    rates, extras = detail.y_link_bytes_per_cycle, detail.y_link_extra_cycles
    ring = ring_axis(grid, MESHGEMM, parts, slices, rates, extras)
    root_of = _owners(slices, grid.columns)
    ring_ends, ring_busy = _transposed(grid, detail, ring, root_of, k, n)
    ends, busy = np.empty_like(ring_ends), np.empty_like(ring_busy)
    ends[ring.place], busy[ring.place] = ring_ends, ring_busy
    ring_hops = int(ring.hops.sum())
    return GemmTiming(
        cycles=int(ends.max()),
        alignment_cycles=0,
        steps=slices,
        start_cycles=np.zeros_like(ends),
        finish_cycles=ends,
        busy_cycles=busy,
        useful_macs=m * k * n,
        padded_macs=grid_padded_macs(grid.core, m, k, n, grid.rows, grid.columns, slices),
        byte_hops=grid.element_bytes * (n * k * ring_hops + m * n * (grid.columns - 1)),
    )
