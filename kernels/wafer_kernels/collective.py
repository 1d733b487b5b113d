"""Collectives on a row or a grid of cores, and the zero-load latency of a mesh: closed forms.

A pattern that sends at most C wavelets through one ramp, E wavelet-hops over N links, as far as L
hops, in D dependent stages of one core's work, takes

    max(C, E / N + L) + (2 ramp + 1) D   cycles

(Luczynski et al., Near-Optimal Wafer-Scale Reduce, arXiv 2404.15888). A wavelet is what a link
carries in a cycle. All forms count a hop as `hop_cycles`, where the paper has 1.
"""

from __future__ import annotations

from typing import NamedTuple

from wafer_kernels._jit import kernel
from wafer_kernels.errors import UsageError
from wafer_kernels.systolic import ceil_div

__all__ = [
    "BROADCAST",
    "CHAIN_REDUCE",
    "PATTERNS",
    "RING_ALLREDUCE",
    "STAR_REDUCE",
    "TREE_REDUCE",
    "TWO_PHASE_REDUCE",
    "CollectiveTiming",
    "allreduce_cycles",
    "collective",
    "collective_cycles",
    "grid_allreduce_cycles",
    "grid_broadcast_cycles",
    "grid_reduce_cycles",
    "mean_uniform_hops",
    "zero_load_cycles",
]

BROADCAST, CHAIN_REDUCE, STAR_REDUCE, TREE_REDUCE, TWO_PHASE_REDUCE, RING_ALLREDUCE = range(6)
PATTERNS = {
    "broadcast": BROADCAST,
    "chain_reduce": CHAIN_REDUCE,
    "star_reduce": STAR_REDUCE,
    "tree_reduce": TREE_REDUCE,
    "two_phase_reduce": TWO_PHASE_REDUCE,
    "ring_allreduce": RING_ALLREDUCE,
}


class CollectiveTiming(NamedTuple):
    """Duration of one collective and its parts, which add up to it."""

    cycles: int
    serialisation_cycles: int  # wavelets that follow each other through a ramp or link
    distance_cycles: int  # hops
    depth_cycles: int  # dependent stages of work, each with its way over the ramps


@kernel()
def _ceil_log2(value: int) -> int:
    exponent = 0
    while 1 << exponent < value:
        exponent += 1
    return exponent


@kernel()
def _ceil_root(value: int) -> int:
    root = 1
    while root * root < value:
        root += 1
    return root


@kernel()
def _parts(
    pattern: int, pes: int, wavelets: int, ramp_cycles: int, hop_cycles: int
) -> tuple[int, int, int]:
    """Serialisation, distance and depth of a collective on a row of more than one core."""
    stage = 2 * ramp_cycles + 1
    links = pes - 1
    if pattern == BROADCAST:
        return wavelets, links * hop_cycles, stage
    if pattern == CHAIN_REDUCE:
        return wavelets, links * hop_cycles, links * stage
    if pattern == STAR_REDUCE:  # the root's ramp never waits, unless hops are longer than vectors
        return links * wavelets, max(0, (links - 1) * (hop_cycles - wavelets)), stage
    if pattern == TREE_REDUCE:
        rounds = _ceil_log2(pes)
        contention = wavelets * rounds
        energy = ceil_div(wavelets * pes * rounds, 2 * links)
        distance = links * hop_cycles
        if contention >= energy + distance:
            return contention, 0, rounds * stage
        return energy, distance, rounds * stage
    if pattern == TWO_PHASE_REDUCE:  # chains in groups of about sqrt(P), then a chain of leaders
        group = _ceil_root(pes)
        groups = ceil_div(pes, group)
        hops = (pes - groups) + group * (groups - 1)
        energy = ceil_div(wavelets * hops, links)
        distance = links * hop_cycles
        depth = (group + groups - 2) * stage
        if 2 * wavelets >= energy + distance:
            return 2 * wavelets, 0, depth
        return energy, distance, depth
    passes = 2 * links  # ring: reduce-scatter, then all-gather, on the folded row
    return ceil_div(passes * wavelets, pes), (4 * pes - 6) * hop_cycles, passes * stage


@kernel()
def collective_cycles(
    pattern: int, pes: int, wavelets: int, ramp_cycles: int, hop_cycles: int = 1
) -> int:
    """Cycles of a collective on a row of `pes` cores, each with a vector of `wavelets`."""
    if pes == 1 or wavelets == 0:
        return 0
    serialisation, distance, depth = _parts(pattern, pes, wavelets, ramp_cycles, hop_cycles)
    return serialisation + distance + depth


@kernel()
def allreduce_cycles(
    pattern: int, pes: int, wavelets: int, ramp_cycles: int, hop_cycles: int = 1
) -> int:
    """Cycles of a reduce by `pattern` and a broadcast of its result; the ring does both in one."""
    cycles = collective_cycles(pattern, pes, wavelets, ramp_cycles, hop_cycles)
    if pattern != RING_ALLREDUCE:
        cycles += collective_cycles(BROADCAST, pes, wavelets, ramp_cycles, hop_cycles)
    return cycles


@kernel()
def grid_broadcast_cycles(
    rows: int, columns: int, wavelets: int, ramp_cycles: int, hop_cycles: int = 1
) -> int:
    """Cycles of a broadcast from a corner of a grid, along its row and down all columns at once."""
    if rows * columns == 1 or wavelets == 0:
        return 0
    return wavelets + (rows + columns - 2) * hop_cycles + 2 * ramp_cycles + 1


@kernel()
def grid_reduce_cycles(
    pattern: int, rows: int, columns: int, wavelets: int, ramp_cycles: int, hop_cycles: int = 1
) -> int:
    """Cycles of a reduce to a corner of a grid: along all rows at once, then along one column."""
    along_rows = collective_cycles(pattern, columns, wavelets, ramp_cycles, hop_cycles)
    return along_rows + collective_cycles(pattern, rows, wavelets, ramp_cycles, hop_cycles)


@kernel()
def grid_allreduce_cycles(
    pattern: int, rows: int, columns: int, wavelets: int, ramp_cycles: int, hop_cycles: int = 1
) -> int:
    """Cycles until all cores of a grid hold the sum: a reduce and a broadcast, or two rings."""
    cycles = grid_reduce_cycles(pattern, rows, columns, wavelets, ramp_cycles, hop_cycles)
    if pattern != RING_ALLREDUCE:
        cycles += grid_broadcast_cycles(rows, columns, wavelets, ramp_cycles, hop_cycles)
    return cycles


def collective(
    pattern: str, pes: int, wavelets: int, ramp_cycles: int, hop_cycles: int = 1
) -> CollectiveTiming:
    """Duration of one collective on a row of cores, with the parts that it is made of.

    Parameters
    ----------
    pattern
        One of `PATTERNS`.
    pes
        Cores in the row.
    wavelets
        Length of each core's vector [wavelet].
    ramp_cycles
        From a core to its router, or back [cycle].
    hop_cycles
        From a router to the next [cycle].

    Raises
    ------
    UsageError
        The pattern is unknown, there is no core or wavelet, or a cost is negative.
    """
    if pattern not in PATTERNS:
        raise UsageError(f"pattern {pattern!r} is unknown; choose one of {', '.join(PATTERNS)}")
    if min(pes, wavelets, hop_cycles) < 1 or ramp_cycles < 0:
        raise UsageError(
            f"a collective needs cores, wavelets and hop cycles >= 1 and ramp cycles >= 0, "
            f"got {pes}, {wavelets}, {hop_cycles}, {ramp_cycles}"
        )
    if pes == 1:
        return CollectiveTiming(0, 0, 0, 0)
    parts = _parts(PATTERNS[pattern], pes, wavelets, ramp_cycles, hop_cycles)
    return CollectiveTiming(sum(parts), *parts)


@kernel()
def zero_load_cycles(hops: int, hop_cycles: int, offset_cycles: int) -> int:
    """Latency of a packet that meets no other: `hops` routers and links, and a fixed offset."""
    return hops * hop_cycles + offset_cycles


def mean_uniform_hops(rows: int, columns: int) -> float:
    """Mean routers passed under uniform traffic, one's own node included: distance + 1."""
    return (rows - 1 / rows) / 3 + (columns - 1 / columns) / 3 + 1
