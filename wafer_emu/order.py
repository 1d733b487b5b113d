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
        deployment, alike = self.deployment, self.deployment.first_alike
        pieces: dict[tuple[int, Routing | None], list[int]] = {}
        for task, chunk in enumerate(self.tokens.tolist()):
            pieces.setdefault((chunk, self.routing_of(task)), []).append(task)
        cycles = np.zeros((len(self.memories), self.tokens.size), np.int64)
        for stage in range(len(self.memories)):
            if alike[stage] < stage and not self.routing:  # routed layers cost each their own
                cycles[stage] = cycles[alike[stage]]
                continue
            for (chunk, routing), tasks in pieces.items():
                prefixes, place = np.unique(self.prefix[tasks], return_inverse=True)
                cycles[stage, tasks] = deployment.stage_costs(stage, chunk, prefixes, routing)[
                    place
                ]
        for task in np.flatnonzero(self.last).tolist():
            cycles[-1, task] += deployment.clocks[-1].epilogue(int(self.tokens[task]))
        return cycles


def quanta_per_token(deployment: Deployment, policy: Policy) -> list[int]:
    """Least KV quanta of one token on every stage: of all its layers, or of the one at work."""
    if policy.frees_by_layer():
        return [kv_quanta_per_token(clock) for clock in deployment.clocks]
    return list(deployment.kv_quanta_per_token())
