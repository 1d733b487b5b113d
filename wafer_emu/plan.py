"""The plan of a run: cuts, moves, tasks with their costs and memory, admitted or refused.

A plan is made for a deployment (tiers chosen), by the policy, and checked in slot time: what is
admitted runs, what is not says which stage, when, and how many bytes short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

import mocap.policy
from mocap.policy import Move, Policy, Request
from wafer_emu.clock import Tiers
from wafer_emu.deployment import Deployment, Shelf, capacity_error, deploy
from wafer_emu.memory import StageMemory, kv_quanta_per_token, kv_quantum_bytes
from wafer_emu.model import Model, dtype_bytes
from wafer_emu.options import Options
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels import pipeline
from wafer_kernels.errors import CapacityError

__all__ = ["LEANEST", "Plan", "make_plan", "memory_tiers", "most_tokens"]

Int64 = npt.NDArray[np.int64]
LEANEST = 2  # tiles and attention working sets are halved at most so often
TOKEN_ID_BYTES = 4
PARTIAL_BYTES = 4


@dataclass(frozen=True)
class Transfers:
    """KV that one task moves: bytes written to and read from other stages, and their cost."""

    written_bytes: int = 0
    read_bytes: int = 0
    byte_hops: int = 0
    stall_cycles: int = 0


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


@dataclass
class Plan(Order):
    """An order with its moves, transfers (stage, task) and slots (task), admitted."""

    moves: list[Move]
    transfers: list[list[Transfers]]
    tasks: pipeline.Tasks
    slot: Int64


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
    leaner and leaner tiles (``leans``). ``shelf`` keeps clocks from plan to plan of one wafer,
    model and options.

    Raises
    ------
    CapacityError
        If it fits in none; says stage, bytes and what fills them.
    """
    shelf = {} if shelf is None else shelf
    requests = _requests(wafer, workload)
    failure: CapacityError | None = None
    for lean in leans if options.kv_budget is None else (0,):
        full: set[str] = set()  # tiers that the weights alone overfill
        for tiers in memory_tiers(wafer, options):
            if tiers.weights in full:
                continue
            try:
                return _plan_in(wafer, model, requests, policy, options, tiers, lean, shelf)
            except CapacityError as error:
                failure = error
                if error.details.get("weights"):
                    full.add(tiers.weights)
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
    """Plan in given tiers and with given leanness.

    A request that streams whole takes the fastest tiles no larger than the chunk policies'.
    """
    longest = max(waiting, key=lambda one: one.new_tokens)
    finest = LEANEST if policy.streams_tokens else lean
    deployments = [
        deploy(wafer, model, options, policy, tiers, each, longest, shelf)
        for each in range(lean, finest + 1)
    ]
    deployment = min(deployments, key=lambda each: _whole_cycles(each, longest))
    requests = _in_service_order(deployment, policy, waiting)
    chunks = options.given_chunks or len(deployment.stages)
    usual = min(deployment.tile_tokens * 2**lean, longest.new_tokens)
    _refuse_too_long(deployment, policy, longest)
    told = _told(deployment, deployment.memories(usual), chunks, longest, usual)
    cuts = _cut_all(policy, requests, told)
    following = max(max(sizes) for sizes in cuts) if sum(map(len, cuts)) > 1 else 0
    memories = deployment.memories(following)
    return _admit(_order(deployment, policy, requests, cuts, memories), chunks)


def _refuse_too_long(deployment: Deployment, policy: Policy, request: Request) -> None:
    """Refuse before any cutting what no cut can hold: KV beyond the room at the least working set.

    A policy that moves nothing needs a stage's KV to fit on that stage; one that moves has all
    stages' room for any one stage's KV.
    """
    memories = deployment.memories(0)
    quantum = kv_quantum_bytes(deployment.clocks[0])
    needs = [request.tokens * each for each in _quanta_per_token(deployment, policy)]
    rooms = [memory.kv_quanta(1) for memory in memories]
    if type(policy).reallocate is not Policy.reallocate:
        needs, rooms = [max(needs)], [sum(rooms)]
    for stage, (need, room) in enumerate(zip(needs, rooms, strict=True)):
        if need > room:
            where = f"stage {stage}" if len(needs) == len(memories) else "any one stage"
            raise _no_room(
                deployment, policy, request.tokens, where, need * quantum, room * quantum,
                stage=stage,
            )  # fmt: skip


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
        needs = _quanta_per_token(deployment, policy)
        rooms = [memory.kv_quanta(1) for memory in deployment.memories(0)]
        if type(policy).reallocate is not Policy.reallocate:
            needs, rooms = [max(needs)], [sum(rooms)]
        most = max(most, min(room // need for need, room in zip(needs, rooms, strict=True)))
    if most == 0 and failure is not None:
        raise failure
    return most


def _no_room(
    deployment: Deployment,
    policy: Policy,
    tokens: int,
    where: str,
    need: int,
    room: int,
    **details: object,
) -> CapacityError:
    """The error of a prompt whose KV does not fit, with what else fills the memory."""
    budget = deployment.options.kv_budget is not None
    items: dict[str, int] = {"kv": need}
    stage = details["stage"]
    assert isinstance(stage, int)
    memory = deployment.memories(0)[stage]
    if memory.kv_among_cores:
        region = deployment.stages[stage].region
        where += f" (all {region.cores:,} cores from ({region.row}, {region.column}) on are full)"
        load = memory.load(1)
        counts = load.dealing.counts
        for name in ("code", "weights", "activations", "buffers"):
            items[name] = int(np.sum(np.broadcast_to(getattr(load, name), counts.shape) * counts))
    filled = ", ".join(f"{name} {size:,} B" for name, size in items.items())
    tier = "budget" if budget else deployment.tiers.kv
    return CapacityError(
        f"a prompt of {tokens:,} tokens does not fit under {policy.name}: {where} needs {need:,} B "
        f"of KV and has room for {room:,} B in {'its KV budget' if budget else tier}, "
        f"{need - room:,} B too many ({filled}); what would help: a shorter prompt, more stages, a "
        "policy that moves KV (mbkr, mocap), or KV in die memory where there is any",
        tier=tier,
        need_bytes=need,
        capacity_bytes=room,
        short_bytes=need - room,
        items=items,
        **details,
    )


def _quanta_per_token(deployment: Deployment, policy: Policy) -> list[int]:
    """KV quanta of one token on every stage: of all its layers, or of the one at work."""
    if policy.kv_lifetime == "layer":
        return [kv_quanta_per_token(clock) for clock in deployment.clocks]
    return list(deployment.kv_quanta_per_token())


def _whole_cycles(deployment: Deployment, request: Request) -> int:
    """Cycles of the slowest stage on a whole request."""
    return deployment.slowest_cost()(request.new_tokens, request.prefix_tokens)


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
            tasks, transfers = _tasks(order, moves)
            slot, shortage = np.zeros(order.tokens.size, np.int64), np.zeros(3, np.int64)
            refused = pipeline.admit(tasks, slot, shortage)
            if refused == pipeline.ADMITTED:
                known = {each.name: getattr(order, each.name) for each in fields(Order)}
                return Plan(**known, moves=moves, transfers=transfers, tasks=tasks, slot=slot)
            raise _refusal(order, moves, tasks, refused - 1, shortage)
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
    per_token = np.array(_quanta_per_token(deployment, order.policy), np.int64)
    capacity = np.zeros((stages, count + 1), np.int64)
    for stage, memory in enumerate(order.memories):
        for size in np.unique(order.largest_chunks):
            capacity[stage, order.largest_chunks == size] = memory.kv_quanta(int(size))
    transfers = [
        _stage_transfers(order, stage, hosts[stage], kept[stage]) for stage in range(stages)
    ]
    stall = np.array([[each.stall_cycles for each in row] for row in transfers], np.int64)
    tasks = pipeline.Tasks(
        _arrivals(order),
        order.last.astype(np.int64),
        order.compute + stall,
        _handoffs(order),
        host,
        kept * per_token[:, np.newaxis, np.newaxis],
        capacity,
    )
    return tasks, transfers


def _stage_transfers(order: Order, stage: int, hosts: list[int], kept: Int64) -> list[Transfers]:
    """KV transfers of every task of a stage, one layer ahead of the computation.

    While a layer computes, the remote KV of the next layer is read and the layer's own share of new
    KV is written. What does not fit behind a layer's computation stalls the task; so does the
    first layer's read, which nothing hides. A policy that attends remotely sends queries and gets
    partial results instead, of every layer in turn: nothing hides them.
    """
    nothing = Transfers()
    if len(hosts) == 1:
        return [nothing] * order.tokens.size
    deployment = order.deployment
    layers = deployment.stages[stage].layers
    clock = deployment.clocks[stage]
    layer_bytes = kv_quanta_per_token(clock) * kv_quantum_bytes(clock)
    hops = deployment.placement.hops()[stage]
    attends = order.policy.attends_remotely()
    query_bytes, partial_bytes = _exchange_bytes_per_token(deployment.model)
    remote = np.zeros(len(hosts), np.int64)
    result = []
    for task in range(order.tokens.size):
        if order.chunk[task] == 0:
            remote[:] = 0
        read = write = read_bytes = byte_hops = 0
        for part in range(1, len(hosts)):
            to_read = int(remote[part]) * layer_bytes
            to_write = int(kept[part, task]) * layer_bytes
            if attends and to_read:
                asked = int(order.tokens[task]) * query_bytes
                read += deployment.transfer_cycles(asked, stage, hosts[part])
                to_read = int(order.tokens[task]) * partial_bytes
                read_bytes += asked
                byte_hops += asked * layers * hops[hosts[part]]
            read += deployment.transfer_cycles(to_read, hosts[part], stage)
            read_bytes += to_read
            write += deployment.transfer_cycles(to_write, stage, hosts[part])
            byte_hops += (to_read + to_write) * layers * hops[hosts[part]]
        cycles = int(order.compute[stage, task]) // layers
        if attends:
            stall = layers * (read + max(0, write - cycles))
        else:
            stall = read + (layers - 1) * max(0, read + write - cycles) + max(0, write - cycles)
        result.append(
            Transfers(
                written_bytes=int(kept[1:, task].sum()) * layer_bytes * layers,
                read_bytes=read_bytes * layers,
                byte_hops=byte_hops,
                stall_cycles=stall,
            )
            if read or write
            else nothing
        )
        remote += kept[: len(hosts), task]
    return result


def _exchange_bytes_per_token(model: Model) -> tuple[int, int]:
    """Bytes of a token's queries, and of what comes back: weighted values, maximum and sum a head.

    Latent attention exchanges absorbed queries and latents. Partial results are float32.
    """
    query, value = model.head_dim, model.head_dim
    if model.mla is not None:
        query, value = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim, model.mla.kv_lora_rank
    return model.heads * query * dtype_bytes(model.dtype), model.heads * (value + 2) * PARTIAL_BYTES


def _handoffs(order: Order) -> Int64:
    """Cycles from the end of each task to its arrival at the next stage (stage, task).

    A request that streams by tiles hands its tiles on as the last layer ends with them, so that
    only the last one remains.
    """
    deployment = order.deployment
    width = deployment.model.hidden_size * dtype_bytes(deployment.model.dtype)
    tokens = order.tokens
    if order.policy.streams_tokens:
        tokens = np.minimum(tokens, deployment.tile_tokens)
    handoff = np.zeros(order.compute.shape, np.int64)
    for stage in range(order.compute.shape[0] - 1):
        for size in np.unique(tokens):
            cycles = deployment.transfer_cycles(int(size) * width, stage, stage + 1)
            handoff[stage, tokens == size] = cycles
    return handoff


def _arrivals(order: Order) -> Int64:
    """Cycle at which each task's embedding rows (or token ids) have come from the host."""
    deployment = order.deployment
    off_wafer, clock_hz = deployment.wafer.off_wafer, deployment.wafer.core.clock_hz
    width = deployment.model.hidden_size * dtype_bytes(deployment.model.dtype)
    if deployment.options.embedding == "first-stage":
        width = TOKEN_ID_BYTES
    latency = math.ceil(off_wafer.latency_seconds * clock_hz) + deployment.wafer.request_cycles
    ready = np.zeros(order.tokens.size, np.int64)
    free = 0
    for task in range(order.tokens.size):
        arrived = order.requests[order.request[task]].arrival_cycle + latency
        first = int(order.tokens[task])
        if order.policy.streams_tokens:
            first = min(first, deployment.tile_tokens)
        begin = max(arrived, free)
        ready[task] = begin + -(-first * width * clock_hz // off_wafer.bytes_per_second)
        free = begin + -(-int(order.tokens[task]) * width * clock_hz // off_wafer.bytes_per_second)
    return ready


def _refusal(
    order: Order,
    moves: Sequence[Move],
    tasks: pipeline.Tasks,
    task: int,
    shortage: Int64,
) -> CapacityError:
    """The error of a request that does not fit even alone."""
    stage, slot, quanta = (int(each) for each in shortage)
    deployment = order.deployment
    quantum = kv_quantum_bytes(deployment.clocks[stage])
    request = order.requests[int(order.request[task])]
    chunk = min(max(slot - stage, 0), len(order.cuts[int(order.request[task])]) - 1)
    capacity = int(tasks.capacity[stage, task + chunk]) * quantum
    hosted = sum(
        move.tokens * deployment.kv_quanta_per_token()[move.stage] * quantum
        for move in moves
        if move.request == order.request[task] and move.host == stage
    )
    where = f"stage {stage} in slot {slot} (chunk {chunk}), hosting {hosted:,} B of others,"
    return _no_room(
        deployment,
        order.policy,
        request.tokens,
        where,
        capacity + quanta * quantum,
        capacity,
        stage=stage,
        slot=slot,
        chunk=chunk,
        hosted_bytes=hosted,
    )
