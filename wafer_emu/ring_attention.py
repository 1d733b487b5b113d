"""Attention by key tiles that travel around the rows: the fastest tiling that memory allows.

Which tiling is the fastest depends on the chunk and on how many keys come before it, so that each
attention takes its own. What memory allows is a set that only grows with it, hence more memory
never makes an attention slower.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_emu.links import in_shares_of_a_byte
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
NOTHING, EXACT = 0, 2  # what is known of the own keys of a way's blocks; 1: a bound


class _Ways(NamedTuple):
    """Tilings at work on a chunk, the leanest first; B query blocks of all of them in a row.

    ``blocks`` of each way, its ``first`` (W,); of each block ``shared`` (B, 3) units, splits and
    key tile, ``sizes`` (B,) and ``before`` (B,) its tokens and those before it, ``own`` (B,) what
    it takes at least against its own keys, by what is ``known`` (W,) of the way. ``ends`` (W,) are
    the cycles of gathering queries and merging splits.
    """

    tilings: list[AttentionTiling]
    blocks: list[slice]
    first: Int64
    shared: Int64
    sizes: Int64
    before: Int64
    own: Int64
    known: Int64
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
    _spaces: dict[int, tuple[Space, ...]] = field(default_factory=dict, repr=False)
    _fastest: dict[tuple[int, int], AttentionTiling] = field(default_factory=dict, repr=False)

    @cached_property
    def _unshared(self) -> AttentionCost:
        clock = self.clock
        hop = clock.slowest_link.hop_cycles
        return attention_cost(
            clock.wafer, clock.region, self.operation, clock.grid.element_bytes, hop
        )

    @cached_property
    def _flat(self) -> tuple[Any, ...]:
        return self._timed(self._unshared)

    def _timed(self, cost: AttentionCost) -> tuple[Any, ...]:
        """Parameters as the kernels time them: every link is as slow as the slowest."""
        return entries.plain(in_shares_of_a_byte(cost, self.clock.slowest_link))

    @cached_property
    def known_tilings(self) -> tuple[AttentionTiling, ...]:
        """All tilings that are looked at, however much memory they take: fewest bytes first."""
        cost = self._unshared._replace(rows=1, window=0, causal_skip=1)
        return attention_tilings(cost, self.clock.region.columns, self.operation.heads)

    def tilings(self, chunk: int) -> list[AttentionTiling]:
        """Those that fit a chunk, or the leanest: the ledger then tells that it does not."""
        rows, most = self.clock.region.rows, self.clock.attention_bytes
        fitting = [each for each in self.known_tilings if each.held_bytes(rows, chunk) <= most]
        return fitting or [self.known_tilings[0]]

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
            for each in self.tilings(chunk):
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
        rows = self.clock.region.rows
        return max(
            ways.tilings[number].held_bytes(rows, operation.chunk) for number in np.unique(chosen)
        )

    def keys_met(self, operation: Attention, prefixes: Int64) -> Int64:
        """Keys that a chunk's query blocks meet after many prefixes (P,), block by block."""
        ways, chosen = self._ways(operation.chunk), self._cycles(operation, prefixes)[1]
        earlier = self.clock.earlier_keys(
            operation, prefixes[:, np.newaxis], ways.sizes, ways.before
        )
        met = np.add.reduceat(earlier + ways.sizes, ways.first, axis=1)
        return met[np.arange(prefixes.size), chosen]

    def cycles(self, operation: Attention, prefixes: Int64) -> Int64:
        """Cycles of an operation's chunk after many prefixes (P,)."""
        return self._cycles(operation, prefixes)[0]

    def _cycles(self, operation: Attention, prefixes: Int64) -> tuple[Int64, Int64]:
        """Cycles after many prefixes, and the number of the way that takes them (P,).

        What earlier keys take is first bounded; what the blocks' own keys take is first left out,
        then bounded. Both are asked of the ring kernel only for ways that can still be as fast as
        the fastest after some prefix.
        """
        ways = self._ways(operation.chunk)
        earlier = self.clock.earlier_keys(
            operation, prefixes[:, np.newaxis], ways.sizes, ways.before
        )
        if len(ways.tilings) == 1:
            while ways.known[0] < EXACT:
                self._learn(ways, 0)
            met = entries.prefix_blocks(self._flat, ways.shared, ways.sizes, earlier, True)
            blocks = self._blocks_cycles(met + ways.own, ways.sizes, earlier)
            return blocks.sum(axis=1) + ways.ends[0], np.zeros(prefixes.size, np.int64)
        windowed = self._unshared.window > 0
        met = entries.prefix_blocks(self._flat, ways.shared, ways.sizes, earlier, windowed)
        met_exact = np.full(len(ways.tilings), windowed)
        blocks = self._blocks_cycles(met + ways.own, ways.sizes, earlier)
        cycles = np.add.reduceat(blocks, ways.first, axis=1) + ways.ends
        exact = met_exact & (ways.known == EXACT)
        fastest = np.min(cycles, axis=1, initial=NEVER, where=exact)
        while True:
            promising = np.any(cycles <= fastest[:, np.newaxis], axis=0) & ~exact
            if not promising.any():
                return fastest, np.argmin(np.where(exact, cycles, NEVER), axis=1)
            number = int(np.argmin(np.where(promising, cycles.sum(axis=0), NEVER)))
            here = ways.blocks[number]
            sizes, before = ways.sizes[here], earlier[:, here]
            if ways.known[number] < EXACT:
                self._learn(ways, number)
            else:
                shared = ways.shared[here]
                met[:, here] = entries.prefix_blocks(self._flat, shared, sizes, before, True)
                met_exact[number] = True
            blocks = self._blocks_cycles(met[:, here] + ways.own[here], sizes, before)
            cycles[:, number] = blocks.sum(axis=1) + ways.ends[number]
            if met_exact[number] and ways.known[number] == EXACT:
                exact[number] = True
                fastest = np.minimum(fastest, cycles[:, number])

    def _blocks_cycles(self, cycles: Int64, sizes: Int64, earlier: Int64) -> Int64:
        """Cycles of query blocks, or of their KV's way from die memory where that is longer."""
        clock = self.clock
        if clock.tiers.kv == "sram":
            return cycles
        width = clock.kv_bytes(self.operation, 1)
        streamed = np.ceil((earlier + sizes) * width / clock.dram_bytes_per_cycle)
        return np.maximum(cycles, streamed.astype(np.int64))

    def _learn(self, ways: _Ways, number: int) -> None:
        """Learn more of what a way's blocks take against their own keys."""
        here, tiling = ways.blocks[number], ways.tilings[number]
        ask = self._bound if ways.known[number] == NOTHING else self._own
        sizes = ways.sizes[here].tolist()
        found = {size: ask(tiling, size) for size in set(sizes)}
        ways.own[here] = [found[size] for size in sizes]
        ways.known[number] += 1

    def _own(self, tiling: AttentionTiling, size: int) -> int:
        """Cycles of a block against its own keys.

        Where the best size of all of its key tiles is small enough, it is the best of fewer too.
        """
        known = self.clock.own_cycles
        for key_tile in (self._largest_key_tile, tiling.key_tile):
            key = self._unshared, tiling.units, tiling.splits, key_tile, size
            if key not in known:
                flat = self._timed(self.cost(tiling)._replace(key_tile=key_tile))
                known[key] = entries.own_tile(flat, size)
            best, cycles = known[key]
            if best <= tiling.key_tile:
                break
        return cycles

    def _bound(self, tiling: AttentionTiling, size: int) -> int:
        """Cycles that a block takes at least against its own keys."""
        known = self.clock.own_bounds
        key = self._unshared, tiling.units, tiling.splits, size
        if key not in known:
            largest = self.cost(tiling)._replace(key_tile=self._largest_key_tile)
            known[key] = np.minimum.accumulate(entries.own_bounds(self._timed(largest), size))
        return int(known[key][tiling.key_tile // tiling.key_granule - 1])

    @cached_property
    def _largest_key_tile(self) -> int:
        return max(each.key_tile for each in self.known_tilings)

    def _ways(self, chunk: int) -> _Ways:
        """The tilings that differ on a chunk."""
        if chunk not in self._ways_of:
            rows = self.clock.region.rows
            differ: dict[tuple[int, int, int], AttentionTiling] = {}
            for each in self.tilings(chunk):
                count = each.block_count(rows, chunk)
                differ.setdefault((each.units, each.key_tile, count), each)
            tilings = list(differ.values())
            blocks = [
                (number, each.units, each.splits, each.key_tile, size, before)
                for number, each in enumerate(tilings)
                for size, before in each.query_blocks(rows, chunk)
            ]
            way, units, splits, key_tile, sizes, before = np.array(blocks, np.int64).T
            first = np.flatnonzero(np.diff(way, prepend=-1))
            self._ways_of[chunk] = _Ways(
                tilings,
                [slice(a, b) for a, b in pairwise([*first.tolist(), way.size])],
                first,
                np.stack((units, splits, key_tile), axis=1),
                np.ascontiguousarray(sizes),
                before,
                np.zeros_like(sizes),
                np.full(len(tilings), NOTHING),
                np.array([self.ends(each, chunk) for each in tilings], np.int64),
            )
        return self._ways_of[chunk]

    def ends(self, tiling: AttentionTiling, chunk: int) -> int:
        """Queries go to all columns of their head; partial results of the splits come together."""
        clock, operation = self.clock, self.operation
        rows = entries.first_row_queries(self._flat, chunk)
        queries = rows * tiling.units
        link = clock.slowest_link
        gathered = queries * operation.key_width * clock.grid.element_bytes
        cycles = link.transfer_cycles(gathered) + tiling.splits * link.hop_cycles
        cycles += 2 * clock.wafer.link.ramp_cycles
        partial = queries * (operation.value_width + 2) * FLOAT_BYTES
        return cycles + clock.reduce(tiling.splits, partial)
