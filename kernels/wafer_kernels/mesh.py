"""The compute-shift product C[m, n] = A[m, k] B[k, n] on a grid of cores: geometry and closed form.

Rows of A are dealt over the grid's rows, columns of B over its columns, and k is cut into
``S = max(rows, columns)`` slices. At step t the core of logical place (i, j) multiplies slice

    s(i, j, t) = (x_i + y_j + t) mod S,   x_i = floor(i S / rows),  y_j = floor(j S / columns),

so a slice of A reaches core j from core j + 1 after ``y_(j+1) - y_j`` steps, and a slice of B
reaches core i from core i + 1 after ``x_(i+1) - x_i`` steps: one step along the longer side of the
grid. Along the shorter side, whose cores share S slices, the slices wait evenly at all cores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wafer_kernels._jit import kernel
from wafer_kernels.systolic import CoreCost, ceil_div, padded_macs, tile_cycles, transfer_cycles

__all__ = [
    "CANNON",
    "COMMON_MULTIPLE",
    "MESHGEMM",
    "GemmTiming",
    "GridCost",
    "GridDetail",
    "alignment_cycles",
    "closed_form",
    "even_detail",
    "grid_padded_macs",
    "longest_shift_hops",
    "most_turns",
    "part_size",
    "ring_hops",
    "ring_places",
    "slice_starts",
]

MESHGEMM, CANNON, COMMON_MULTIPLE = 0, 1, 2


class GridCost(NamedTuple):
    """What the timing of a product on a grid of cores depends on."""

    rows: int
    columns: int
    core: CoreCost
    element_bytes: int
    step_cycles: int  # fixed cost of one step of a core
    link_bytes_per_cycle: int  # of a mesh link, and of the ramp of a core; 0 is unbounded
    hop_cycles: int  # from a router to the next
    ramp_cycles: int  # from a core to its router, or back
    shared_ramp: int  # 1: the A and B tiles that a core sends or receives share its one ramp
    routes: int = 24  # routes that a router can hold; a multicast from every core needs one each


class GridDetail(NamedTuple):
    """What differs from core to core and from link to link; see `even_detail`."""

    core_extra_cycles: NDArray[np.int64]  # (rows, columns) added to each step of a core
    x_link_bytes_per_cycle: NDArray[np.int64]  # (columns - 1,) links between columns c and c + 1
    x_link_extra_cycles: NDArray[np.int64]  # (columns - 1,) beyond a hop, e.g. a die crossing
    y_link_bytes_per_cycle: NDArray[np.int64]  # (rows - 1,)
    y_link_extra_cycles: NDArray[np.int64]  # (rows - 1,)


class GemmTiming(NamedTuple):
    """When each core of a grid works on one product; planes are (rows, columns) physical places."""

    cycles: int  # makespan: the alignment, then the steps until the last core is done
    alignment_cycles: int
    steps: int
    start_cycles: NDArray[np.int64]  # of the first step of each core
    finish_cycles: NDArray[np.int64]  # of its last product
    busy_cycles: NDArray[np.int64]  # products, their fixed costs and the core's extra cycles
    useful_macs: int
    padded_macs: int
    byte_hops: int  # bytes times links crossed, the alignment included

    @property
    def stall_cycles(self) -> NDArray[np.int64]:
        """Cycles between start and finish in which a core waits for tiles, links or buffers."""
        return self.finish_cycles - self.start_cycles - self.busy_cycles


def even_detail(grid: GridCost) -> GridDetail:
    """A grid whose cores are all alike, and its links too."""
    return GridDetail(
        np.zeros((grid.rows, grid.columns), np.int64),
        np.full(grid.columns - 1, grid.link_bytes_per_cycle, np.int64),
        np.zeros(grid.columns - 1, np.int64),
        np.full(grid.rows - 1, grid.link_bytes_per_cycle, np.int64),
        np.zeros(grid.rows - 1, np.int64),
    )


@kernel()
def part_size(total: int, parts: int, index: int) -> int:
    """Elements of part `index` of `total` dealt to `parts`: balanced, the first ones larger."""
    return total // parts + (1 if index < total % parts else 0)


def slice_starts(slices: int, length: int) -> NDArray[np.int64]:
    """First slice of each of `length` members that share `slices` evenly: floor(j S / length)."""
    return np.arange(length) * slices // length


@kernel()
def grid_padded_macs(
    core: CoreCost, m: int, k: int, n: int, m_parts: int, k_parts: int, n_parts: int
) -> int:
    """MACs that the arrays or lanes are occupied with, over all parts of m, k and n."""
    total = 0
    for m_longer in range(2):
        for k_longer in range(2):
            for n_longer in range(2):
                count = m % m_parts if m_longer else m_parts - m % m_parts
                count *= k % k_parts if k_longer else k_parts - k % k_parts
                count *= n % n_parts if n_longer else n_parts - n % n_parts
                part = m // m_parts + m_longer, k // k_parts + k_longer, n // n_parts + n_longer
                if min(part) > 0:
                    total += count * padded_macs(core, part[0], part[1], part[2])
    return total


def ring_places(algorithm: int, length: int) -> NDArray[np.int64]:
    """Physical place of each logical member of a ring on a line of cores.

    Cannon's ring keeps the order of the line, so its last link wraps over the whole line. MeshGEMM
    folds the ring: out over the even places, back over the odd ones, so neighbours are at most two
    places apart (WaferLLM, arXiv 2502.04563, INTERLEAVE).
    """
    places = np.arange(length)
    if algorithm == CANNON:
        return places
    return np.concatenate((places[::2], places[1::2][::-1]))


def ring_hops(algorithm: int, length: int) -> NDArray[np.int64]:
    """Hops from logical member j + 1 to j of a ring, for each j (the last receives from 0)."""
    places = ring_places(algorithm, length)
    hops: NDArray[np.int64] = np.abs(np.roll(places, -1) - places)
    return hops


@kernel()
def longest_shift_hops(algorithm: int, length: int) -> int:
    """Hops of the longest shift of a ring: the largest value of `ring_hops`."""
    return length - 1 if algorithm == CANNON else min(2, length - 1)


@kernel()
def most_turns(slices: int, lines: int) -> int:
    """Shifts that skew all lines at once: line i turns by floor(i S / lines), the shorter way."""
    middle = lines // 2
    before = middle * slices // lines
    after = (middle + 1) * slices // lines
    return max(min(before, slices - before), slices - after)


@kernel()
def alignment_cycles(
    grid: GridCost, slices: int, shift_a_cycles: int, shift_b_cycles: int, move_a: int, move_b: int
) -> int:
    """Cycles of the skew before step 0, all lines in lock-step at the cost of the slowest shift.

    `move_a` and `move_b` are 0 for an operand that is stored already skewed. A along X and B along
    Y turn at the same time, unless they share the ramp.
    """
    turn_a = most_turns(slices, grid.rows) * shift_a_cycles if move_a and grid.columns > 1 else 0
    turn_b = most_turns(slices, grid.columns) * shift_b_cycles if move_b and grid.rows > 1 else 0
    return turn_a + turn_b if grid.shared_ramp == 1 else max(turn_a, turn_b)


@kernel()
def closed_form(
    grid: GridCost,
    m: int,
    k: int,
    n: int,
    algorithm: int = MESHGEMM,
    aligned_a: int = 0,
    aligned_b: int = 1,
) -> int:
    """Makespan of MeshGEMM or Cannon on an even grid where compute hides every transfer.

    The core with the largest parts of m and n never waits, and nobody ends after it, if

    - the slowest arrival takes no longer than its shortest step D_min, and
    - ``ser <= D_min - (D_max - D_min) min(d, r, S - r)``: a receiver that is up to d slices ahead
      in the ring, r of the S slices being one element longer, has its buffer free in time.

    Returns
    -------
    int
        alignment + sum over slices of the largest core's steps [cycle]; -1 if a condition fails,
        then the dataflow kernel must decide.
    """
    slices = max(grid.rows, grid.columns)
    m_part, n_part = ceil_div(m, grid.rows), ceil_div(n, grid.columns)
    k_part, longer = ceil_div(k, slices), k % slices
    shortest = longest = (
        tile_cycles(grid.core, m_part, k_part, n_part, grid.element_bytes) + grid.step_cycles
    )
    if longer > 0:
        shortest = grid.step_cycles + tile_cycles(
            grid.core, m_part, k_part - 1, n_part, grid.element_bytes
        )
    steps = longer * longest + (slices - longer) * shortest

    bytes_a = m_part * k_part * grid.element_bytes if grid.columns > 1 else 0
    bytes_b = n_part * k_part * grid.element_bytes if grid.rows > 1 else 0
    send_a = transfer_cycles(bytes_a, grid.link_bytes_per_cycle)
    send_b = transfer_cycles(bytes_b, grid.link_bytes_per_cycle)
    flight_a = flight_b = 0
    if grid.columns > 1:
        hops = longest_shift_hops(algorithm, grid.columns)
        flight_a = hops * grid.hop_cycles + 2 * grid.ramp_cycles
    if grid.rows > 1:
        hops = longest_shift_hops(algorithm, grid.rows)
        flight_b = hops * grid.hop_cycles + 2 * grid.ramp_cycles
    send = max(send_a, send_b)
    if grid.shared_ramp == 1:
        send = transfer_cycles(bytes_a + bytes_b, grid.link_bytes_per_cycle)
    if slices > 1:
        shorter = min(grid.rows, grid.columns)
        delay = ceil_div(slices, shorter) if shorter > 1 else 1
        ahead = (longest - shortest) * min(delay, longer, slices - longer)
        if send + max(flight_a, flight_b) > shortest or send > shortest - ahead:
            return -1
    return steps + alignment_cycles(
        grid, slices, send_a + flight_a, send_b + flight_b, 1 - aligned_a, 1 - aligned_b
    )
