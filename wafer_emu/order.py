"""Chunks of all requests in service order, with their costs and what the largest of them needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mocap.policy import Policy, Request
from wafer_emu.deployment import Deployment
from wafer_emu.memory import StageMemory, kv_quanta_per_token
from wafer_emu.routing import Routing

__all__ = ["Order", "quanta_per_token"]

Int64 = npt.NDArray[np.int64]


@dataclass
class Order:
    """Chunks of all requests in service order, on a deployment.

    Arrays over tasks (T,): ``request``, ``chunk``, ``tokens``, ``prefix``, ``last`` of its request.
    ``routing`` of each request, in the same order, where it is known which experts tokens choose.
    """

    deployment: Deployment
    policy: Policy
    requests: list[Request]
    cuts: list[list[int]]
    memories: tuple[StageMemory, ...]
    request: Int64
    chunk: Int64
    tokens: Int64
    prefix: Int64
    last: npt.NDArray[np.bool_]
    routing: Sequence[Routing] = field(default=(), kw_only=True)

    @cached_property
    def largest_chunks(self) -> Int64:
        """Largest chunk from each task on (T + 1,): whose working set KV must leave room for."""
        reverse = np.maximum.accumulate(np.append(self.tokens, 1)[::-1])
        return reverse[::-1]

    def routing_of(self, task: int) -> Routing | None:
        """Routing of the request that a task belongs to."""
        return self.routing[self.request[task]] if self.routing else None

    @cached_property
    def compute(self) -> Int64:
        """Cycles of every task on every stage (stage, task), without transfers."""
        cycles = np.zeros((len(self.memories), self.tokens.size), np.int64)
        if self.routing:
            for stage, task in np.ndindex(*cycles.shape):
                piece = int(self.tokens[task]), int(self.prefix[task]), self.routing_of(task)
                cycles[stage, task] = self.deployment.stage_cost(stage, *piece)
        else:
            for stage, like in enumerate(self.deployment.first_alike):
                cycles[stage] = self._even_loads(stage) if like == stage else cycles[like]
        for task in np.flatnonzero(self.last):
            cycles[-1, task] += self.deployment.clocks[-1].epilogue(int(self.tokens[task]))
        return cycles

    def _even_loads(self, stage: int) -> Int64:
        """Cycles of every task on a stage, experts evenly loaded: chunks of a size in one call."""
        cycles = np.zeros_like(self.tokens)
        for size in np.unique(self.tokens):
            here = self.tokens == size
            cycles[here] = self.deployment.stage_costs(stage, int(size), self.prefix[here])
        return cycles


def quanta_per_token(deployment: Deployment, policy: Policy) -> list[int]:
    """Least KV quanta of one token on every stage: of all its layers, or of the one at work."""
    if policy.frees_by_layer():
        return [kv_quanta_per_token(clock) for clock in deployment.clocks]
    return list(deployment.kv_quanta_per_token())
