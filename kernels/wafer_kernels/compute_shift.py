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
BLOCK_ROWS = 60  # at 720 columns 690 KB, of which a step meets half: a core's L2 cache
PARALLEL_CORES = 100_000  # below, threads save milliseconds and lose far more on a busy machine


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
    starts: NDArray[np.int64],
    now: int,
    before: int,
    then: int | None,
    i: int,
    north: int,
    south: int,
    first: int,
    last: int,
    own: int,
    from_east: int,
    to_west: int,
    from_south: int,
    to_north: int,
) -> None:
    """Starts of the cores at places first..last - 1 of row i.

    `now`, `before` and `then` are the planes of steps t, t - 1 and t - d. `then` is None, which
    saves a load and a maximum, where it is `before` and `own` also covers this core's own wait
    for B.
    """
    one = np.uint64(1)  # unsigned places need no wrap-around, which would keep the loop scalar
    for place in range(np.uint64(first), np.uint64(last)):
        j = np.uint64(place)
        product, west = starts[before, i, j] + own, starts[before, i, j - one] + to_west
        along_row = max(product, west, starts[before, i, j + one] + from_east)
        if then is None:
            posted = starts[before, south, j]
        else:
            posted = max(starts[then, i, j], starts[then, south, j])
        along_column = max(starts[before, north, j] + to_north, posted + from_south)
        starts[now, i, j] = max(along_row, along_column)


@kernel()
def _advance_row(
    shifts: Shifts,
    starts: NDArray[np.int64],
    t: int,
    then: int | None,
    i: int,
    north: int,
    south: int,
    arrives: bool,
) -> None:
    """Step t of row i, one call for each run of like costs, from place 0 on."""
    planes, columns, row_run = starts.shape[0], shifts.columns, shifts.row_run[i]
    now, before = t % planes, (t - 1) % planes
    base = (shifts.row_offset[i] + t) % columns
    interval = run = first = 0
    while first < columns:
        s = base + first  # the slice at place `first`
        if s >= columns:
            s -= columns
        if s == 0:
            interval = 0
        while shifts.slice_bounds[interval + 1] <= s:
            interval += 1
        run_end = shifts.column_bounds[run + 1]
        last = min(first + shifts.slice_bounds[interval + 1] - s, run_end)
        own = shifts.costs[row_run, interval, run, OWN]
        from_south = shifts.costs[row_run, interval, run, FROM_SOUTH] if arrives else 0
        _advance(
            starts,
            now,
            before,
            then,
            i,
            north,
            south,
            first + 1,
            last + 1,
            max(own, from_south) if then is None else own,
            shifts.costs[row_run, interval, run, FROM_EAST],
            shifts.costs[row_run, interval, run, TO_WEST],
            from_south,
            shifts.costs[row_run, interval, run, TO_NORTH],
        )
        first = last
        if last == run_end:
            run += 1
    starts[now, i, 0], starts[now, i, columns + 1] = starts[now, i, columns], starts[now, i, 1]


@kernel()
def _advance_step(
    shifts: Shifts,
    starts: NDArray[np.int64],
    t: int,
    first_row: int | np.int64,
    last_row: int | np.int64,
) -> None:
    """Step t of rows first..last - 1 (mod rows) of `starts` (planes, rows, columns + 2)."""
    planes, rows = starts.shape[0], starts.shape[1]
    for row in range(first_row, last_row):
        i = row % rows
        delay, north, south = shifts.row_delay[i], (row - 1) % rows, (row + 1) % rows
        if delay == 1:
            _advance_row(shifts, starts, t, None, i, north, south, True)
        elif 0 < delay <= t:
            _advance_row(shifts, starts, t, (t - delay) % planes, i, north, south, True)
        elif delay > 0:  # a core still multiplies what it held at the start
            _advance_row(shifts, starts, t, None, i, north, i, False)
        else:
            _advance_row(shifts, starts, t, None, i, i, i, False)


@kernel()
def _step_in_turn(shifts: Shifts, starts: NDArray[np.int64]) -> None:
    for t in range(1, shifts.steps):
        _advance_step(shifts, starts, t, 0, shifts.row_run.size)


@parallel_kernel()
def _step_in_parallel(shifts: Shifts, starts: NDArray[np.int64], block_rows: int) -> None:
    """Blocks of rows go several steps ahead, each on one thread and in its cache.

    A step of a row needs the last one of its two neighbours. So the blocks first go ahead on
    their own, with one row less at either end in every step; then the rows around each border
    follow, with one row more to either side in every step. Nothing is worked out twice. What a
    row needs has not been overwritten: no neighbour is more than one step ahead, and the planes
    hold one step more than the longest delay.
    """
    rows = shifts.row_run.size
    blocks = max(rows // block_rows, 1)
    depth = rows // blocks // 2 + 1  # steps until nothing is left of a block
    for t in range(1, shifts.steps, depth):
        ahead = min(depth, shifts.steps - t)
        for block in prange(blocks):
            border = np.int64(block) * rows // blocks
            next_border = (np.int64(block) + 1) * rows // blocks
            for step in range(ahead):
                _advance_step(shifts, starts, t + step, border + step, next_border - step)
        for block in prange(blocks):
            border = np.int64(block) * rows // blocks
            for step in range(1, ahead):
                _advance_step(shifts, starts, t + step, border - step, border + step)


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
        _step_in_parallel(shifts, starts, BLOCK_ROWS)
    return starts[(shifts.steps - 1) % planes, :, 1:-1].copy()
