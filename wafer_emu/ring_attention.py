"""Attention by key tiles that travel around the rows: the fastest tiling that memory allows.

Which tiling is the fastest depends on the chunk and on how many keys come before it, so that each
attention takes its own. What memory allows is a set that only grows with it, hence more memory
never makes an attention slower.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_emu.program import Attention
from wafer_emu.tiling import FLOAT_BYTES, AttentionTiling, attention_cost, attention_tilings
from wafer_kernels import entries
from wafer_kernels.attention import AttentionCost

if TYPE_CHECKING:
    from wafer_emu.clock import Clock

__all__ = ["OwnBounds", "OwnCycles", "RingAttention", "Space"]

Int64 = npt.NDArray[np.int64]
OwnCycles = dict[tuple[object, ...], tuple[int, int]]
OwnBounds = dict[tuple[object, ...], Int64]
NEVER = np.iinfo(np.int64).max


class _Ways(NamedTuple):
    """Tilings at work on a chunk, the leanest first; B query blocks of all of them in a row.

    ``first`` block of each way (W,) and ``way`` of each block (B,); ``shared`` (B, 3) its units,
    splits and key tile, ``sizes`` (B,) and ``before`` (B,) its tokens and those before it,
    ``bounds`` (B,) what it takes at least against its own keys. ``ends`` (W,) are the cycles of
    gathering queries and merging splits.
    """

    tilings: list[AttentionTiling]
    first: Int64
    way: Int64
    shared: Int64
    sizes: Int64
    before: Int64
    bounds: Int64
    ends: Int64


class Space(NamedTuple):
    """Working memory of a core: key tiles, and so much for each of its dealt query tiles [byte]."""

    query_tiles: int
    query_tile_bytes: int
    key_buffer_bytes: int


def _covers(more: Space, less: Space) -> bool:
    """Whether one takes no less than another of every core."""
    return more != less and all(a >= b for a, b in zip(more, less, strict=True))


@dataclass(frozen=True, eq=False)
class RingAttention:
    """Attentions that differ in chunk and prefix only, on the region of a clock."""

    clock: Clock
    operation: Attention
    _ways_of: dict[int, _Ways] = field(default_factory=dict, repr=False)
    _own_of: dict[tuple[int, int], Int64] = field(default_factory=dict, repr=False)
    _spaces: dict[int, tuple[Space, ...]] = field(default_factory=dict, repr=False)
    _fastest: dict[tuple[int, int], AttentionTiling] = field(default_factory=dict, repr=False)

    @cached_property
    def _unshared(self) -> AttentionCost:
        clock = self.clock
        return attention_cost(
            clock.wafer, clock.region, self.operation, clock.grid.element_bytes, clock.slowest_link
        )

    @cached_property
    def _flat(self) -> tuple[Any, ...]:
        return entries.plain(self._unshared)

    @cached_property
    def known_tilings(self) -> tuple[AttentionTiling, ...]:
        """All tilings that are looked at, however much memory they take: fewest bytes first."""
        cost = self._unshared._replace(rows=1, window=0, causal_skip=1)
        return attention_tilings(cost, self.clock.region.columns, self.operation.heads)

    @cached_property
    def tilings(self) -> tuple[AttentionTiling, ...]:
        """Those that fit, or the leanest: the ledger then tells that it does not."""
        known, most = self.known_tilings, self.clock.attention_bytes
        return tuple(each for each in known if each.bytes <= most) or known[:1]

    def cost(self, tiling: AttentionTiling) -> AttentionCost:
        """Parameters of the attention kernels under a tiling."""
        return self._unshared._replace(
            splits=tiling.splits, units=tiling.units, key_tile=tiling.key_tile
        )

    def space(self, chunk: int) -> tuple[Space, ...]:
        """What a chunk may take, one entry for each number of query tiles that a row may hold.

        A core sets aside the most of them: a stage's chunks take whichever tiling suits them.
        """
        if chunk not in self._spaces:
            most: dict[tuple[int, int], int] = {}
            for each in self.tilings:
                tiles = each.held_query_tiles(self.clock.region.rows, chunk)
                key = tiles, each.query_tile * each.query_bytes
                most[key] = max(most.get(key, 0), each.key_buffer_bytes)
            spaces = [Space(tiles, query, keys) for (tiles, query), keys in most.items()]
            self._spaces[chunk] = tuple(
                one for one in spaces if not any(_covers(other, one) for other in spaces)
            )
        return self._spaces[chunk]

    def tiling(self, operation: Attention) -> AttentionTiling:
        """The fastest tiling for an operation's chunk and prefix."""
        key = operation.chunk, operation.prefix
        if key not in self._fastest:
            _, chosen = self._cycles(operation, np.array([operation.prefix]))
            self._fastest[key] = self._ways(operation.chunk).tilings[int(chosen[0])]
        return self._fastest[key]

    def most_bytes(self, operation: Attention, prefixes: Int64) -> int:
        """Bytes of the roomiest tiling that a chunk takes after any of many prefixes (P,)."""
        ways, chosen = self._ways(operation.chunk), self._cycles(operation, prefixes)[1]
        return max(ways.tilings[number].bytes for number in np.unique(chosen))

    def cycles(self, operation: Attention, prefixes: Int64) -> Int64:
        """Cycles of an operation's chunk after many prefixes (P,)."""
        return self._cycles(operation, prefixes)[0]

    def _cycles(self, operation: Attention, prefixes: Int64) -> tuple[Int64, Int64]:
        """Cycles after many prefixes, and the number of the way that takes them (P,).

        What a way takes at least is known before the ring kernel is asked about the blocks' own
        keys: ways that can't be as fast as the fastest after any prefix are left out.
        """
        ways = self._ways(operation.chunk)
        earlier = self.clock.earlier_keys(
            operation, prefixes[:, np.newaxis], ways.sizes, ways.before
        )
        met = entries.prefix_blocks(self._flat, ways.shared, ways.sizes, earlier)
        least = self._totals(ways, met, ways.bounds, earlier)
        cycles = np.full(least.shape, NEVER)
        fastest = np.full(prefixes.shape, NEVER)
        open_ways = least.sum(axis=0)
        while True:
            number = int(np.argmin(open_ways))
            if open_ways[number] == NEVER:
                return fastest, np.argmin(cycles, axis=1)
            open_ways[number] = NEVER
            if np.any(least[:, number] <= fastest):
                own = self._own_cycles(ways, number)
                cycles[:, number] = self._totals(ways, met, own, earlier)[:, number]
                fastest = np.minimum(fastest, cycles[:, number])

    def _totals(self, ways: _Ways, met: Int64, own: Int64, earlier: Int64) -> Int64:
        """Cycles (P, W) of all blocks (P, B) and of the ends; KV may come from die memory."""
        clock, cycles = self.clock, met + own
        if clock.tiers.kv == "dram":
            width = clock.kv_bytes(self.operation, 1)
            streamed = np.ceil((earlier + ways.sizes) * width / clock.dram_bytes_per_cycle)
            cycles = np.maximum(cycles, streamed.astype(np.int64))
        totals: Int64 = np.add.reduceat(cycles, ways.first, axis=1) + ways.ends
        return totals

    def _own_cycles(self, ways: _Ways, number: int) -> Int64:
        """Cycles of a way's blocks against their own keys; bounds of the others (B,)."""
        key = int(ways.sizes[ways.way == number].sum()), number
        if key not in self._own_of:
            own = ways.bounds.copy()
            for block in np.flatnonzero(ways.way == number):
                own[block] = self._own(ways.tilings[number], int(ways.sizes[block]))
            self._own_of[key] = own
        return self._own_of[key]

    def _own(self, tiling: AttentionTiling, size: int) -> int:
        """Cycles of a block against its own keys.

        Where the best size of all of its key tiles is small enough, it is the best of fewer too.
        """
        known = self.clock.own_cycles
        for key_tile in (self._largest_key_tile, tiling.key_tile):
            key = tiling.units, tiling.splits, key_tile, size
            if key not in known:
                flat = entries.plain(self.cost(tiling)._replace(key_tile=key_tile))
                known[key] = entries.own_tile(flat, size)
            best, cycles = known[key]
            if best <= tiling.key_tile:
                break
        return cycles

    def _bound(self, tiling: AttentionTiling, size: int) -> int:
        """Cycles that a block takes at least against its own keys."""
        known, key = self.clock.own_bounds, (tiling.units, tiling.splits, size)
        if key not in known:
            largest = self.cost(tiling)._replace(key_tile=self._largest_key_tile)
            known[key] = np.minimum.accumulate(entries.own_bounds(entries.plain(largest), size))
        return int(known[key][tiling.key_tile // tiling.key_granule - 1])

    @cached_property
    def _largest_key_tile(self) -> int:
        return max(each.key_tile for each in self.known_tilings)

    def _ways(self, chunk: int) -> _Ways:
        """The tilings that differ on a chunk."""
        if chunk not in self._ways_of:
            rows = self.clock.region.rows
            differ: dict[tuple[int, int, int], AttentionTiling] = {}
            for each in self.tilings:
                count = each.block_count(rows, chunk)
                differ.setdefault((each.units, each.key_tile, count), each)
            tilings = list(differ.values())
            blocks = [
                (
                    number,
                    each.units,
                    each.splits,
                    each.key_tile,
                    size,
                    before,
                    self._bound(each, size),
                )
                for number, each in enumerate(tilings)
                for size, before in each.query_blocks(rows, chunk)
            ]
            way, units, splits, key_tile, sizes, before, bounds = np.array(blocks, np.int64).T
            self._ways_of[chunk] = _Ways(
                tilings,
                np.flatnonzero(np.diff(way, prepend=-1)),
                way,
                np.stack((units, splits, key_tile), axis=1),
                np.ascontiguousarray(sizes),
                before,
                bounds,
                np.array([self.ends(each, chunk) for each in tilings], np.int64),
            )
        return self._ways_of[chunk]

    def ends(self, tiling: AttentionTiling, chunk: int) -> int:
        """Queries go to all columns of their head; partial results of the splits come together."""
        clock, operation = self.clock, self.operation
        rows = entries.first_row_queries(self._flat, chunk)
        queries = rows * tiling.units
        rate, hop = clock.slowest_link
        gathered = queries * operation.key_width * clock.grid.element_bytes
        cycles = -(-gathered // rate) + tiling.splits * hop + 2 * clock.wafer.link.ramp_cycles
        partial = queries * (operation.value_width + 2) * FLOAT_BYTES
        return cycles + clock.reduce(tiling.splits, partial)
