"""Links between the regions of stages: routes over a grid of cells, what each link carries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wafer_emu.placement import Region
from wafer_emu.wafer import Wafer
from wafer_kernels.noc import Links

__all__ = ["RegionLinks"]

Int64 = npt.NDArray[np.int64]
SHARERS = 2520  # a link's grains divide by any number of flows up to ten
MOST_GRAINS = 2**60  # of a flow, and of a link a cycle times its flows: int64 holds twice that
Edge = tuple[Region, Region]


class RegionLinks:
    """Directed links between neighbouring cells of the grid that the regions are cells of."""

    def __init__(self, wafer: Wafer, regions: Sequence[Region]) -> None:
        self._wafer, self._regions = wafer, regions

    def route(self, source: int, target: int) -> list[Edge]:
        """Links from one region to another: along the row of cells first, then along a column."""
        here, there = self._regions[source], self._regions[target]
        edges = []
        while here != there:
            row, column = here.row, here.column
            if column != there.column:
                column += here.columns if there.column > column else -here.columns
            else:
                row += here.rows if there.row > row else -here.rows
            following = Region(row, column, here.rows, here.columns)
            edges.append((here, following))
            here = following
        return edges

    def carries(self, edge: Edge) -> Fraction:
        """Bytes a cycle between two neighbouring cells: links across the side, or dies' edges."""
        wafer, (here, there) = self._wafer, edge
        vertical = here.column == there.column
        rate = Fraction((here.columns if vertical else here.rows) * wafer.link.bytes_per_cycle)
        if wafer.die_link is None or wafer.dies == 1:
            return rate
        dies = here.dies(wafer)[1 if vertical else 0]
        edges = Fraction(dies * wafer.die_link.bytes_per_second, wafer.core.clock_hz)
        return min(rate, edges)

    def rate(self, source: int, target: int) -> Fraction:
        """Bytes a cycle of a transfer that shares no link."""
        return min(self.carries(edge) for edge in self.route(source, target))

    def latency(self, source: int, target: int) -> int:
        """Cycles from the last byte to its arrival: hops, ramps, crossings of dies."""
        if source == target:
            return 0
        wafer, a, b = self._wafer, self._regions[source], self._regions[target]
        latency = a.hops_to(b) * wafer.link.hop_cycles + 2 * wafer.link.ramp_cycles
        if wafer.die_link is None:
            return latency
        crossed = abs(a.row - b.row) // wafer.die.core_rows
        crossed += abs(a.column - b.column) // wafer.die.core_columns
        return latency + crossed * math.ceil(wafer.die_link.latency_seconds * wafer.core.clock_hz)

    def transfer_cycles(self, moved_bytes: int, source: int, target: int) -> int:
        """Cycles of a transfer that shares no link."""
        if moved_bytes == 0 or source == target:
            return 0
        return math.ceil(moved_bytes / self.rate(source, target)) + self.latency(source, target)

    @cached_property
    def edges(self) -> list[Edge]:
        """All links of any route, in the order of the routes."""
        stages = range(len(self._regions))
        return list(dict.fromkeys(e for a in stages for b in stages for e in self.route(a, b)))

    def shared(self, most_bytes: int, contention: bool) -> tuple[Links, int]:
        """The links as the engine has them, and the grains of a byte, for flows of ``most_bytes``.

        As many grains as make every rate exact, and all shares of up to ten flows; fewer only where
        int64 would not hold them: rates are then rounded down to a grain, 1 in 10^6 or less.
        """
        stages = range(len(self._regions))
        capacity = [self.carries(edge) for edge in self.edges]
        grains = SHARERS * math.lcm(*(each.denominator for each in capacity))
        fastest = math.ceil(max(capacity, default=1)) * 2 * len(stages)
        grains = min(grains, MOST_GRAINS // max(most_bytes, fastest))
        number = {edge: at for at, edge in enumerate(self.edges)}
        routes = [[number[edge] for edge in self.route(a, b)] for a in stages for b in stages]
        links = Links(
            np.array([math.floor(each * grains) for each in capacity], np.int64),
            np.cumsum([0, *map(len, routes)], dtype=np.int64),
            np.array([edge for route in routes for edge in route], np.int64),
            np.array([[self.latency(a, b) for b in stages] for a in stages], np.int64),
            np.array([contention], np.int64),
        )
        return links, grains
