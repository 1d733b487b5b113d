"""The plan of a run: cuts, moves, tasks with their costs and memory, admitted or refused.

A plan is made for a deployment (tiers chosen), by the policy, and checked in slot time: what is
admitted runs, what is not says which stage, when, and how many bytes short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

import mocap.policy
from mocap.policy import Move, Policy, Request
from mocap.uniform import Uniform
from wafer_emu.attention_room import beside_kv, moments, shrunk, used
from wafer_emu.clock import Tiers
from wafer_emu.deployment import Deployment, deploy
from wafer_emu.memory import StageMemory, kv_quantum_bytes
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.order import Order, quanta_per_token
from wafer_emu.refusal import capacity_error, refusal, refuse_too_long
from wafer_emu.stage_clocks import Shelf
from wafer_emu.transfers import Transfers, arrivals, handoffs, stage_transfers
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels import pipeline
from wafer_kernels.errors import CapacityError

__all__ = ["LEANEST", "Plan", "make_plan", "memory_tiers", "most_tokens"]

Int64 = npt.NDArray[np.int64]
LEANEST = 2  # the tiles in which chunks pass a layer are halved at most so often
SHRINKINGS = (0, 1, 2, 64)  # of attention, tried until a plan fits; the last leaves least
JUDGED_REQUESTS = 16  # by which candidates are compared: the first of a workload


@dataclass
class Plan(Order):
    """An order with its moves, transfers (stage, task) and slots (task), admitted."""

    moves: list[Move]
    transfers: list[list[Transfers]]
    tasks: pipeline.Tasks
    slot: Int64

    @cached_property
    def transfer_stall(self) -> Int64:
        """Cycles of every task (stage, task) in which it only waits for KV."""
        return np.array([[each.stall_cycles for each in row] for row in self.transfers], np.int64)


def make_plan(
    wafer: Wafer,
    model: Model,
    workload: Workload,
    policy: Policy,
    options: Options,
    shelf: Shelf | None = None,
    leanest: bool = False,
) -> Plan:
    """Make and admit the plan of a run: the fastest that fits in the first tiers that hold one.

    Chunks pass a layer whole, in halves or in quarters, and attention uses what is left beside the
    KV of a request. Which of these is the fastest is told by even chunks; in that order they are
    planned and admitted. If none is, attention gets less and less. No candidate depends on
    how much memory there is, which only decides what fits: more of it is never slower.

    Parameters
    ----------
    shelf
        Keeps clocks from plan to plan of one wafer, model and options.
    leanest
        Only the way of working that takes the least memory.

    Raises
    ------
    CapacityError
        If it fits in none; says stage, bytes and what fills them.
    """
    shelf = {} if shelf is None else shelf
    requests = _requests(wafer, workload)
    failure: CapacityError | None = None
    for tiers in memory_tiers(wafer, options):
        try:
            return _fastest(wafer, model, requests, policy, options, tiers, leanest, shelf)
        except CapacityError as error:
            failure = error
    assert failure is not None
    raise failure


def memory_tiers(wafer: Wafer, options: Options) -> list[Tiers]:
    """Memory tiers to try in order."""
    if options.kv_budget is not None:
        return [Tiers()]
    memories = ("sram", "dram") if wafer.dram is not None else ("sram",)
    return [
        Tiers(weights, kv)
        for weights in (memories if options.weights_tier == "auto" else (options.weights_tier,))
        for kv in (memories if options.kv_tier == "auto" else (options.kv_tier,))
    ]


def _requests(wafer: Wafer, workload: Workload) -> list[Request]:
    clock_hz = wafer.core.clock_hz
    return [
        Request(
            one.index,
            one.tokens,
            one.prefix_tokens,
            math.ceil(one.arrival_seconds * clock_hz),
        )
        for one in workload.requests
    ]


def _fastest(
    wafer: Wafer,
    model: Model,
    waiting: list[Request],
    policy: Policy,
    options: Options,
    tiers: Tiers,
    leanest: bool,
    shelf: Shelf,
) -> Plan:
    """The fastest plan in given tiers.

    Raises
    ------
    CapacityError
        If it fits in none of the ways of working; that of the leanest.
    """
    longest = max(waiting, key=lambda one: one.new_tokens)
    resident = max(one.tokens for one in waiting) - longest.new_tokens
    roomy, own_times = [], None
    for lean in range(LEANEST if leanest else 0, LEANEST + 1):
        deployment = deploy(wafer, model, options, policy, tiers, lean, longest, shelf)
        usual = longest.new_tokens
        if not policy.streams_tokens:
            usual = min(usual, deployment.tile_tokens * 2**lean)
        refuse_too_long(shrunk(deployment, SHRINKINGS[-1], shelf), policy, longest)
        even, several = _even_cuts(deployment, policy, [longest])[0], len(waiting) > 1
        follows = max(even) if several or len(even) > 1 else 0
        times = moments(even, resident, several)
        placed, alone = beside_kv(deployment, policy, times, follows, shelf)
        if not alone and policy.uses and not leanest:  # its own cuts may leave room: of small ends
            if own_times is None:
                own_times = moments(
                    _cuts(deployment, policy, [longest], usual)[0], resident, several
                )
            placed, _ = beside_kv(deployment, policy, own_times, follows, shelf)
        roomy.append((placed, usual))
    failure: CapacityError | None = None
    tried: set[tuple[int, ...]] = set()
    for halvings in SHRINKINGS[-1:] if leanest else SHRINKINGS:
        candidates = [(shrunk(one, halvings, shelf), usual) for one, usual in roomy]
        if len(candidates) > 1:
            candidates.sort(key=lambda one: _even_cycles(one[0], policy, waiting))
        for deployment, usual in candidates:
            key = (deployment.tile_tokens, *(each.attention_bytes for each in deployment.clocks))
            if key not in tried:
                tried.add(key)
                try:
                    return _plan_on(deployment, waiting, policy, usual, shelf)
                except CapacityError as error:
                    failure = error
    assert failure is not None
    raise failure


def _even_cycles(deployment: Deployment, policy: Policy, waiting: Sequence[Request]) -> int:
    """Makespan of the first requests in even chunks, or whole if the policy does not cut them.

    As if KV needed no memory. It is that of ``uniform`` itself.
    """
    requests = Policy().order(waiting)[:JUDGED_REQUESTS]
    cuts = _even_cuts(deployment, policy, requests)
    order = _order(deployment, policy, requests, cuts, deployment.memories(0))
    stages, count = order.compute.shape
    nothing = np.zeros((stages, 1, count), np.int64)
    tasks = pipeline.Tasks(
        arrivals(order),
        order.last.astype(np.int64),
        order.compute,
        handoffs(order),
        np.arange(stages, dtype=np.int64)[:, np.newaxis],
        nothing,
        np.zeros((stages, count + 1), np.int64),
    )
    schedule = pipeline.schedule(stages, count)
    pipeline.run(tasks, np.arange(count, dtype=np.int64), schedule)
    return int(schedule.end.max())


def _even_cuts(
    deployment: Deployment, policy: Policy, requests: Sequence[Request]
) -> list[list[int]]:
    """Even chunks, as ``uniform`` cuts them, or whole requests if the policy does not cut them."""
    chunks = deployment.options.given_chunks or len(deployment.stages)
    nothing = [0] * len(deployment.stages)
    setting = deployment.setting(chunks, nothing, nothing)
    return _cut_all(Uniform() if policy.uses else Policy(), requests, setting)


def _cuts(
    deployment: Deployment, policy: Policy, requests: Sequence[Request], usual: int
) -> list[list[int]]:
    """A policy's own chunks; it is told the room beside the working set of a usual one."""
    longest = max(requests, key=lambda one: one.new_tokens)
    chunks = deployment.options.given_chunks or len(deployment.stages)
    told = _told(deployment, deployment.memories(usual), chunks, longest, usual)
    return _cut_all(policy, requests, told)


def _plan_on(
    deployment: Deployment,
    waiting: list[Request],
    policy: Policy,
    usual: int,
    shelf: Shelf,
) -> Plan:
    """Cut, move and admit; then attention keeps only what its tasks use."""
    requests = _in_service_order(deployment, policy, waiting)
    chunks = deployment.options.given_chunks or len(deployment.stages)
    cuts = _cuts(deployment, policy, requests, usual)
    following = max(max(sizes) for sizes in cuts) if sum(map(len, cuts)) > 1 else 0
    order = _order(deployment, policy, requests, cuts, deployment.memories(following))
    kept = used(order, shelf)
    order = replace(order, deployment=kept, memories=kept.memories(following))
    _refuse_overfull(order)
    return _admit(order, chunks)


def most_tokens(wafer: Wafer, model: Model, policy: Policy, options: Options, shelf: Shelf) -> int:
    """Tokens that no plan of a policy can exceed: its KV alone would not fit.

    Raises
    ------
    CapacityError
        If the weights fit under no split.
    """
    most = 0
    request = Request(0, 1)
    failure: CapacityError | None = None
    for tiers in memory_tiers(wafer, options):
        try:
            deployment = deploy(wafer, model, options, policy, tiers, LEANEST, request, shelf)
        except CapacityError as error:
            failure = error
            continue
        deployment = shrunk(deployment, SHRINKINGS[-1], shelf)
        needs = quanta_per_token(deployment, policy)
        rooms = [memory.kv_quanta(1) for memory in deployment.memories(0)]
        if type(policy).reallocate is not Policy.reallocate:
            needs, rooms = [max(needs)], [sum(rooms)]
        most = max(most, min(room // need for need, room in zip(needs, rooms, strict=True)))
    if most == 0 and failure is not None:
        raise failure
    return most


def _told(
    deployment: Deployment,
    memories: Sequence[StageMemory],
    chunks: int,
    request: Request,
    load_tokens: int,
) -> mocap.policy.Setting:
    """The setting with the KV capacity that the stages have at a working set."""
    resident = [
        request.prefix_tokens * per_token * kv_quantum_bytes(deployment.clocks[0])
        for per_token in deployment.kv_quanta_per_token()
    ]
    return deployment.setting(
        chunks, [memory.kv_quanta(load_tokens) for memory in memories], resident
    )


def _in_service_order(
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


def _cut_all(
    policy: Policy, requests: Sequence[Request], setting: mocap.policy.Setting
) -> list[list[int]]:
    known: dict[tuple[int, int], list[int]] = {}
    cuts = []
    for request in requests:
        key = (request.new_tokens, request.prefix_tokens)
        if key not in known:
            known[key] = mocap.policy.cut(policy, request, setting)
        cuts.append(known[key])
    return cuts


def _order(
    deployment: Deployment,
    policy: Policy,
    requests: list[Request],
    cuts: list[list[int]],
    memories: tuple[StageMemory, ...],
) -> Order:
    """Line the chunks up."""
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


def _refuse_overfull(order: Order) -> None:
    """Refuse chunks whose working sets overfill a core, weights counted."""
    largest = int(order.largest_chunks[0])
    for stage, memory in enumerate(order.memories):
        if memory.shortage(largest) > 0:
            error = capacity_error(order.deployment, memory, stage, largest)
            error.details["weights"] = True
            raise error


def _admit(order: Order, chunks: int) -> Plan:
    """Plan the moves for the room that KV has at the end of a request, else at its fullest."""
    failure: CapacityError | None = None
    for load_tokens in sorted({int(order.tokens[-1]), int(order.largest_chunks[0])}):
        try:
            moves = _moves(order, load_tokens, chunks)
            tasks, transfers = _tasks(order, moves)
            slot, shortage = np.zeros(order.tokens.size, np.int64), np.zeros(3, np.int64)
            refused = pipeline.admit(tasks, slot, shortage)
            if refused == pipeline.ADMITTED:
                known = {each.name: getattr(order, each.name) for each in fields(Order)}
                return Plan(**known, moves=moves, transfers=transfers, tasks=tasks, slot=slot)
            raise refusal(order, moves, tasks, refused - 1, shortage)
        except CapacityError as error:
            failure = error
    assert failure is not None
    raise failure


def _moves(order: Order, load_tokens: int, chunks: int) -> list[Move]:
    """Moves of every request, planned for each distinct request alone."""
    known: dict[tuple[int, ...], list[Move]] = {}
    moves = []
    for index, (request, cuts) in enumerate(zip(order.requests, order.cuts, strict=True)):
        key = (request.prefix_tokens, *cuts)
        if key not in known:
            setting = _told(order.deployment, order.memories, chunks, request, load_tokens)
            known[key] = mocap.policy.move(order.policy, [cuts], setting)
        moves += [
            Move(index, move.stage, move.chunk, move.tokens, move.host) for move in known[key]
        ]
    return moves


def _hosts(stages: int, moves: Sequence[Move]) -> list[list[int]]:
    """Stages that host each stage's KV: itself first."""
    hosts: list[list[int]] = [[stage] for stage in range(stages)]
    for move in moves:
        if move.host not in hosts[move.stage]:
            hosts[move.stage].append(move.host)
    return hosts


def _tasks(order: Order, moves: Sequence[Move]) -> tuple[pipeline.Tasks, list[list[Transfers]]]:
    """What the engine is told, and what the transfers in it are."""
    deployment = order.deployment
    stages, count = order.compute.shape
    hosts = _hosts(order.compute.shape[0], moves)
    most = max(len(each) for each in hosts)
    host = np.array([each + [each[0]] * (most - len(each)) for each in hosts], np.int64)
    first_task = np.searchsorted(order.request, np.arange(len(order.requests)))
    # Tokens that live with each host (stage, host, task); resident prefixes come with chunk 0.
    kept = np.zeros((stages, most, count), np.int64)
    kept[:, 0, :] = order.tokens
    for index, request in enumerate(order.requests):
        kept[:, 0, first_task[index]] += request.prefix_tokens
    for move in moves:
        task = first_task[move.request] + move.chunk
        kept[move.stage, 0, task] -= move.tokens
        kept[move.stage, hosts[move.stage].index(move.host), task] += move.tokens
    per_token = np.array(quanta_per_token(deployment, order.policy), np.int64)
    capacity = np.zeros((stages, count + 1), np.int64)
    for stage, memory in enumerate(order.memories):
        for size in np.unique(order.largest_chunks):
            capacity[stage, order.largest_chunks == size] = memory.kv_quanta(int(size))
    transfers = [
        stage_transfers(order, stage, hosts[stage], kept[stage]) for stage in range(stages)
    ]
    stall = np.array([[each.stall_cycles for each in row] for row in transfers], np.int64)
    tasks = pipeline.Tasks(
        arrivals(order),
        order.last.astype(np.int64),
        order.compute + stall,
        handoffs(order),
        host,
        kept * per_token[:, np.newaxis, np.newaxis],
        capacity,
    )
    return tasks, transfers
