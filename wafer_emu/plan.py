"""The plan of a run: cuts, moves, tasks with their costs and memory, admitted or refused.

A plan is made for a deployment (tiers chosen), by the policy, and checked in slot time: what is
admitted runs, what is not says which stage, when, and how many bytes short.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

import mocap.policy
from mocap.policy import Move, Policy, Request
from wafer_emu.attention_room import beside_kv, moments_of, used
from wafer_emu.cutting import cuts_of, in_service_order, lined_up, told
from wafer_emu.deployment import Deployment
from wafer_emu.kv_pieces import Pieces, pieces_of
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.order import Order
from wafer_emu.refusal import capacity_error, refusal
from wafer_emu.routing import Routing, refuse_routing
from wafer_emu.stage_clocks import Shelf
from wafer_emu.transfers import Transfers, arrivals, handoff_latency, kv_transfers, traffic
from wafer_emu.wafer import Wafer
from wafer_emu.ways import Way, even_cycles, memory_tiers, ways_by_speed
from wafer_emu.workload import Workload
from wafer_kernels import pipeline, slots
from wafer_kernels.errors import CapacityError, UsageError
from wafer_kernels.noc import Links

__all__ = ["Plan", "make_plan", "routed"]

Int64 = npt.NDArray[np.int64]


@dataclass
class Plan(Order):
    """An order with its moves, the transfers and traffic that they make, and slots (task)."""

    moves: list[Move]
    pieces: Pieces
    transfers: Transfers
    tasks: pipeline.Tasks
    traffic: pipeline.Traffic
    links: Links
    slot: Int64


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
            ways = ways_by_speed(wafer, model, requests, policy, options, some, leanest, shelf)
            return _first_that_fits(ways, requests, policy, shelf)
        except CapacityError as error:
            failure = error
    assert failure is not None
    raise failure


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


def _first_that_fits(
    ways: Iterator[Way], waiting: list[Request], policy: Policy, shelf: Shelf
) -> Plan:
    """The plan on the first way of working that holds one; CapacityError of the last if none.

    A plan whose own chunks leave attention less than even ones waits until no way to come is
    faster than its own has become.
    """
    lowered: list[tuple[int, int, Plan]] = []
    failure: CapacityError | None = None
    for way in ways:
        if lowered and lowered[0][0] <= way.cycles:
            break
        try:
            plan, deployment = _plan_on(way, waiting, policy, shelf)
        except CapacityError as error:
            failure = error
            continue
        if way.cycles == 0 or deployment.clocks == way.deployment.clocks:
            return plan
        heapq.heappush(lowered, (even_cycles(deployment, policy, waiting), len(lowered), plan))
    if lowered:
        return lowered[0][2]
    assert failure is not None
    raise failure


def _plan_on(
    way: Way, waiting: list[Request], policy: Policy, shelf: Shelf
) -> tuple[Plan, Deployment]:
    """Cut, leave these chunks' KV its room, move and admit; the plan, and where it could work.

    In the plan attention keeps only what its tasks use of that.
    """
    requests = in_service_order(way.deployment, policy, waiting)
    cuts = cuts_of(way.deployment, policy, requests, way.usual)
    following = max(max(sizes) for sizes in cuts) if sum(map(len, cuts)) > 1 else 0
    times = moments_of(requests, cuts)
    deployment, _ = beside_kv(way.deployment, policy, times, following, shelf)
    order = lined_up(deployment, policy, requests, cuts, deployment.memories(following))
    kept = used(order, shelf)
    order = replace(order, deployment=kept, memories=kept.memories(following))
    _refuse_overfull(order)
    return _admit(order), deployment


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
    plan = replace(plan, routing=served)
    pieces, tasks, transfers = _tasks(plan, plan.moves)
    return replace(plan, pieces=pieces, tasks=tasks, transfers=transfers)


def _refuse_overfull(order: Order) -> None:
    """Refuse chunks whose working sets overfill a core."""
    largest = int(order.largest_chunks[0])
    for stage, memory in enumerate(order.memories):
        if memory.shortage(largest) > 0:
            raise capacity_error(order.deployment, memory, stage, largest)


def _admit(order: Order) -> Plan:
    """Plan the moves for the room that KV has at the end of a request, else at its fullest."""
    failure: CapacityError | None = None
    for load_tokens in sorted({int(order.tokens[-1]), int(order.largest_chunks[0])}):
        try:
            moves = _moves(order, load_tokens)
            pieces, tasks, transfers = _tasks(order, moves)
            slot, shortage = np.zeros(order.tokens.size, np.int64), np.zeros(3, np.int64)
            refused = slots.admit(tasks, slot, shortage)
            if refused == slots.ADMITTED:
                known = {each.name: getattr(order, each.name) for each in fields(Order)}
                sent, links = traffic(order, transfers)
                return Plan(
                    **known, moves=moves, pieces=pieces, transfers=transfers, tasks=tasks,
                    traffic=sent, links=links, slot=slot,
                )  # fmt: skip
            raise refusal(order, moves, tasks, refused - 1, shortage)
        except CapacityError as error:
            failure = error
    assert failure is not None
    raise failure


def _moves(order: Order, load_tokens: int) -> list[Move]:
    """Moves of every request, planned for each distinct request alone."""
    known: dict[tuple[int, ...], list[Move]] = {}
    moves = []
    for index, (request, cuts) in enumerate(zip(order.requests, order.cuts, strict=True)):
        key = (request.prefix_tokens, *cuts)
        if key not in known:
            setting = told(order.deployment, order.memories, request, load_tokens)
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


def _tasks(order: Order, moves: Sequence[Move]) -> tuple[Pieces, pipeline.Tasks, Transfers]:
    """Where KV lies, what the engine is told of tasks, and the transfers between them."""
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
    tasks = pipeline.Tasks(
        arrivals(order),
        order.last.astype(np.int64),
        order.compute,
        handoff_latency(order),
        host,
        coming * per_token[:, np.newaxis, np.newaxis],
        leaving * per_token[:, np.newaxis],
        layers if order.policy.frees_by_layer() else np.ones_like(layers),
        capacity,
    )
    return pieces, tasks, kv_transfers(order, host, coming)
