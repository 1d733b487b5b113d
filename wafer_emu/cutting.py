"""Who is served when, and the chunks of every request, lined up for the stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import mocap.policy
from mocap.policy import Policy, Request, Setting
from mocap.uniform import Uniform
from wafer_emu.deployment import Deployment
from wafer_emu.memory import StageMemory, kv_quantum_bytes
from wafer_emu.order import Order

__all__ = ["cuts_of", "even_cuts", "in_service_order", "lined_up", "told"]


def in_service_order(
    deployment: Deployment, policy: Policy, requests: Sequence[Request]
) -> list[Request]:
    """Requests in the order in which a policy takes them, each time among those that have arrived.

    It chooses as stage 0 becomes free, which is predicted: a request keeps stage 0 for as long as
    it would in one chunk.
    """
    coming = sorted(requests, key=lambda one: (one.arrival_cycle, one.index), reverse=True)
    if type(policy).order is Policy.order or coming[0].arrival_cycle == coming[-1].arrival_cycle:
        return policy.order(requests)
    waiting: list[Request] = []
    served: list[Request] = []
    free = 0
    while coming or waiting:
        if not waiting:
            free = max(free, coming[-1].arrival_cycle)
        while coming and coming[-1].arrival_cycle <= free:
            waiting.append(coming.pop())
        following = policy.order(waiting)[0]
        waiting.remove(following)
        served.append(following)
        free += deployment.stage_cost(0, following.new_tokens, following.prefix_tokens)
    return served


def told(
    deployment: Deployment,
    memories: Sequence[StageMemory],
    request: Request,
    load_tokens: int,
) -> Setting:
    """The setting with the KV capacity that the stages have at a working set."""
    resident = [
        request.prefix_tokens * per_token * kv_quantum_bytes(deployment.clocks[0])
        for per_token in deployment.kv_quanta_per_token()
    ]
    return deployment.setting([memory.kv_quanta(load_tokens) for memory in memories], resident)


def even_cuts(
    deployment: Deployment, policy: Policy, requests: Sequence[Request]
) -> list[list[int]]:
    """Even chunks, as ``uniform`` cuts them, or whole requests if the policy does not cut them."""
    nothing = [0] * len(deployment.stages)
    setting = deployment.setting(nothing, nothing)
    return _cut_all(Uniform() if policy.uses else Policy(), requests, setting)


def cuts_of(
    deployment: Deployment, policy: Policy, requests: Sequence[Request], usual: int
) -> list[list[int]]:
    """A policy's own chunks; it is told the room beside the working set of a usual one."""
    longest = max(requests, key=lambda one: one.new_tokens)
    return _cut_all(policy, requests, told(deployment, deployment.memories(usual), longest, usual))


def _cut_all(policy: Policy, requests: Sequence[Request], setting: Setting) -> list[list[int]]:
    known: dict[tuple[int, int], list[int]] = {}
    cuts = []
    for request in requests:
        key = (request.new_tokens, request.prefix_tokens)
        if key not in known:
            known[key] = mocap.policy.cut(policy, request, setting)
        cuts.append(known[key])
    return cuts


def lined_up(
    deployment: Deployment,
    policy: Policy,
    requests: list[Request],
    cuts: list[list[int]],
    memories: tuple[StageMemory, ...],
) -> Order:
    """Chunks of all requests in a row."""
    request = np.repeat(np.arange(len(cuts)), [len(each) for each in cuts])
    before = [
        one.prefix_tokens + np.cumsum([0, *each[:-1]])
        for one, each in zip(requests, cuts, strict=True)
    ]
    return Order(
        deployment=deployment,
        policy=policy,
        requests=requests,
        cuts=cuts,
        memories=memories,
        request=request.astype(np.int64),
        chunk=np.concatenate([np.arange(len(each)) for each in cuts]),
        tokens=np.array([size for each in cuts for size in each], np.int64),
        prefix=np.concatenate(before).astype(np.int64),
        last=np.append(request[1:] != request[:-1], True),
    )
