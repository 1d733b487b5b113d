"""Cycles that no plan of a number of stages and chunks undercuts, whatever its cuts.

Of one request alone, so of each among others. Proofs in docs/method.md, "Floors".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mocap.least_time import EXACT
from mocap.policy import Request
from wafer_emu.clock import Clock
from wafer_emu.deployment import Deployment
from wafer_emu.program import Attention, attention_operation, layer_operations
from wafer_emu.tiling import query_tile_tokens

__all__ = ["Floors"]

Float = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Kinds = Mapping[tuple[int, object], int]  # layers of each (first such layer, kind)
PREFIXES = 128  # at which attention is asked for: fewer make floors lower
WATCHED_ROUNDS = 8  # whole ones, after which a piece that is a tile longer counts as no longer
THINNING = 1.1  # growth of long sizes: what that costs in tightness
RATES = (0.85, 0.9, 0.94, 0.97, 0.985, 1.0, 1.015, 1.03)  # of attention's, tried for the best floor


def _pairs(tokens: Int64 | int, before: Int64 | int, window: int | None) -> Float:
    """(query, key) pairs that tokens see after those before them, arrays broadcast."""

    def seen(count: Int64 | int) -> Float:
        all_of_them = np.asarray(count, np.float64)
        short = all_of_them if window is None else np.minimum(all_of_them, window)
        return short * (short + 1) / 2 + short * (all_of_them - short)

    return seen(np.add(tokens, before)) - seen(before)


@dataclass
class _Layer:
    """Floors of a kind of layer on a request: what its pieces take, however it is cut.

    A piece is a chunk, or the tile of one that passes the layer by itself. Costs are known at a few
    sizes, and after ``prefixes`` (P + 1,), the first and the end of the request among them.
    """

    clock: Clock
    layer: int
    causal_skip: bool
    request: Request
    _known: dict[int, tuple[int, Int64]] = field(default_factory=dict)
    _floors: dict[int, float] = field(default_factory=dict)

    @cached_property
    def _window(self) -> int | None:
        return attention_operation(self.clock.model, self.layer, 1, 0).window

    @cached_property
    def _prefixes(self) -> Int64:
        ends = self.request.prefix_tokens, self.request.tokens
        return np.unique(np.linspace(*ends, PREFIXES + 1).astype(np.int64))

    @cached_property
    def _sizes(self) -> list[int]:
        """Ends of the steps of sizes, from 0 on; within one the cost is taken for constant.

        It mostly is up to whole rounds, but for the first query tile of one.
        """
        tile = query_tile_tokens(self.clock.wafer)
        a_round, number = self.clock.region.rows * tile, 0
        sizes = [0, tile, 2 * tile]
        while sizes[-1] < self.request.new_tokens:
            number = max(number + 1, int(number * THINNING))
            if number <= WATCHED_ROUNDS:
                sizes.append(number * a_round)
            sizes.append(number * a_round + tile)
        return sorted(set(sizes))

    def _cost(self, size: int) -> tuple[int, Int64]:
        """Cycles of a piece: attention apart, and its attention after each prefix (P,)."""
        if size not in self._known:
            clock, what = self.clock, (self.clock.model, self.layer, size, 0)
            besides = sum(
                clock.operation(each)
                for each in layer_operations(*what, self.causal_skip)
                if not isinstance(each, Attention)
            )
            attention = attention_operation(*what, self.causal_skip)
            self._known[size] = besides, clock.attentions(attention, self._prefixes[:-1])
        return self._known[size]

    def at_least(self, longest: int) -> float:
        """Cycles of the request in pieces of at most ``longest`` tokens."""
        longest = min(longest, self.request.new_tokens)
        if longest not in self._floors:
            self._floors[longest] = self._floor(longest)
        return self._floors[longest]

    def _floor(self, longest: int) -> float:
        steps = [(low, min(high, longest)) for low, high in pairwise(self._sizes) if low < longest]
        costs = [self._cost(low + 1) for low, _ in steps]
        ends = np.array([[low + 1, high] for low, high in steps], np.int64)
        besides = np.array([cost for cost, _ in costs], np.float64)
        attention = np.array([cost for _, cost in costs], np.float64)
        pairs = _pairs(ends[:, :, np.newaxis], self._prefixes[1:] - 1, self._window)
        whole = float(_pairs(self.request.new_tokens, self.request.prefix_tokens, self._window))
        rise = (attention[:, -1] - attention[:, 0]) / (pairs[:, 1, -1] - pairs[:, 1, 0] + 1)
        best = 0.0
        for rate in (0.0, *(float(rise.min()) * share for share in RATES)):
            beyond = np.min(attention[:, np.newaxis] - rate * pairs, axis=2)
            a_token = np.min((besides[:, np.newaxis] + beyond) / ends)
            best = max(best, self.request.new_tokens * float(a_token) + rate * whole)
        return best


@dataclass
class Floors:
    """Floors of the layers of one model, remembered by clock, kind of layer and request."""

    causal_skip: bool
    _layers: dict[tuple[object, ...], _Layer] = field(default_factory=dict)

    def layers(self, clock: Clock, kinds: Kinds, request: Request, longest: int) -> float:
        """Cycles of layers on a request in pieces of at most ``longest`` tokens."""
        return sum(
            count * self._layer(clock, layer, kind, request).at_least(longest)
            for (layer, kind), count in kinds.items()
        )

    def _layer(self, clock: Clock, layer: int, kind: object, request: Request) -> _Layer:
        key = id(clock), kind, request
        if key not in self._layers:
            self._layers[key] = _Layer(clock, layer, self.causal_skip, request)
        return self._layers[key]

    def split(
        self,
        clocks: Sequence[Clock],
        scale: float,
        request: Request,
        longest: int,
        most_chunks: int | None,
    ) -> int:
        """Cycles from a request's arrival to its end on stages (N,), however layers are split."""
        layers, stages = clocks[0].model.layers, len(clocks)
        kinds = _kinds(clocks[0])
        whole = min(self.layers(clock, kinds, request, longest) for clock in set(clocks)) * scale
        if most_chunks == 1:
            return int(whole * EXACT)
        if len(kinds) > 1 or len(set(clocks)) > 1:
            return int(whole / stages * EXACT)
        most = -(-layers // stages)
        fullest = layers - stages * (most - 1)  # so many stages have the most, or one has more
        further = 0 if most_chunks is None else (fullest - 1) / most_chunks
        return int(whole / layers * min(most * (1 + further), most + 1) * EXACT)

    def placed(
        self, deployment: Deployment, request: Request, longest: int, most_chunks: int | None
    ) -> int:
        """Cycles from a request's arrival to its end on a deployment."""
        whole, placed = deployment.scale
        clocks, kinds = deployment.clocks, deployment.layer_kinds
        each = [
            self.layers(clock, some, request, longest) * whole / placed
            for clock, some in zip(clocks, kinds, strict=True)
        ]
        if most_chunks is None:
            return int(max(each) * EXACT)
        sums = np.cumsum([0.0, *each])
        best = 0.0
        for first in range(len(each)):
            for last in range(first, len(each)):
                between, common = sums[last + 1] - sums[first], 0.0
                if clocks[first] is clocks[last]:
                    both = {
                        kind: min(count, kinds[last].get(kind, 0))
                        for kind, count in kinds[first].items()
                    }
                    common = self.layers(clocks[first], both, request, longest) * whole / placed
                best = max(best, common + (between - common) / most_chunks)
        return int(best * EXACT)


def _kinds(clock: Clock) -> Kinds:
    first: dict[object, int] = {}
    kinds: dict[tuple[int, object], int] = {}
    for layer in range(clock.model.layers):
        kind = clock.layer_kind(layer)
        key = (first.setdefault(kind, layer), kind)
        kinds[key] = kinds.get(key, 0) + 1
    return kinds
