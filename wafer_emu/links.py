"""Links as slow as they are: a share of a die's edge may be less than a byte a cycle."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

from wafer_emu.placement import Region
from wafer_emu.wafer import Wafer
from wafer_kernels.attention import AttentionCost
from wafer_kernels.mesh import GridCost

__all__ = ["LinkRate", "edge_share", "in_shares_of_a_byte", "slowest_link"]

GRAIN = 1024  # rates are rounded down to 1/GRAIN byte a cycle
Cost = TypeVar("Cost", GridCost, AttentionCost)


class LinkRate(NamedTuple):
    """``bytes`` that a link carries every ``cycles`` cycles, in lowest terms; cycles of a hop."""

    bytes: int
    cycles: int
    hop_cycles: int

    def transfer_cycles(self, moved_bytes: int, lanes: int = 1) -> int:
        """Cycles that so many bytes take on ``lanes`` such links."""
        return -(-moved_bytes * self.cycles // (lanes * self.bytes))


def edge_share(wafer: Wafer, lanes: int) -> LinkRate:
    """What one of ``lanes`` cores along a die's edge gets of it, never more than a mesh link."""
    assert wafer.die_link is not None
    clock, edge = wafer.core.clock_hz, wafer.die_link
    carried, cycles = edge.bytes_per_second * GRAIN // (lanes * clock), GRAIN
    if carried == 0:
        carried, cycles = 1, -(-lanes * clock // edge.bytes_per_second)
    carried = min(carried, wafer.link.bytes_per_cycle * cycles)
    shared = math.gcd(carried, cycles)
    hop = wafer.link.hop_cycles + math.ceil(edge.latency_seconds * clock)
    return LinkRate(carried // shared, cycles // shared, hop)


def slowest_link(wafer: Wafer, region: Region) -> LinkRate:
    """The slowest link inside a region.

    Where it has several dies that is a crossing, its bandwidth shared by the cores along an edge.
    """
    if wafer.die_link is None or region.dies(wafer) == (1, 1):
        return LinkRate(wafer.link.bytes_per_cycle, 1, wafer.link.hop_cycles)
    return edge_share(wafer, max(wafer.die.core_rows, wafer.die.core_columns))


def in_shares_of_a_byte(cost: Cost, rate: LinkRate) -> Cost:
    """The same costs with sizes and rates counted in 1 / ``rate.cycles`` byte.

    So a link of whole such shares a cycle stands for one that carries less than a byte, and
    every ceiling stays the exact one.
    """
    core = cost.core._replace(
        read_bytes_per_cycle=cost.core.read_bytes_per_cycle * rate.cycles,
        write_bytes_per_cycle=cost.core.write_bytes_per_cycle * rate.cycles,
    )
    return cost._replace(
        core=core, element_bytes=cost.element_bytes * rate.cycles, link_bytes_per_cycle=rate.bytes
    )
