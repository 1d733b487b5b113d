"""How much of a core attention may use: the most that leaves the KV of a request its room.

More is never slower, since attention then has more tilings to choose from. The bytes are those of
known tilings, whatever the memory: with more of it a stage's attention gets as much or more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mocap.policy import Policy, Request
from wafer_emu.deployment import Deployment
from wafer_emu.memory import StageMemory
from wafer_emu.order import Order, quanta_per_token
from wafer_emu.stage_clocks import Shelf, attention_levels, with_attention

__all__ = ["Moment", "beside_kv", "moments", "moments_of", "shrunk", "used"]


class Moment(NamedTuple):
    """KV of so many tokens is there while chunks of so many are at work, or still come."""

    held_tokens: int
    load_tokens: int


def moments(cuts: Sequence[int], prefix_tokens: int, again: bool) -> list[Moment]:
    """The moments of a request that say whether it fits; ``again`` if its like follows it."""
    largest = max(cuts)
    most: dict[int, int] = {}
    held = prefix_tokens
    for index, size in enumerate(cuts):
        held += size
        most[largest if again else max(cuts[index:])] = held
    return [Moment(held, load) for load, held in most.items()]


def moments_of(requests: Sequence[Request], cuts: Sequence[Sequence[int]]) -> list[Moment]:
    """The moments of all requests: of the only one chunk by chunk, of several at their fullest."""
    if len(requests) == 1:
        return moments(cuts[0], requests[0].prefix_tokens, again=False)
    longest = max(request.tokens for request in requests)
    return [Moment(longest, max(max(sizes) for sizes in cuts))]


def beside_kv(
    deployment: Deployment,
    policy: Policy,
    times: Sequence[Moment],
    handoff_tokens: int,
    shelf: Shelf,
) -> tuple[Deployment, bool]:
    """A deployment whose attention uses what is left beside the KV of a request.

    Where a stage cannot hold its own KV and the policy moves KV, all stages get equally much, as
    much as leaves room for the KV of all of them together.

    Parameters
    ----------
    times
        When the KV must have room.
    handoff_tokens
        Of a chunk that may arrive meanwhile.

    Returns
    -------
    tuple
        The deployment, and whether every stage has room for its own KV.
    """
    if deployment.options.kv_budget is not None or deployment.wafer.attention != "ring":
        return deployment, True
    per_token = quanta_per_token(deployment, policy)
    memories = deployment.memories(handoff_tokens)
    kinds = {id(memory): _Stage(memory, times, shelf) for memory in memories}
    stages = [kinds[id(memory)] for memory in memories]
    chosen = [stage.most(each) for stage, each in zip(stages, per_token, strict=True)]
    alone = min(chosen) >= 0
    if not alone and type(policy).reallocate is not Policy.reallocate:
        chosen = _pooled(stages, sum(per_token), times)
    sizes = [stage.levels[max(0, level)] for stage, level in zip(stages, chosen, strict=True)]
    return deployment.with_attention(sizes, shelf), alone


def _pooled(stages: Sequence[_Stage], per_token: int, times: Sequence[Moment]) -> list[int]:
    """The level that leaves all stages together room for all of their KV, if each has it."""
    most = [max(0, stage.most(0)) for stage in stages]

    def fits(level: int) -> bool:
        return all(
            sum(
                stage.quanta(min(level, own), each.load_tokens)
                for stage, own in zip(stages, most, strict=True)
            )
            >= each.held_tokens * per_token
            for each in times
        )

    found = bisect_right(range(max(most) + 1), False, key=lambda level: not fits(level)) - 1
    return [min(max(0, found), own) for own in most]


class _Stage:
    """What KV has room for on a stage, at each level of attention's bytes."""

    def __init__(self, memory: StageMemory, times: Sequence[Moment], shelf: Shelf) -> None:
        self._memory, self._times, self._shelf = memory, times, shelf
        self.levels = attention_levels(memory.clock)
        self._memories: dict[int, StageMemory] = {}

    def quanta(self, level: int, load_tokens: int) -> int:
        """KV quanta beside attention at a level; -1 if attention alone does not fit."""
        if level not in self._memories:
            clock = with_attention(self._memory.clock, self.levels[level], self._shelf)
            self._memories[level] = replace(self._memory, clock=clock)
        memory = self._memories[level]
        return -1 if memory.shortage(load_tokens) > 0 else memory.kv_quanta(load_tokens)

    def most(self, per_token: int) -> int:
        """Highest level that always leaves room for the KV of a token so large; -1 if none does."""

        def overfull(level: int) -> bool:
            return any(
                self.quanta(level, each.load_tokens) < each.held_tokens * per_token
                for each in self._times
            )

        within = range(bisect_right(self.levels, self._memory.clock.attention_bytes))
        return bisect_right(within, False, key=overfull) - 1


def shrunk(deployment: Deployment, times: int, shelf: Shelf) -> Deployment:
    """A deployment whose attention uses less: the number of its level is halved so many times."""
    sizes = []
    for clock in deployment.clocks:
        levels = attention_levels(clock) or [0]
        level = bisect_right(levels, clock.attention_bytes) - 1
        sizes.append(levels[max(0, level) >> times])
    return deployment.with_attention(sizes, shelf)


def used(order: Order, shelf: Shelf) -> Deployment:
    """The order's deployment, without what attention could use but no task of the order does.

    Every task takes the tiling that it took before.
    """
    deployment = order.deployment
    if deployment.wafer.attention != "ring":
        return deployment
    pieces: dict[int, set[int]] = {}
    for tokens, prefix in zip(order.tokens.tolist(), order.prefix.tolist(), strict=True):
        for tile, before in deployment.tiles(tokens):
            pieces.setdefault(tile, set()).add(prefix + before)
    known: dict[tuple[int, object], int] = {}
    sizes = []
    for clock, kinds in zip(deployment.clocks, deployment.layer_kinds, strict=True):
        for layer, kind in kinds:
            if (id(clock), kind) not in known:
                known[id(clock), kind] = max(
                    clock.ring_attention(operation).most_bytes(
                        operation, np.array(sorted(prefixes), np.int64)
                    )
                    for tile, prefixes in pieces.items()
                    for operation in [
                        clock.layer_attention(layer, tile, deployment.options.causal_skip)
                    ]
                )
        most = max(known[id(clock), kind] for _, kind in kinds)
        levels = attention_levels(clock)
        sizes.append(levels[bisect_left(levels, most)])
    return deployment.with_attention(sizes, shelf)
