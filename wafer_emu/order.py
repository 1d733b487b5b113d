"""Chunks of all requests in service order, with their costs and what the largest of them needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mocap.policy import Policy, Request
from wafer_emu.deployment import Deployment
from wafer_emu.memory import StageMemory, kv_quanta_per_token

__all__ = ["Order", "quanta_per_token"]

Int64 = npt.NDArray[np.int64]


@dataclass
class Order:
    """Chunks of all requests in service order, on a deployment.

    Arrays over tasks (T,): ``request``, ``chunk``, ``tokens``, ``prefix``, ``last`` of its request.
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

    @cached_property
    def largest_chunks(self) -> Int64:
        """Largest chunk from each task on (T + 1,): whose working set KV must leave room for."""
        reverse = np.maximum.accumulate(np.append(self.tokens, 1)[::-1])
        return reverse[::-1]

    @cached_property
    def compute(self) -> Int64:
        """Cycles of every task on every stage (stage, task), without transfers."""
        stages = range(len(self.memories))
        cost = self.deployment.stage_cost
        pieces = [(int(c), int(p)) for c, p in zip(self.tokens, self.prefix, strict=True)]
        cycles = np.array([[cost(stage, *piece) for piece in pieces] for stage in stages], np.int64)
        for task in np.flatnonzero(self.last):
            cycles[-1, task] += self.deployment.clocks[-1].epilogue(int(self.tokens[task]))
        return cycles


def quanta_per_token(deployment: Deployment, policy: Policy) -> list[int]:
    """Least KV quanta of one token on every stage: of all its layers, or of the one at work."""
    if policy.frees_by_layer():
        return [kv_quanta_per_token(clock) for clock in deployment.clocks]
    return list(deployment.kv_quanta_per_token())
