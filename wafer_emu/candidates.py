"""Candidates of a joint search: policy, stages and chunks, with the floor of what each takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import mocap.policy
from mocap.policy import Policy, Request
from mocap.uniform import Uniform
from wafer_emu.clock import Clock, Tiers
from wafer_emu.deployment import PAGE_TOKENS, Deployment, deploy, stage_count
from wafer_emu.floors import Floors
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.placement import place_regions
from wafer_emu.stage_clocks import Shelf, StageClocks, with_attention
from wafer_emu.wafer import Wafer
from wafer_emu.ways import LEANEST, even_cycles, memory_tiers
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError

__all__ = ["Candidate", "Judge", "chunk_counts", "stage_counts"]

CHUNKS_PER_STAGE = (1, 1.5, 2, 3, 4, 6, 8)
LONE = 2  # times what chunks on a lone stage seem to take: they are tried late


@dataclass(order=True)
class Candidate:
    """Stages and chunks under a policy, with figures [cycles]: expected, and never undercut."""

    expected: int
    serial: int
    policy: Policy = field(compare=False)
    stages: int = field(compare=False)
    chunks: int | None = field(compare=False)  # None: a policy that does not cut, or by size
    floor: int = field(compare=False, default=0)
    judged: int = field(compare=False, default=0)  # how many floors were asked for


@dataclass
class Judge:
    """Tells floors of candidates for one workload; clocks come from the ``shelf``.

    Of a plan's way of working floors know how its layers are split, and how long its tiles are at
    most; its memories are taken for SRAM without bounds, since others only add.
    """

    wafer: Wafer
    model: Model
    workload: Workload
    options: Options
    shelf: Shelf
    _splits: dict[tuple[int, int, int], list[Deployment]] = field(default_factory=dict)

    @cached_property
    def requests(self) -> list[Request]:
        """All requests, as if each came first."""
        return [Request(0, one.tokens, one.prefix_tokens) for one in self.workload.requests]

    @cached_property
    def longest(self) -> Request:
        """The request with the most new tokens, for which stages are laid out."""
        return max(self.requests, key=lambda one: one.new_tokens)

    @cached_property
    def _floors(self) -> Floors:
        return Floors(self.options.causal_skip)

    @cached_property
    def _placed_model(self) -> Model:
        layers = self.options.layers
        return self.model if layers is None else self.model.with_layers(layers)

    def expect(self, candidate: Candidate) -> int:
        """What a candidate takes if its chunks do as long as an even one in the middle.

        Raises
        ------
        UsageError
            If regions do not allow so many stages.
        """
        clock, stages = self._clocks(candidate)[0], candidate.stages
        piece = min(self._longest_piece(candidate), self.longest.new_tokens)
        before = self.longest.prefix_tokens + (self.longest.new_tokens - piece) // 2
        layers = -(-clock.model.layers // stages)
        cycles = layers * clock.layer(0, piece, before, self.options.causal_skip)
        pieces = -(-self.longest.new_tokens // piece)
        if stages == 1 and pieces > 1:  # saves memory alone
            return LONE * cycles * pieces
        if self.options.objective == "throughput":
            return cycles * pieces
        if self._most_chunks(candidate, self.longest) == 1:
            return cycles * pieces * stages
        return cycles * (pieces + stages - 1)

    def raise_floor(self, candidate: Candidate) -> bool:
        """Ask for the next floor of a candidate, each dearer than the one before; False: no more.

        First however layers are split, then under the splits that a plan may choose, then with its
        very cuts where these are equal chunks.
        """
        floors = (self._unplaced, self._placed, self._even)
        if candidate.judged == len(floors):
            return False
        candidate.floor = max(candidate.floor, floors[candidate.judged](candidate))
        candidate.judged += 1
        return True

    def _unplaced(self, candidate: Candidate) -> int:
        clocks, longest = self._clocks(candidate), self._longest_piece(candidate)
        scale = self.model.layers / self._placed_model.layers
        return sum(
            self._floors.split(clocks, scale, one, longest, self._most_chunks(candidate, one))
            for one in self.requests
        )

    def _placed(self, candidate: Candidate) -> int:
        longest = self._longest_piece(candidate)
        splits = {each.placement.stages: each for each in self._deployments(candidate)}
        floors = [
            sum(
                self._floors.placed(each, one, longest, self._most_chunks(candidate, one))
                for one in self.requests
            )
            for each in splits.values()
        ]
        return min(floors, default=0)  # weights that fit nowhere: planning tells why

    def _even(self, candidate: Candidate) -> int:
        policy = candidate.policy
        latency = self.options.objective == "latency"
        if not latency or type(policy).partition is not Uniform.partition:
            return 0
        dealt = [
            each.with_tile(each.tile_tokens, in_rounds)
            for each in self._deployments(candidate)
            for in_rounds in (True, False)
        ]
        floors = [sum(even_cycles(each, policy, [one]) for one in self.requests) for each in dealt]
        return min(floors, default=0)

    def _clocks(self, candidate: Candidate) -> list[Clock]:
        """Clocks of the stages that no memory binds: attention has a core for itself."""
        model, options = self._placed_model, self.options
        regions = place_regions(
            self.wafer, candidate.stages, options.region, model.layers, options.placement
        )
        shared = StageClocks(self.wafer, model, options, Tiers(), self.shelf)
        room = self.wafer.core.data_bytes
        return [with_attention(shared.of(region), room, self.shelf) for region in regions]

    def _most_chunks(self, candidate: Candidate, request: Request) -> int | None:
        """Chunks of a request at most; none are counted on for throughput: pipelines stay full."""
        if self.options.objective == "throughput":
            return None
        wanted = candidate.chunks or self.options.given_chunks or candidate.stages
        if self.options.chunk_tokens is not None:
            wanted = -(-request.new_tokens // self.options.chunk_tokens)
        most = mocap.policy.most_chunks(candidate.policy, wanted)
        return most and min(most, request.new_tokens)

    def _longest_piece(self, candidate: Candidate) -> int:
        """Tokens of a tile in which a chunk passes a layer, at most."""
        options = replace(self.options, stages=candidate.stages, chunks=candidate.chunks)
        tokens = options.usual_chunk(
            self.longest.new_tokens, candidate.stages, candidate.policy.uses
        )
        longest = -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
        return max(longest, candidate.policy.asked_tile() or 0)

    def _deployments(self, candidate: Candidate) -> list[Deployment]:
        """One for each split of layers and tile that a plan may choose, on :meth:`_clocks`."""
        policy = candidate.policy
        options = replace(self.options, stages=candidate.stages, chunks=candidate.chunks)
        tokens = options.usual_chunk(self.longest.new_tokens, candidate.stages, policy.uses)
        key = candidate.stages, tokens, policy.streams_tokens
        if key not in self._splits:
            found: dict[tuple[object, ...], Deployment] = {}
            for tiers in memory_tiers(self.wafer, options):
                for lean in range(LEANEST + 1):
                    what = options, policy, tiers, lean, self.longest, self.shelf
                    try:
                        one = deploy(self.wafer, self.model, *what)
                    except CapacityError:
                        break
                    found.setdefault((one.placement.stages, one.tile_tokens), one)
            clocks = tuple(self._clocks(candidate))
            self._splits[key] = [
                replace(one, tiers=Tiers(), clocks=clocks) for one in found.values()
            ]
        return self._splits[key]


def stage_counts(wafer: Wafer, model: Model, policy: Policy, options: Options) -> Iterator[int]:
    """Stage counts worth trying: powers of two, divisors of the layers and of the dies."""
    layers = options.layers or model.layers
    if options.stages != "auto" or policy.stage_count is not None:
        count = stage_count(wafer, layers, options, policy)
        shape, order = options.region, options.placement
        yield count or len(place_regions(wafer, None, shape, layers, order))
        return
    dies = wafer.dies if wafer.dies > 1 else 0
    counts = range(1, min(layers, dies or wafer.cores) + 1)
    powers = [count for count in counts if count & (count - 1) == 0]
    yield from powers
    for count in counts:
        if count not in powers and (layers % count == 0 or (dies and dies % count == 0)):
            yield count


def chunk_counts(
    stages: int, policy: Policy, options: Options, request: Request
) -> Iterable[int | None]:
    """Chunk counts worth trying with a number of stages."""
    if options.chunks != "auto":
        return [options.chunks]
    if "chunks" not in policy.uses:
        return [None]
    pages = max(1, request.new_tokens // PAGE_TOKENS)
    return sorted({min(pages, math.ceil(each * stages)) for each in CHUNKS_PER_STAGE})
