"""The plan of a run: cuts, moves, tasks with their costs and memory, admitted or refused.

A plan is made for a deployment (tiers chosen), by the policy, and checked in slot time: what is
admitted runs, what is not says which stage, when, and how many bytes short.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

import mocap.policy
from mocap.policy import Move, Policy, Request
from mocap.uniform import Uniform
from wafer_emu.attention_room import Moment, beside_kv, moments, shrunk, used
from wafer_emu.clock import Tiers
from wafer_emu.deployment import PAGE_TOKENS, Deployment, deploy
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
LEANEST = 2  # the tiles in which chunks pass a layer are halved at most so often
SHRINKINGS = (0, 1, 2, 64)  # of attention, tried until a plan fits; the last leaves least
JUDGED_REQUESTS = 16  # by which candidates are compared: the first of a workload


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
    leanest: bool = False,
) -> Plan:
    """Make and admit the plan of a run: the fastest that fits.

    Chunks pass a layer whole, in halves or in quarters, and attention uses what is left beside the
    KV of a request; KV and waiting activations live in SRAM or die memory. Which of these is the
    fastest is told by even chunks (where equal, the one with more in SRAM); in that order they are
    planned and admitted. If none is, attention gets less and less. Weights leave SRAM only if
    nothing fits. No candidate depends on how much memory there is, which only decides what fits:
    more of it is never slower.

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
    tiers = memory_tiers(wafer, options)
    for weights in dict.fromkeys(each.weights for each in tiers):
        some = [each for each in tiers if each.weights == weights]
        try:
            return _fastest(wafer, model, requests, policy, options, some, leanest, shelf)
        except CapacityError as error:
            failure = error
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


def _fastest(
    wafer: Wafer,
    model: Model,
    waiting: list[Request],
    policy: Policy,
    options: Options,
    tiers: Sequence[Tiers],
    leanest: bool,
    shelf: Shelf,
) -> Plan:
    """The fastest plan in some tiers.

    Raises
    ------
    CapacityError
        If it fits in none of the ways of working; that of the leanest.
    """
    longest = max(waiting, key=lambda one: one.new_tokens)
    ways: list[tuple[Deployment, int]] = []
    failure: CapacityError | None = None
    for deployment in _ways(wafer, model, policy, options, tiers, leanest, longest, shelf):
        usual = longest.new_tokens
        if not policy.streams_tokens:
            even = options.usual_chunk(usual, len(deployment.stages), policy.uses)
            usual = min(usual, -(-even // PAGE_TOKENS) * PAGE_TOKENS)
        try:
            refuse_too_long(shrunk(deployment, SHRINKINGS[-1], shelf), policy, longest)
            ways.append((deployment, usual))
        except CapacityError as error:
            failure = error
    roomy = ways if leanest else _beside_kv(ways, policy, waiting, longest, shelf)
    tried: set[tuple[object, ...]] = set()
    for halvings in SHRINKINGS[-1:] if leanest else SHRINKINGS:
        candidates = [(shrunk(one, halvings, shelf), usual) for one, usual in roomy]
        if len(candidates) > 1:
            candidates.sort(key=lambda one: _even_cycles(one[0], policy, waiting))
        for deployment, usual in candidates:
            budgets = (each.attention_bytes for each in deployment.clocks)
            key = (deployment.tiers, deployment.tile_tokens, deployment.in_rounds, *budgets)
            if key not in tried:
                tried.add(key)
                try:
                    return _plan_on(deployment, waiting, policy, usual, shelf)
                except CapacityError as error:
                    failure = error
    assert failure is not None
    raise failure


def _ways(
    wafer: Wafer,
    model: Model,
    policy: Policy,
    options: Options,
    tiers: Sequence[Tiers],
    leanest: bool,
    longest: Request,
    shelf: Shelf,
) -> Iterator[Deployment]:
    """Ways of working, tiers in their order: tiles halved, dealt in rounds of the rows or evenly.

    Halves are taken up to whole rounds too where a request passes whole; it takes no larger tile
    than an even chunk, so that its working set is none either.
    """
    for memories in tiers:
        sizes: set[int] = set()
        for lean in range(LEANEST if leanest else 0, LEANEST + 1):
            way = deploy(wafer, model, options, policy, memories, lean, longest, shelf)
            tile, full = way.tile_tokens, way.round_tokens
            even = options.usual_chunk(longest.new_tokens, len(way.stages), policy.uses)
            found = {tile}
            if policy.streams_tokens:
                found.add(min(even, -(-tile // full) * full))
            if asked := policy.asked_tile():
                found = {min(asked, longest.new_tokens)}
            usual = longest.new_tokens if policy.streams_tokens else even
            for size in sorted(found - sizes, reverse=True):
                rounds, evenly = (way.with_tile(size, in_rounds) for in_rounds in (True, False))
                yield rounds
                if list(rounds.tiles(usual)) != list(evenly.tiles(usual)):
                    yield evenly
            sizes |= found


def _beside_kv(
    ways: Sequence[tuple[Deployment, int]],
    policy: Policy,
    waiting: Sequence[Request],
    longest: Request,
    shelf: Shelf,
) -> list[tuple[Deployment, int]]:
    """Ways of working, each with a usual chunk, whose attention uses what KV leaves.

    The KV of even chunks; where these have room nowhere, of the policy's own: their ends are small.
    """

    def beside(deployment: Deployment, cuts: Sequence[int] | None) -> tuple[Deployment, bool]:
        even = _even_cuts(deployment, policy, [longest])[0]
        follows = max(even) if len(waiting) > 1 or len(even) > 1 else 0
        return beside_kv(deployment, policy, _moments(waiting, cuts or even), follows, shelf)

    placed = [beside(deployment, None) for deployment, _ in ways]
    if ways and policy.uses and not any(alone for _, alone in placed):
        own = _cuts(ways[0][0], policy, [longest], ways[0][1])[0]
        placed = [beside(deployment, own) for deployment, _ in ways]
    return [(one, usual) for (one, _), (_, usual) in zip(placed, ways, strict=True)]


def _moments(waiting: Sequence[Request], cuts: Sequence[int]) -> list[Moment]:
    """When the KV of the longest request must have room, given its chunks."""
    resident = max(one.tokens for one in waiting) - sum(cuts)
    return moments(cuts, resident, len(waiting) > 1)


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
        np.zeros((stages, count), np.int64),
        np.ones(stages, np.int64),
        np.zeros((stages, count + 1), np.int64),
    )
    schedule = pipeline.schedule(tasks)
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
