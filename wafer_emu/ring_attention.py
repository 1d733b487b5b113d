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

from wafer_emu.links import in_shares_of_a_byte
from wafer_emu.program import Attention
from wafer_emu.tiling import FLOAT_BYTES, AttentionTiling, attention_cost, attention_tilings
from wafer_kernels import entries
from wafer_kernels.attention import AttentionCost
from wafer_kernels.fastest_tiling import DONE, NOTHING, Blocks, fastest_ways

if TYPE_CHECKING:
    from wafer_emu.clock import Clock

__all__ = ["OwnBounds", "OwnCycles", "RingAttention", "Space"]

Int64 = npt.NDArray[np.int64]
OwnCycles = dict[tuple[object, ...], tuple[int, int]]
OwnBounds = dict[tuple[object, ...], Int64]


class _Ways(NamedTuple):
    """Tilings at work on a chunk, the leanest first, and the query blocks of all of them."""

    tilings: list[AttentionTiling]
    blocks: Blocks


class _Answer(NamedTuple):
    """After many prefixes (P,): cycles, keys met, and the number of the way that is taken."""

    cycles: Int64
    met: Int64
    chosen: Int64


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
    _asked: dict[tuple[int, bytes], _Answer] = field(default_factory=dict, repr=False)

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
            chosen = self._answer(operation, np.array([operation.prefix])).chosen
            self._fastest[key] = self._ways(operation.chunk).tilings[int(chosen[0])]
        return self._fastest[key]

    def most_bytes(self, operation: Attention, prefixes: Int64) -> int:
        """Bytes of the roomiest tiling that a chunk takes after any of many prefixes (P,)."""
        ways, chosen = self._ways(operation.chunk), self._answer(operation, prefixes).chosen
        rows = self.clock.region.rows
        return max(
            ways.tilings[number].held_bytes(rows, operation.chunk) for number in np.unique(chosen)
        )

    def keys_met(self, operation: Attention, prefixes: Int64) -> Int64:
        """Keys that a chunk's query blocks meet after many prefixes (P,), block by block."""
        return self._answer(operation, prefixes).met

    def cycles(self, operation: Attention, prefixes: Int64) -> Int64:
        """Cycles of an operation's chunk after many prefixes (P,)."""
        return self._answer(operation, prefixes).cycles

    def _answer(self, operation: Attention, prefixes: Int64) -> _Answer:
        """The fastest way after many prefixes.

        What the blocks' own keys take is first left out, then bounded, and asked of the ring kernel
        only for ways that can still be as fast as the fastest after some prefix. KV in die memory
        is streamed behind the computation of a block.
        """
        asked = operation.chunk, prefixes.tobytes()
        if asked not in self._asked:
            self._asked.clear()  # cycles and keys are asked for in turn: one answer is kept
            self._asked[asked] = self._find(operation, prefixes)
        return self._asked[asked]

    def _find(self, operation: Attention, prefixes: Int64) -> _Answer:
        ways = self._ways(operation.chunk)
        answer = _Answer(*np.empty((3, prefixes.size), np.int64))
        reached, way = 0, DONE
        while reached < prefixes.size:
            reached, way = fastest_ways(
                self._flat, tuple(ways.blocks), operation.chunk, prefixes, self._stream, reached,
                *answer,
            )  # fmt: skip
            if way != DONE:
                self._learn(ways, way)
        return answer

    @cached_property
    def _stream(self) -> tuple[int, float]:
        """Bytes of a key in die memory (0: none is), and those that come a cycle."""
        clock = self.clock
        if clock.tiers.kv == "sram":
            return 0, 1.0
        return clock.kv_bytes(self.operation, 1), clock.dram_bytes_per_cycle

    def _learn(self, ways: _Ways, number: int) -> None:
        """Learn more of what a way's blocks take against their own keys."""
        blocks, tiling = ways.blocks, ways.tilings[number]
        here = slice(blocks.first[number], blocks.first[number + 1])
        ask = self._bound if blocks.known[number] == NOTHING else self._own
        sizes = blocks.sizes[here].tolist()
        found = {size: ask(tiling, size) for size in set(sizes)}
        blocks.own[here] = [found[size] for size in sizes]
        blocks.known[number] += 1

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
            self._ways_of[chunk] = _Ways(
                tilings,
                Blocks(
                    np.append(np.flatnonzero(np.diff(way, prepend=-1)), way.size),
                    np.stack((units, splits, key_tile), axis=1),
                    np.ascontiguousarray(sizes),
                    np.ascontiguousarray(before),
                    np.zeros_like(sizes),
                    np.full(len(tilings), NOTHING),
                    np.array([self.ends(each, chunk) for each in tilings], np.int64),
                ),
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
