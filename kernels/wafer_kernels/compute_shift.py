"""Dataflow of a compute-shift product: when each core of a grid starts each step.

Semantics. At the start of a step a core posts the receives of its next tiles into its second
buffers and sends its own tiles on; a send moves once both ends have started that step. The next
step starts when the product is done, the sends have left and the next tiles have arrived. So with
``a`` the start of step t at logical place (i, j), E its sender of A, W its receiver of A, S its
sender of B (which used that tile d steps earlier) and N its receiver of B,

    a[t] = max(a[t-1] + own,                 product, sends and own arrivals of the last step
               a_E[t-1] + from_east,         A arrives: serialisation, hops and ramps
               a_W[t-1] + to_west,           A has left: serialisation, once W has room
               max(a_S[t-d], a[t-d]) + from_south,
               a_N[t-1] + to_north).

The grid is oriented so that its columns are the longer side: ``columns`` slices circulate along a
row of cores one core per step, and along a column of cores with a delay d >= 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wafer_kernels._jit import kernel, parallel_kernel, prange

__all__ = [
    "FROM_EAST",
    "FROM_SOUTH",
    "OWN",
    "PARALLEL_CORES",
    "TO_NORTH",
    "TO_WEST",
    "Shifts",
    "last_starts",
]

OWN, FROM_EAST, TO_WEST, FROM_SOUTH, TO_NORTH = range(5)
BLOCK_ROWS, BLOCK_STEPS = 90, 8  # threads meet once in 8 steps, 9 % of the rows are done twice
PARALLEL_CORES = 16_384  # below this many cores a step is shorter than waking the threads


class Shifts(NamedTuple):
    """A compute-shift product in logical places.

    Slice s of a core at step t is ``(row_offset + j + t) mod columns``. The costs of a step are
    constant over a run of rows, a run of columns and an interval of slices.
    """

    steps: int
    columns: int
    planes: int  # of starts kept: the longest delay + 1
    slice_bounds: NDArray[np.int64]  # (5,) by the lengths of slices s and s - 1: four intervals
    column_bounds: NDArray[np.int64]  # (runs + 1,)
    row_offset: NDArray[np.int64]  # (rows,)
    row_delay: NDArray[np.int64]  # (rows,) d of the tiles that arrive at this row; 0: none arrive
    row_run: NDArray[np.int64]  # (rows,)
    costs: NDArray[np.int64]  # (row runs, 4, column runs, 5) [cycle], by OWN ... TO_NORTH


@kernel()
def _advance(
    start: NDArray[np.int64],
    here: NDArray[np.int64],
    north: NDArray[np.int64],
    here_then: NDArray[np.int64],
    south_then: NDArray[np.int64],
    first: int,
    last: int,
    own: int,
    from_east: int,
    to_west: int,
    from_south: int,
    to_north: int,
) -> None:
    """Starts of the cores at places first..last - 1 of rows with a halo."""
    one = np.uint64(1)  # unsigned places need no wrap-around, which would keep the loop scalar
    for place in range(np.uint64(first), np.uint64(last)):
        j = np.uint64(place)
        along_row = max(here[j] + own, here[j - one] + to_west, here[j + one] + from_east)
        arrival = max(here_then[j], south_then[j]) + from_south
        start[j] = max(along_row, north[j] + to_north, arrival)


@kernel()
def _advance_row(
    shifts: Shifts, t: int, i: int, starts: NDArray[np.int64], at: int, north_at: int, south_at: int
) -> None:
    """Step t of row i, which lies at row `at` of `starts` (planes, any rows, columns + 2)."""
    planes = starts.shape[0]
    columns, costs = shifts.columns, shifts.costs
    delay, row_run = shifts.row_delay[i], shifts.row_run[i]
    start, here = starts[t % planes, at], starts[(t - 1) % planes, at]
    north = here_then = south_then = here
    if delay > 0:
        north = starts[(t - 1) % planes, north_at]
    arrives = 0 < delay <= t  # before, a core multiplies what it held at the start
    if arrives:
        here_then = starts[(t - delay) % planes, at]
        south_then = starts[(t - delay) % planes, south_at]
    base = (shifts.row_offset[i] + t) % columns
    for interval in range(4):
        low = shifts.slice_bounds[interval] - base
        high = shifts.slice_bounds[interval + 1] - base
        for run in range(shifts.column_bounds.size - 1):
            for wrapped in (0, columns):
                first = max(low + wrapped, shifts.column_bounds[run])
                last = min(high + wrapped, shifts.column_bounds[run + 1])
                if first < last:
                    _advance(
                        start,
                        here,
                        north,
                        here_then,
                        south_then,
                        first + 1,
                        last + 1,
                        costs[row_run, interval, run, OWN],
                        costs[row_run, interval, run, FROM_EAST],
                        costs[row_run, interval, run, TO_WEST],
                        costs[row_run, interval, run, FROM_SOUTH] if arrives else 0,
                        costs[row_run, interval, run, TO_NORTH],
                    )
    start[0], start[columns + 1] = start[columns], start[1]


@kernel()
def _step_in_turn(shifts: Shifts, starts: NDArray[np.int64]) -> None:
    rows = shifts.row_run.size
    for t in range(1, shifts.steps):
        for i in range(rows):
            _advance_row(shifts, t, i, starts, i, (i - 1) % rows, (i + 1) % rows)


@kernel()
def _advance_block(
    shifts: Shifts,
    first_step: int,
    last_step: int,
    first_row: int | np.int64,
    last_row: int | np.int64,
    before: NDArray[np.int64],
    after: NDArray[np.int64],
) -> None:
    """Steps first..last - 1 of a block of rows, with as many neighbours as these steps can see.

    The neighbours are worked out here as well as in their own blocks, so that blocks need to meet
    only once in several steps, and a block stays in a core's cache.
    """
    planes, rows, width = before.shape
    reach = last_step - first_step
    height = last_row - first_row + 2 * reach
    starts = np.empty((planes, height, width), np.int64)
    for plane in range(planes):
        for at in range(height):
            starts[plane, at] = before[plane, (first_row - reach + at) % rows]
    for t in range(first_step, last_step):
        seen = t - first_step + 1
        for at in range(seen, height - seen):
            row = (first_row - reach + at) % rows
            _advance_row(shifts, t, row, starts, at, at - 1, at + 1)
    after[:, first_row:last_row] = starts[:, reach : height - reach]


@parallel_kernel()
def _step_in_parallel(
    shifts: Shifts, before: NDArray[np.int64], after: NDArray[np.int64]
) -> NDArray[np.int64]:
    rows = shifts.row_run.size
    blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    for first_step in range(1, shifts.steps, BLOCK_STEPS):
        last_step = min(first_step + BLOCK_STEPS, shifts.steps)
        for block in prange(blocks):
            first_row = np.int64(block) * rows // blocks
            last_row = (np.int64(block) + 1) * rows // blocks
            _advance_block(shifts, first_step, last_step, first_row, last_row, before, after)
        before, after = after, before
    return before


def last_starts(shifts: Shifts, first_start: int) -> NDArray[np.int64]:
    """Start of the last step of each core, over threads where the grid is worth it.

    Parameters
    ----------
    shifts
        The product; its `columns` are the longer side of the grid.
    first_start
        When every core starts step 0 [cycle].

    Returns
    -------
    NDArray[np.int64]
        (rows, columns) in logical places [cycle].
    """
    rows, columns, planes = shifts.row_run.size, shifts.columns, shifts.planes
    starts = np.full((planes, rows, columns + 2), first_start, np.int64)
    if rows * columns < PARALLEL_CORES:
        _step_in_turn(shifts, starts)
    else:
        starts = _step_in_parallel(shifts, starts, np.empty_like(starts))
    return starts[(shifts.steps - 1) % planes, :, 1:-1].copy()
