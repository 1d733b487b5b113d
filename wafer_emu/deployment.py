"""A model on a wafer: stages on regions, their clocks and memories, and what a policy is told."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mocap.policy import Policy, Request, Setting
from wafer_emu.clock import Clock, Tiers, alike
from wafer_emu.die_memory import arrival_cycles, passing_layers
from wafer_emu.memory import StageMemory, kv_quanta_per_token, kv_quantum_bytes
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.placement import (
    Placement,
    Stage,
    place_regions,
    place_stages,
    split_layers,
)
from wafer_emu.program import Lookup, Tensor
from wafer_emu.region_links import RegionLinks
from wafer_emu.routing import Routing
from wafer_emu.stage_clocks import Shelf, StageClocks, with_attention
from wafer_emu.tiling import query_tile_tokens
from wafer_emu.wafer import Wafer
from wafer_kernels.errors import ConfigError, UsageError

__all__ = ["PAGE_TOKENS", "Deployment", "deploy", "stage_count"]

Int64 = npt.NDArray[np.int64]
DEFAULT_STAGES = 16
PAGE_TOKENS = 16  # chunks and moves are multiples of this, remainders apart


class ChunkShape(NamedTuple):
    """A chunk on a stage: its tiles (tokens, tokens before all alike), cycles until it has come."""

    tiles: tuple[tuple[int, Int64], ...]
    arrival_cycles: int


@dataclass
class Deployment:
    """A model placed on a wafer under given memory tiers.

    Attributes
    ----------
    model
        The layers that are placed.
    tile_tokens
        Longest tile in which a chunk passes a layer [tokens].
    in_rounds
        Whether tiles are whole rounds of the rows of cores, or as even as can be.
    scale
        (layers of the whole model, layers placed): costs of layers are scaled by their ratio.
    placement
        Stages on regions.
    clocks
        Clock of each stage; stages alike share one.
    """

    wafer: Wafer
    model: Model
    options: Options
    tiers: Tiers
    tile_tokens: int
    in_rounds: bool
    scale: tuple[int, int]
    placement: Placement
    clocks: tuple[Clock, ...]
    _costs: dict[tuple[int, int, int], int] = field(default_factory=dict, init=False)
    _memories: dict[int, tuple[StageMemory, ...]] = field(default_factory=dict, init=False)
    _shapes: dict[tuple[int, int], ChunkShape] = field(default_factory=dict, init=False)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline stages."""
        return self.placement.stages

    def memories(self, handoff_tokens: int) -> tuple[StageMemory, ...]:
        """Memory of every stage where chunks of at most ``handoff_tokens`` follow one another."""
        if handoff_tokens not in self._memories:
            shared: dict[tuple[object, ...], StageMemory] = {}
            result = []
            for stage, clock in zip(self.stages, self.clocks, strict=True):
                embedding, head = self.holds_embedding(stage), self.holds_head(stage)
                kinds = tuple(sorted(map(str, self.layer_kinds[stage.index])))
                same = (id(clock), stage.region.dies(self.wafer), kinds, embedding, head)
                if same not in shared:
                    shared[same] = StageMemory(
                        clock,
                        stage,
                        embedding,
                        head,
                        self.tile_tokens,
                        handoff_tokens,
                        self.options.kv_budget,
                    )
                result.append(shared[same])
            self._memories[handoff_tokens] = tuple(result)
        return self._memories[handoff_tokens]

    def with_attention(self, attention_bytes: Sequence[int], shelf: Shelf) -> Deployment:
        """The same, but for what attention may use of a core of each stage."""
        clocks = tuple(
            with_attention(clock, size, shelf)
            for clock, size in zip(self.clocks, attention_bytes, strict=True)
        )
        return replace(self, clocks=clocks)

    def holds_embedding(self, stage: Stage) -> bool:
        """Whether the embedding table lives on a stage."""
        return stage.index == 0 and self.options.embedding == "first-stage"

    def holds_head(self, stage: Stage) -> bool:
        """Whether final norm and head live on a stage."""
        return stage.index == len(self.stages) - 1

    @cached_property
    def round_tokens(self) -> int:
        """Tokens that give every row of cores one query tile, so that none of them idles."""
        return min(stage.region.rows for stage in self.stages) * query_tile_tokens(self.wafer)

    @property
    def _grain(self) -> int:
        """Tokens that tiles are dealt in: one, or whole rounds of the rows.

        Between two rounds a tile takes as long as the longer of them; but shorter tiles are more
        tiles, whose steps have a fixed cost.
        """
        rounds = self.in_rounds and self.tile_tokens >= self.round_tokens
        return self.round_tokens if rounds else 1

    def tiles(self, chunk: int) -> Iterator[tuple[int, int]]:
        """(tokens, tokens before) of the even tiles in which a chunk passes a layer.

        Even in tokens, or in whole rounds of the rows, of which the last one may be short.
        """
        grains = -(-chunk // self._grain)
        count = 1
        if chunk > self.tile_tokens:
            count = -(-grains // (self.tile_tokens // self._grain))
        before = 0
        for index in range(count):
            here = grains // count + (1 if index < grains % count else 0)
            size = min(here * self._grain, chunk - before)
            yield size, before
            before += size

    def with_tile(self, tokens: int, in_rounds: bool) -> Deployment:
        """The same stages and clocks with another longest tile, dealt in rounds or evenly."""
        return replace(self, tile_tokens=tokens, in_rounds=in_rounds)

    def stage_cost(self, stage: int, chunk: int, prefix: int) -> int:
        """Cycles of a stage's layers on a chunk, tile by tile; the head is not in it."""
        key = (self.first_alike[stage], chunk, prefix)
        if key not in self._costs:
            self._costs[key] = int(self.stage_costs(stage, chunk, np.array([prefix]))[0])
        return self._costs[key]

    def stage_costs(
        self, stage: int, chunk: int, prefixes: Int64, routing: Routing | None = None
    ) -> Int64:
        """:meth:`stage_cost` after many prefixes (P,).

        Experts get the tokens that a request's ``routing`` says, or their even shares.
        """
        clock, shape = self.clocks[stage], self._shape(stage, chunk)
        layer_cycles = passing_layers if self.passes_die_memory(chunk) else Clock.layers
        cycles = np.zeros_like(prefixes)
        for tile, before in shape.tiles:
            reached = (prefixes + before[:, np.newaxis]).ravel()
            for layer, count in self.layers_alike(stage, routing):
                what = layer, tile, reached, self.options.causal_skip, routing
                each = layer_cycles(clock, *what)
                cycles += count * each.reshape(before.size, -1).sum(axis=0)
        whole, placed_layers = self.scale
        return -(-cycles * whole // placed_layers) + shape.arrival_cycles

    def _shape(self, stage: int, chunk: int) -> ChunkShape:
        """What a stage's cost of a chunk has for all prefixes."""
        key = self.first_alike[stage], chunk
        if key not in self._shapes:
            clock, arrival = self.clocks[stage], 0
            if self.holds_embedding(self.stages[stage]):
                stream = Tensor("stream", chunk, self.model.hidden_size)
                arrival += clock.operation(Lookup(stream, "model.embed_tokens.weight"))
            if self.tiers.activations == "dram":
                first, _ = next(self.tiles(chunk))
                arrival += arrival_cycles(clock, first)
            self._shapes[key] = ChunkShape(tuple(alike(self.tiles(chunk))), arrival)
        return self._shapes[key]

    def passes_die_memory(self, chunk: int) -> bool:
        """Whether a chunk's residual stream passes through die memory, tile by tile."""
        return self.tiers.activations == "dram" and chunk > self.tile_tokens

    @cached_property
    def layer_kinds(self) -> tuple[dict[tuple[int, object], int], ...]:
        """For every stage, the number of layers of each (first such layer of the model, kind)."""
        first: dict[object, int] = {}
        result = []
        for stage, clock in zip(self.stages, self.clocks, strict=True):
            counts: dict[tuple[int, object], int] = {}
            for layer in range(stage.first_layer, stage.first_layer + stage.layers):
                kind = clock.layer_kind(layer)
                key = (first.setdefault(kind, layer), kind)
                counts[key] = counts.get(key, 0) + 1
            result.append(counts)
        return tuple(result)

    @cached_property
    def first_alike(self) -> tuple[int, ...]:
        """For every stage the first one that costs the same: clock, layers, embedding."""
        kinds: dict[tuple[object, ...], int] = {}
        return tuple(
            kinds.setdefault(
                (id(clock), tuple(counts.items()), self.holds_embedding(stage)), stage.index
            )
            for stage, clock, counts in zip(self.stages, self.clocks, self.layer_kinds, strict=True)
        )

    def layers_alike(self, stage: int, routing: Routing | None) -> Iterator[tuple[int, int]]:
        """(layer, how many cost the same) of a stage; a routing makes every layer differ."""
        if routing is None:
            for (layer, _), count in self.layer_kinds[stage].items():
                yield layer, count
            return
        placed = self.stages[stage]
        for layer in range(placed.first_layer, placed.first_layer + placed.layers):
            yield layer, 1

    def slowest_cost(self) -> SlowestCost:
        """Cost t(chunk, prefix) of the slowest stage, with a vectorised ``table``."""
        return SlowestCost(self)

    @cached_property
    def links(self) -> RegionLinks:
        """Links between the stages' regions."""
        return RegionLinks(self.wafer, [stage.region for stage in self.stages])

    def kv_quanta_per_token(self) -> tuple[int, ...]:
        """KV quanta that each stage keeps of one token."""
        return tuple(
            stage.layers * kv_quanta_per_token(clock)
            for stage, clock in zip(self.stages, self.clocks, strict=True)
        )

    @property
    def chunks(self) -> int:
        """Chunks wanted for a request: as asked, else as many as stages."""
        return self.options.given_chunks or len(self.stages)

    def setting(
        self,
        capacities: Sequence[int],
        resident_bytes: Sequence[int],
    ) -> Setting:
        """What a policy is told; ``capacities`` are the stages' KV quanta."""
        quantum = kv_quantum_bytes(self.clocks[0])
        link_bytes_per_cycle = self.wafer.link.bytes_per_cycle  # of a lone stage: it sends nothing
        if len(self.stages) > 1:
            link_bytes_per_cycle = max(1, math.floor(self.links.rate(0, 1)))
        return Setting(
            stages=len(self.stages),
            chunks=self.chunks,
            page_tokens=PAGE_TOKENS,
            cost=self.slowest_cost(),
            stage_cost=self.stage_cost,
            kv_bytes_per_token=tuple(each * quantum for each in self.kv_quanta_per_token()),
            kv_capacity_bytes=tuple(
                max(0, quanta * quantum - resident)
                for quanta, resident in zip(capacities, resident_bytes, strict=True)
            ),
            hops=self.placement.hops(),
            link_bytes_per_cycle=link_bytes_per_cycle,
            chunk_tokens=self.options.chunk_tokens,
            chunk_vector=self.options.chunk_vector,
            layers=tuple(stage.layers for stage in self.stages),
        )


@dataclass(frozen=True)
class SlowestCost:
    """Cycles of the slowest stage on (chunk, prefix)."""

    deployment: Deployment
    monotone = True  # a longer chunk never takes less: dynamic programs ask for less

    @cached_property
    def _stages(self) -> tuple[int, ...]:
        """Stages one of which is the slowest: a stage with fewer of the same layers is not."""
        deployment = self.deployment

        def more(stage: int, other: int) -> bool:
            """Whether a stage has all that another has, and costs no less."""
            clocks, counts = deployment.clocks, deployment.layer_kinds
            embeddings = (deployment.holds_embedding(deployment.stages[i]) for i in (other, stage))
            return (
                clocks[stage] is clocks[other]
                and all(counts[stage].get(kind, 0) >= n for kind, n in counts[other].items())
                and list(embeddings) != [True, False]
            )

        kinds = sorted(set(deployment.first_alike))
        return tuple(
            one for one in kinds if not any(more(other, one) for other in kinds if other != one)
        )

    def __call__(self, chunk: int, prefix: int) -> int:
        """Cycles of the slowest stage."""
        return max(self.deployment.stage_cost(stage, chunk, prefix) for stage in self._stages)

    def table(self, chunks: Int64, prefixes: Int64) -> Int64:
        """Cycles for arrays of chunks and prefixes of one shape."""
        costs = np.zeros_like(prefixes)
        for chunk in np.unique(chunks):
            here = chunks == chunk
            for stage in self._stages:
                cycles = self.deployment.stage_costs(stage, int(chunk), prefixes[here])
                costs[here] = np.maximum(costs[here], cycles)
        return costs


def stage_count(wafer: Wafer, layers: int, options: Options, policy: Policy) -> int | None:
    """Stages wanted; None where a region shape alone decides."""
    if policy.stage_count is not None:
        return policy.stage_count
    if isinstance(options.stages, int):
        if options.stages > layers:
            raise UsageError(
                f"{options.stages} stages for {layers} layers: every stage needs a layer, so ask "
                f"for at most {layers}"
            )
        return options.stages
    if options.region is not None:
        return None
    units = wafer.dies if wafer.dies > 1 else wafer.cores
    return min(DEFAULT_STAGES, layers, units)


def deploy(
    wafer: Wafer,
    model: Model,
    options: Options,
    policy: Policy,
    tiers: Tiers,
    lean: int,
    longest: Request,
    shelf: Shelf,
) -> Deployment:
    """Place a model on a wafer.

    Layers are split for the least slowest stage, head counted, at an even chunk in the middle of
    the longest request, with attention as if memory did not bind it; it may use whatever code and
    weights leave of a core. ``lean`` halves, each time, the tiles in which a chunk passes a layer.
    ``shelf`` keeps clocks for the next deployment of the same model on the same wafer.

    Raises
    ------
    UsageError
        If stages, regions or layers do not go together.
    ConfigError
        If a die memory is asked for where there is none.
    CapacityError
        If the weights fit under no split.
    """
    if tiers.in_die_memory and wafer.dram is None:
        raise ConfigError(
            f"{wafer.name} has no die memory: weights, KV and activations can only live in SRAM "
            "(--weights-tier sram --kv-tier sram --activations-tier sram)"
        )
    whole = model.layers
    if options.layers is not None:
        model = model.with_layers(options.layers)
    count = stage_count(wafer, model.layers, options, policy)
    regions = place_regions(wafer, count, options.region, model.layers, options.placement)
    stages = len(regions)
    chunk = options.usual_chunk(longest.new_tokens, stages, policy.uses)
    tile = -(-chunk // 2**lean)
    if not policy.streams_tokens:  # chunks are whole pages: an even one is then one tile
        tile = -(-tile // PAGE_TOKENS) * PAGE_TOKENS
    prefix = longest.prefix_tokens + longest.new_tokens // 2
    clocks = StageClocks(wafer, model, options, tiers, shelf)
    of_stage = [clocks.of(region) for region in regions]
    head_cycles = of_stage[-1].epilogue(tile)

    @cache
    def free(stage: int, layers: range) -> int:
        embedding = stage == 0 and options.embedding == "first-stage"
        return clocks.free(regions[stage], layers, embedding, stage == stages - 1)

    @cache
    def until(clock: Clock) -> list[int]:
        """Cycles of all layers before each, and of all."""
        kinds = [clock.layer_kind(layer) for layer in range(model.layers)]
        each = {
            kind: clock.layer(kinds.index(kind), tile, prefix, options.causal_skip)
            for kind in set(kinds)
        }
        return [0, *accumulate(each[kind] for kind in kinds)]

    def cost(stage: int, first: int, number: int) -> int | None:
        if free(stage, range(first, first + number)) <= 0:
            return None
        cycles = until(of_stage[stage])
        head = head_cycles if stage == stages - 1 else 0
        return cycles[first + number] - cycles[first] + head

    counts = split_layers(model.layers, stages, cost)
    if counts is None:
        raise clocks.refusal(regions)
    placement = place_stages(wafer, regions, counts, options.placement)
    chosen = []
    for stage in placement.stages:
        layers = range(stage.first_layer, stage.first_layer + stage.layers)
        clock = of_stage[stage.index]
        chosen.append(with_attention(clock, free(stage.index, layers), shelf))
    return Deployment(
        wafer, model, options, tiers, tile, True, (whole, model.layers), placement, tuple(chosen)
    )
