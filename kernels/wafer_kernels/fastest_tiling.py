"""Which of many tilings passes a chunk's query blocks over earlier keys in the fewest cycles.

Every way (a tiling with the query blocks that it cuts a chunk into) is first bounded from below;
only those that can still be as fast as the fastest are timed by the passes themselves.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_kernels import attention
from wafer_kernels._jit import kernel
from wafer_kernels.attention import AttentionCost
from wafer_kernels.systolic import CoreCost

__all__ = ["DONE", "EXACT", "NOTHING", "Blocks", "fastest_ways"]

Int64 = npt.NDArray[np.int64]
NOTHING, EXACT = 0, 2  # what is known of the own keys of a way's blocks; 1: a bound
DONE = -1
NEVER = np.iinfo(np.int64).max
_prefix, _prefix_bound = attention.prefix_cycles, attention.prefix_bound


class Blocks(NamedTuple):
    """The query blocks of W ways, B blocks in a row, all int64.

    ``first`` (W + 1,) of each way's blocks, and their number. Of a block ``shared`` (B, 3): units,
    splits and key tile; ``sizes`` (B,) tokens; ``before`` (B,) tokens of the chunk in front of it;
    ``own`` (B,) cycles that it takes at least against its own keys, by what is ``known`` (W,) of
    its way. ``ends`` (W,) cycles around all blocks: queries gathered, splits merged.
    """

    first: Int64
    shared: Int64
    sizes: Int64
    before: Int64
    own: Int64
    known: Int64
    ends: Int64


@kernel()
def _way_cycles(
    cost: tuple[Any, ...],
    blocks: Blocks,
    way: int,
    earlier: Int64,
    stream: tuple[int, float],
    exact: bool,
) -> int:
    """Cycles of a way's blocks after ``earlier`` (B,) keys; not ``exact``: at least.

    ``stream``: bytes of a key in die memory (0: none is), and those that come a cycle.
    """
    core, total = CoreCost(*cost[0]), blocks.ends[way]
    for block in range(blocks.first[way], blocks.first[way + 1]):
        units, splits, key_tile = blocks.shared[block]
        named = AttentionCost(core, cost[1], splits, units, cost[4], key_tile, *cost[6:])
        size, keys = blocks.sizes[block], earlier[block]
        met = _prefix(named, size, keys) if exact else _prefix_bound(named, size, keys)
        cycles = met + blocks.own[block]
        if stream[0] > 0:
            cycles = max(cycles, np.int64(math.ceil((keys + size) * stream[0] / stream[1])))
        total += cycles
    return total


@kernel()
def _earlier_keys(cost: tuple[Any, ...], blocks: Blocks, chunk: int, prefix: int) -> Int64:
    """Keys (B,) besides its own that each block meets: in front of it, or all, that are shown."""
    named = AttentionCost(CoreCost(*cost[0]), *cost[1:])
    earlier = np.full(blocks.sizes.size, prefix)
    if named.causal_skip == 1:
        earlier += blocks.before
    if named.window > 0:
        earlier = np.minimum(earlier, named.window - 1)
    if named.causal_skip == 0:
        earlier += chunk - blocks.sizes
    return earlier


@kernel()
def fastest_ways(
    cost: tuple[Any, ...],
    blocks: tuple[Int64, ...],
    chunk: int,
    prefixes: Int64,
    stream: tuple[int, float],
    begin: int,
    cycles: Int64,
    met: Int64,
    chosen: Int64,
) -> tuple[int, int]:
    """Cycles (P,) of the fastest way after prefixes (P,), the keys its blocks meet, its number.

    From prefix ``begin`` on. Stops where more has to be known of a way that may be the fastest:
    returns the prefix and that way, else (P, DONE). Of ways as fast the first is taken. A window
    leaves no bound: its passes are timed.
    """
    named = Blocks(*blocks)
    ways = named.ends.size
    windowed = AttentionCost(CoreCost(*cost[0]), *cost[1:]).window > 0
    total, exact = np.empty(ways, np.int64), np.empty(ways, np.bool_)
    for prefix in range(begin, prefixes.size):
        earlier = _earlier_keys(cost, named, chunk, prefixes[prefix])
        for way in range(ways):
            total[way] = _way_cycles(cost, named, way, earlier, stream, windowed)
            exact[way] = windowed and named.known[way] == EXACT
        while True:
            fastest, promising = NEVER, -1
            for way in range(ways):
                if exact[way]:
                    fastest = min(fastest, total[way])
            for way in range(ways):
                if not exact[way] and total[way] <= fastest:
                    if promising < 0 or total[way] < total[promising]:
                        promising = way
            if promising < 0:
                break
            if named.known[promising] < EXACT:
                return prefix, promising
            total[promising] = _way_cycles(cost, named, promising, earlier, stream, True)
            exact[promising] = True
        best = -1
        for way in range(ways):
            if exact[way] and (best < 0 or total[way] < total[best]):
                best = way
        here = slice(named.first[best], named.first[best + 1])
        cycles[prefix], chosen[prefix] = total[best], best
        met[prefix] = earlier[here].sum() + named.sizes[here].sum()
    return prefixes.size, DONE
