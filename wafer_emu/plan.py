"""The plan of a run: cuts, moves, tasks with their costs and memory, admitted or refused.

A plan is made for a deployment (tiers chosen), by the policy, and checked in slot time: what is
admitted runs, what is not says which stage, when, and how many bytes short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

import mocap.policy
from mocap.policy import Move, Policy, Request
from wafer_emu.clock import Tiers
from wafer_emu.deployment import LADDER, LEANEST, MOST_HALVINGS, Deployment, deploy
from wafer_emu.kv_pieces import Pieces, pieces_of
from wafer_emu.memory import StageMemory, kv_quantum_bytes
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.order import Order, quanta_per_token
from wafer_emu.refusal import capacity_error, refusal, refuse_too_long
from wafer_emu.routing import Routing, refuse_routing
from wafer_emu.stage_clocks import Shelf
from wafer_emu.transfers import Transfers, arrivals, handoffs, stage_transfers
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels import pipeline
from wafer_kernels.errors import CapacityError, UsageError

__all__ = ["Plan", "make_plan", "memory_tiers", "most_tokens", "routed"]

Int64 = npt.NDArray[np.int64]


@dataclass
class Plan(Order):
    """An order with its moves, transfers (stage, task) and slots (task), admitted."""

    moves: list[Move]
    pieces: Pieces
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
    leans: Sequence[int] = range(LEANEST + 1),
) -> Plan:
    """Make and admit the plan of a run: the roomiest way of working that fits.

    Memory tiers are tried in order (SRAM before die memory), at full working sets first, then with
    leaner and leaner ones (``leans``, rungs of the ladder). A request that streams whole takes, of
    the tiers that hold it, those that let it work fastest. ``shelf`` keeps clocks from plan to plan
    of one wafer, model and options.

    Raises
    ------
    CapacityError
        If it fits in none; says stage, bytes and what fills them.
    """
    shelf = {} if shelf is None else shelf
    requests = _requests(wafer, workload)
    failure: CapacityError | None = None
    for lean in leans if options.kv_budget is None else (0,):
        full: set[tuple[str, str]] = set()  # tiers that are overfilled before any KV is stored
        plans: list[Plan] = []
        for tiers in memory_tiers(wafer, options):
            if (tiers.weights, tiers.activations) in full:
                continue
            try:
                plans.append(_plan_in(wafer, model, requests, policy, options, tiers, lean, shelf))
            except CapacityError as error:
                failure = error
                if error.details.get("weights"):
                    full.add((tiers.weights, tiers.activations))
            if plans and not policy.streams_tokens:
                break
        if plans:
            return min(plans, key=lambda each: int(each.compute.sum(axis=1).max()))
    assert failure is not None
    raise failure


def routed(plan: Plan, routing: Sequence[Routing]) -> Plan:
    """Time a plan with the experts that tokens choose; ``routing`` by request as they were given.

    Cuts, moves and slots stay: they were chosen before any router had spoken.

    Raises
    ------
    UsageError
        If the routing does not go with the requests or the model.
    """
    if len(routing) != len(plan.requests):
        raise UsageError(f"routing of {len(routing)} requests, there are {len(plan.requests)}")
    served = [routing[request.index] for request in plan.requests]
    for request, one in zip(plan.requests, served, strict=True):
        refuse_routing(plan.deployment.model, request, one)
    known = {each.name: getattr(plan, each.name) for each in fields(Order)}
    order = Order(**known | {"routing": served})
    pieces, tasks, transfers = _tasks(order, plan.moves)
    return replace(plan, routing=served, pieces=pieces, tasks=tasks, transfers=transfers)


def memory_tiers(wafer: Wafer, options: Options) -> list[Tiers]:
    """Memory tiers to try in order.

    What die memory has to bring most often leaves SRAM last: weights come for every tile, KV for
    every query block, waiting activations once a layer.
    """
    if options.kv_budget is not None:
        return [Tiers()]
    memories = ("sram", "dram") if wafer.dram is not None else ("sram",)
    asked = (options.weights_tier, options.kv_tier, options.activations_tier)
    return [
        Tiers(*chosen)
        for chosen in product(*(memories if each == "auto" else (each,) for each in asked))
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


def _plan_in(
    wafer: Wafer,
    model: Model,
    waiting: list[Request],
    policy: Policy,
    options: Options,
    tiers: Tiers,
    lean: int,
    shelf: Shelf,
) -> Plan:
    """Plan in given tiers and with given leanness."""
    longest = max(waiting, key=lambda one: one.new_tokens)
    deployment = deploy(wafer, model, options, policy, tiers, lean, longest, shelf)
    usual = min(deployment.tile_tokens * 2 ** LADDER[lean][0], longest.new_tokens)
    if policy.streams_tokens:
        deployment = _fastest_tile(deployment, policy, longest, len(waiting), lean)
    requests = _in_service_order(deployment, policy, waiting)
    chunks = options.given_chunks or len(deployment.stages)
    refuse_too_long(deployment, policy, longest)
    told = _told(deployment, deployment.memories(usual), chunks, longest, usual)
    cuts = _cut_all(policy, requests, told)
    following = max(max(sizes) for sizes in cuts) if sum(map(len, cuts)) > 1 else 0
    memories = deployment.memories(following)
    return _admit(_order(deployment, policy, requests, cuts, memories), chunks)


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
        needs = quanta_per_token(deployment, policy)
        rooms = [memory.kv_quanta(1) for memory in deployment.memories(0)]
        if type(policy).reallocate is not Policy.reallocate:
            needs, rooms = [max(needs)], [sum(rooms)]
        most = max(most, min(room // need for need, room in zip(needs, rooms, strict=True)))
    if most == 0 and failure is not None:
        raise failure
    return most


def _fastest_tile(
    deployment: Deployment, policy: Policy, request: Request, requests: int, lean: int
) -> Deployment:
    """The deployment with the fastest tile that fits; the smallest if none does.

    Tiles reach from the chunk policies' on this rung, so that a whole request never has a larger
    working set, down to their leanest; beside halves those that fill the rows of cores.
    """
    tokens = request.new_tokens
    needs = [request.tokens * each for each in quanta_per_token(deployment, policy)]

    def fits(each: Deployment) -> bool:
        memories = each.memories(tokens if requests > 1 else 0)
        return all(
            memory.shortage(tokens) <= 0 and memory.kv_quanta(tokens) >= need
            for memory, need in zip(memories, needs, strict=True)
        )

    longest, full = deployment.tile_tokens, deployment.round_tokens
    halves = {-(-longest // 2**each) for each in range(MOST_HALVINGS - LADDER[lean][0] + 1)}
    sizes = halves | {half // full * full for half in halves}
    sizes |= {min(longest, -(-half // full) * full) for half in halves}
    if asked := policy.asked_tile():
        sizes = {min(asked, tokens)}
    tiles = [deployment.with_tile(size) for size in sorted(sizes - {0}, reverse=True)]
    fitting = [each for each in tiles if fits(each)] or tiles[-1:]
    return min(fitting, key=lambda each: each.slowest_cost()(tokens, request.prefix_tokens))


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
    """Line the chunks up; refuse them if working sets and weights alone overfill a core."""
    request = np.repeat(np.arange(len(cuts)), [len(each) for each in cuts])
    before = [
        one.prefix_tokens + np.cumsum([0, *each[:-1]])
        for one, each in zip(requests, cuts, strict=True)
    ]
    order = Order(
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
    largest = int(order.largest_chunks[0])
    for stage, memory in enumerate(memories):
        if memory.shortage(largest) > 0:
            error = capacity_error(deployment, memory, stage, largest)
            error.details["weights"] = True
            raise error
    return order


def _admit(order: Order, chunks: int) -> Plan:
    """Plan the moves for the room that KV has at the end of a request, else at its fullest."""
    failure: CapacityError | None = None
    for load_tokens in sorted({int(order.tokens[-1]), int(order.largest_chunks[0])}):
        try:
            moves = _moves(order, load_tokens, chunks)
            pieces, tasks, transfers = _tasks(order, moves)
            slot, shortage = np.zeros(order.tokens.size, np.int64), np.zeros(3, np.int64)
            refused = pipeline.admit(tasks, slot, shortage)
            if refused == pipeline.ADMITTED:
                known = {each.name: getattr(order, each.name) for each in fields(Order)}
                return Plan(
                    **known, moves=moves, pieces=pieces, transfers=transfers, tasks=tasks, slot=slot
                )
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
        moves += [replace(move, request=index) for move in known[key]]
    return moves


def _hosts(stages: int, moves: Sequence[Move]) -> list[list[int]]:
    """Stages that host each stage's KV: itself first."""
    hosts: list[list[int]] = [[stage] for stage in range(stages)]
    for move in moves:
        if move.host not in hosts[move.stage]:
            hosts[move.stage].append(move.host)
    return hosts


def _tasks(
    order: Order, moves: Sequence[Move]
) -> tuple[Pieces, pipeline.Tasks, list[list[Transfers]]]:
    """Where KV lies, what the engine is told, and what the transfers in it are."""
    deployment = order.deployment
    stages, count = order.compute.shape
    hosts = _hosts(order.compute.shape[0], moves)
    most = max(len(each) for each in hosts)
    host = np.array([each + [each[0]] * (most - len(each)) for each in hosts], np.int64)
    pieces = pieces_of(order, moves, hosts)
    # Tokens that come to each host (stage, host, task), and that leave their home (stage, task).
    coming = np.zeros((stages, most, count), np.int64)
    leaving = np.zeros((stages, count), np.int64)
    for stage in range(stages):
        for task in range(count):
            for piece, part in pieces.arriving[stage][task]:
                coming[stage, part, task] += piece.tokens
            for piece in pieces.leaving[stage][task]:
                leaving[stage, task] += piece.tokens
    per_token = np.array(deployment.kv_quanta_per_token(), np.int64)
    layers = np.array([stage.layers for stage in deployment.stages], np.int64)
    capacity = np.zeros((stages, count + 1), np.int64)
    for stage, memory in enumerate(order.memories):
        for size in np.unique(order.largest_chunks):
            capacity[stage, order.largest_chunks == size] = memory.kv_quanta(int(size))
    transfers = [
        stage_transfers(order, stage, hosts[stage], coming[stage]) for stage in range(stages)
    ]
    stall = np.array([[each.stall_cycles for each in row] for row in transfers], np.int64)
    tasks = pipeline.Tasks(
        arrivals(order),
        order.last.astype(np.int64),
        order.compute + stall,
        handoffs(order),
        host,
        coming * per_token[:, np.newaxis, np.newaxis],
        leaving * per_token[:, np.newaxis],
        layers if order.policy.frees_by_layer() else np.ones_like(layers),
        capacity,
    )
    return pieces, tasks, transfers
