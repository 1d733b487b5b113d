"""Where stages live: rectangular regions of cores in a row of fabric, and layers to stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from wafer_emu.wafer import Wafer
from wafer_kernels.errors import UsageError

__all__ = ["Order", "Placement", "Region", "Stage", "place_regions", "place_stages", "split_layers"]

Order = Literal["serpentine", "folded-ring"]
SQUARE_SLACK = 0.1  # cores given up for a region shape closer to a square (assumed)


@dataclass(frozen=True)
class Region:
    """A rectangle of cores; ``row`` and ``column`` of its first core on the fabric."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def cores(self) -> int:
        """Number of cores."""
        return self.rows * self.columns

    @property
    def cells(self) -> tuple[slice, slice]:
        """Index of the region's cores in a plane of the fabric."""
        return (
            slice(self.row, self.row + self.rows),
            slice(self.column, self.column + self.columns),
        )

    def hops_to(self, other: Region) -> int:
        """Manhattan distance between the centres [hops], rounded up."""
        down = abs(2 * self.row + self.rows - 2 * other.row - other.rows)
        across = abs(2 * self.column + self.columns - 2 * other.column - other.columns)
        return -(-(down + across) // 2)

    def dies(self, wafer: Wafer) -> tuple[int, int]:
        """Rows and columns of dies that the region touches."""
        high, wide = wafer.die.core_rows, wafer.die.core_columns
        return (
            (self.row + self.rows - 1) // high - self.row // high + 1,
            (self.column + self.columns - 1) // wide - self.column // wide + 1,
        )


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: consecutive layers on a region."""

    index: int
    first_layer: int
    layers: int
    region: Region


@dataclass(frozen=True)
class Placement:
    """Stages on a wafer, in the order in which regions were handed out."""

    wafer: Wafer
    stages: tuple[Stage, ...]
    order: Order

    @property
    def cores_used(self) -> int:
        """Cores of all regions."""
        return sum(stage.region.cores for stage in self.stages)

    @property
    def cores_unused(self) -> int:
        """Cores that no region takes."""
        return self.wafer.cores - self.cores_used

    def hops(self) -> tuple[tuple[int, ...], ...]:
        """Distance between the regions of all pairs of stages [hops]."""
        regions = [stage.region for stage in self.stages]
        return tuple(tuple(a.hops_to(b) for b in regions) for a in regions)


def _unit(wafer: Wafer) -> tuple[int, int]:
    """Cores (rows, columns) that regions are made of: whole dies where a wafer has dies."""
    return (wafer.die.core_rows, wafer.die.core_columns) if wafer.dies > 1 else (1, 1)


def _cut_shape(wafer: Wafer, stages: int) -> tuple[int, int]:
    """Shape of ``stages`` equal regions: as many cores as can be, close to a square.

    A compute-shift product takes as many steps as the longer side, so that among the shapes within
    ``SQUARE_SLACK`` of the most cores the one with the shortest longer side is taken.
    """
    high, wide = _unit(wafer)
    unit_rows, unit_columns = wafer.core_rows // high, wafer.core_columns // wide
    shapes = []
    for down in range(1, min(stages, unit_rows) + 1):
        across = -(-stages // down)
        if across <= unit_columns:
            shapes.append((unit_rows // down * high, unit_columns // across * wide))
    if not shapes:
        raise UsageError(
            f"{stages} stages need {stages} regions, but {wafer.name} holds "
            f"{unit_rows * unit_columns} {'dies' if wafer.dies > 1 else 'cores'}: "
            "ask for fewer stages"
        )
    most = max(rows * columns for rows, columns in shapes)
    roomy = [shape for shape in shapes if shape[0] * shape[1] >= (1 - SQUARE_SLACK) * most]
    return min(roomy, key=lambda shape: (max(shape), -shape[0] * shape[1]))


def _serpentine(down: int, across: int) -> list[tuple[int, int]]:
    """Grid positions row by row, every second row backwards."""
    return [
        (row, column if row % 2 == 0 else across - 1 - column)
        for row in range(down)
        for column in range(across)
    ]


def _folded_ring(down: int, across: int, count: int) -> list[tuple[int, int]]:
    """Grid positions where stages k and k + N/2 are neighbours.

    Stages k and k + 1 are at most two apart, three where the serpentine turns, four on one row and
    where an odd number closes the ring.
    Pairs of neighbouring cells lie along a serpentine that the first half of the stages goes out
    on the even pairs and comes back on the odd ones; the second half does the same beside it.
    """
    if count == 1:
        return [(0, 0)]
    if down == 1:
        return [(row, column) for column, row in _folded_ring(across, down, count)]
    half, lanes = count // 2, -(-count // 2)
    path = [(2 * row, column) for row, column in _serpentine(down // 2, across)]
    if lanes > len(path):
        raise UsageError(
            f"a folded ring of {count} regions needs {lanes} pairs of neighbours, a grid of "
            f"{down}x{across} regions has {len(path)}: use --placement serpentine"
        )
    upper = path[:lanes][::2] + path[:lanes][1::2][::-1]
    lower = [(row + 1, column) for row, column in upper]
    return upper[:half] + lower[:half] + upper[half:]


def place_regions(
    wafer: Wafer,
    stages: int | None,
    shape: tuple[int, int] | None,
    most_stages: int,
    order: Order = "serpentine",
) -> list[Region]:
    """Cut the fabric into regions, one a stage.

    Parameters
    ----------
    wafer
        The wafer.
    stages
        Number of regions, None for as many as ``shape`` and ``most_stages`` allow.
    shape
        (rows, columns) of a region [cores], None for the largest that fit.
    most_stages
        Upper bound where ``stages`` is None: a stage needs a layer.
    order
        How consecutive stages lie: ``serpentine`` row by row, or ``folded-ring``.

    Raises
    ------
    UsageError
        If the fabric does not hold so many regions of that shape.
    """
    if shape is None:
        shape = _cut_shape(wafer, stages if stages is not None else most_stages)
    rows, columns = shape
    down, across = wafer.core_rows // rows, wafer.core_columns // columns
    if down * across == 0 or (stages is not None and stages > down * across):
        raise UsageError(
            f"{stages or 1} regions of {rows}x{columns} cores do not fit on {wafer.name}: its "
            f"fabric of {wafer.core_rows}x{wafer.core_columns} cores holds {down * across}; "
            "ask for fewer stages or a smaller region"
        )
    count = stages if stages is not None else min(most_stages, down * across)
    if order == "folded-ring":
        cells = _folded_ring(down, across, count)
    else:
        cells = _serpentine(down, across)
    return [Region(row * rows, column * columns, rows, columns) for row, column in cells[:count]]


def split_layers(
    layers: int, stages: int, cost: Callable[[int, int, int], int | None]
) -> list[int] | None:
    """Split consecutive layers so that the slowest stage is as fast as can be.

    Parameters
    ----------
    layers
        Number of layers.
    stages
        Number of stages, each of at least one layer.
    cost
        Cycles of (stage, first layer, number of layers), head and embedding included where they
        belong; None if a stage cannot hold them.

    Returns
    -------
    list of int or None
        Layers of each stage, among equally fast splits the most even one; None if none can be held.

    Raises
    ------
    UsageError
        If there are more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise UsageError(
            f"{stages} stages for {layers} layers: every stage needs a layer, so ask for at most "
            f"{layers}"
        )
    infinite = (math.inf, math.inf)
    most = min(layers - stages + 1, 2 * -(-layers // stages) + 1)  # no stage needs twice its share
    bound = _even_split(layers, stages, cost)
    # best[j]: (slowest stage, sum of squares) of layers 0..j-1 on the stages so far
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [infinite] * layers
    choice: list[list[int]] = []
    for stage in range(stages):
        following, chosen = [infinite] * (layers + 1), [0] * (layers + 1)
        for end in range(stage + 1, layers - (stages - 1 - stage) + 1):
            for count in range(1, min(most, end - stage) + 1):
                slowest, squares = best[end - count]
                if slowest == math.inf:
                    continue
                cycles = cost(stage, end - count, count)
                if cycles is None or cycles > bound:
                    break
                candidate = (max(slowest, cycles), squares + cycles * cycles)
                if candidate < following[end]:
                    following[end], chosen[end] = candidate, count
        best = following
        choice.append(chosen)
    if best[layers] == infinite:
        return None
    counts, end = [], layers
    for chosen in reversed(choice):
        counts.append(chosen[end])
        end -= chosen[end]
    return counts[::-1]


def _even_split(layers: int, stages: int, cost: Callable[[int, int, int], int | None]) -> float:
    """Slowest stage of an even split, the fewer layers last; infinite if it cannot be held."""
    share, more = divmod(layers, stages)
    slowest, first = 0.0, 0
    for stage in range(stages):
        number = share + (stage < more)
        cycles = cost(stage, first, number)
        slowest = max(slowest, math.inf if cycles is None else cycles)
        first += number
    return slowest


def place_stages(
    wafer: Wafer, regions: Sequence[Region], counts: Sequence[int], order: Order
) -> Placement:
    """Give each region its run of consecutive layers."""
    stages, first = [], 0
    for index, (region, layers) in enumerate(zip(regions, counts, strict=True)):
        stages.append(Stage(index, first, layers, region))
        first += layers
    return Placement(wafer, tuple(stages), order)
