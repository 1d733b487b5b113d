"""The event loop over (task, stage): who runs when, and what each stage waits for.

Tasks are chunks in service order; every stage runs them in that order. A task starts when its input
has arrived, its stage is free and its memory is there. Memory is granted in quanta on the stages
that host the task's KV and freed when the request's last task on the home stage ends; both at once
or, where a stage counts its layers, layer by layer as they begin and end.

Grants are ordered by slots (:mod:`wafer_kernels.slots`). A plan that fits in slot time is admitted.
In real time a layer may take memory only if every grant that comes earlier in slot order still fits
beside it: so an admitted plan never deadlocks (the earliest outstanding grant can always be served
once the layers before it end).

Hand-offs, and the KV that a task reads from and writes to other stages, are flows that share links
(:mod:`wafer_kernels.noc`). A stage's KV goes one flow at a time: what the first layer reads comes
before it; beside each layer go what the next one reads, then what it writes itself. Queries and
partial results of remote attention go before a layer. Hand-offs leave a stage one by one.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_kernels._jit import kernel
from wafer_kernels.grants import begun_before, contributors, granted
from wafer_kernels.noc import NEVER, Links, Under, advance, fair_rates, next_end, under_way

__all__ = ["DEADLOCK", "DONE", "Schedule", "Tasks", "Traffic", "no_traffic", "run", "schedule"]

Int64 = npt.NDArray[np.int64]
Event = tuple[int, int, int, int, int]  # cycle, priority, serial, stage, task

DONE, DEADLOCK = 0, 1
# What happens, by priority at equal cycles: frees precede grants.
END, ARRIVAL, COMPUTED, MOVED, SENT, BEGUN = 0, 1, 2, 3, 4, 5
NOT_YET, NOW, YES = 0, 1, 2  # whether a layer has computed
NO_PAIR = -1  # of a hand-off that is not under way


class Tasks(NamedTuple):
    """What the loop is told, all int64: N stages, T tasks, G hosts a stage.

    ``arrival`` (T,) cycle at which a task may enter stage 0; ``last`` (T,) 1 where the task is its
    request's last; ``duration`` (N, T) cycles of computation; ``handoff`` (N, T) cycles from the
    end on a stage, or from its traffic's last grain, to the arrival at the next; ``host`` (N, G)
    stage that hosts part g of the stage's KV (part 0: itself, the others distinct; an unused part
    repeats the stage and needs nothing); ``need`` (N, G, T) quanta granted to a task; ``leave`` (N,
    T) quanta of part 0 that are freed as a task ends, since it pushed them to a host; ``layers``
    (N,) equal shares of a task by which its quanta are granted and freed, all divisible by it (1:
    the whole task at once); ``capacity`` (N, T + 1) quanta that a stage can hold from task i on,
    never less for a later task.
    """

    arrival: Int64
    last: Int64
    duration: Int64
    handoff: Int64
    host: Int64
    need: Int64
    leave: Int64
    layers: Int64
    capacity: Int64


class Traffic(NamedTuple):
    """What moves between stages, all int64 [grains].

    ``handoff`` (N, T) after a task; of every one of a stage's ``layers`` (N,) of the model, in
    task i: ``read`` (N, G, T) from its hosts, ``write`` (N, G, T) to them, and ``ask`` (N, G, T) to
    them before they answer with what is read. Where something is asked nothing is read ahead.
    """

    handoff: Int64
    layers: Int64
    read: Int64
    write: Int64
    ask: Int64


def no_traffic(tasks: Tasks) -> tuple[Traffic, Links]:
    """Nothing but the ``handoff`` cycles of tasks."""
    stages, hosts, count = tasks.need.shape
    none = np.zeros((stages, hosts, count), np.int64)
    links = Links(
        np.zeros(0, np.int64),
        np.zeros(stages * stages + 1, np.int64),
        np.zeros(0, np.int64),
        np.zeros((stages, stages), np.int64),
        np.ones(1, np.int64),
    )
    return Traffic(none[:, 0], tasks.layers, none, none, none), links


class Schedule(NamedTuple):
    """What the loop answers, all int64 of shape (N, T) but ``peak`` (N,) [quanta].

    ``memory_wait`` comes before the start of a task, ``layer_wait`` between its layers;
    ``layer_start`` and ``layer_end`` are (N, T, most layers); ``link_busy`` (E,) cycles in which a
    flow crosses each link.
    """

    input_ready: Int64
    start: Int64
    end: Int64
    memory_wait: Int64
    layer_wait: Int64
    layer_start: Int64
    layer_end: Int64
    peak: Int64
    link_busy: Int64


def schedule(tasks: Tasks, links: int = 0) -> Schedule:
    """Return an empty schedule; an input that is not on its way is ready at cycle -1."""
    shape = tasks.duration.shape
    by_layer = (*shape, int(tasks.layers.max()))
    return Schedule(
        input_ready=np.full(shape, -1, np.int64),
        start=np.zeros(shape, np.int64),
        end=np.zeros(shape, np.int64),
        memory_wait=np.zeros(shape, np.int64),
        layer_wait=np.zeros(shape, np.int64),
        layer_start=np.zeros(by_layer, np.int64),
        layer_end=np.zeros(by_layer, np.int64),
        peak=np.zeros(shape[0], np.int64),
        link_busy=np.zeros(links, np.int64),
    )


class _At(NamedTuple):
    """Where every stage is (N,).

    ``task`` it runs or will run next, ``shares`` of it that have begun, ``running`` 1 while one is
    under way; in a task that moves KV the ``layer`` of the model, the ``place`` of its transfer at
    work or next, and whether it has ``computed``; the task to ``hand`` off next.
    """

    task: Int64
    shares: Int64
    running: Int64
    layer: Int64
    place: Int64
    computed: Int64
    hand: Int64


@kernel()
def _moves(traffic: Traffic, stage: int, task: int) -> bool:
    """Whether a task reads KV from other stages or writes it to them."""
    for part in range(1, traffic.read.shape[1]):
        if traffic.read[stage, part, task] > 0 or traffic.write[stage, part, task] > 0:
            return True
    return False


@kernel()
def _next_transfer(
    traffic: Traffic, stage: int, task: int, layer: int, after: int
) -> tuple[int, int, int, bool]:
    """First transfer of a layer from place ``after`` on: (place, part, grains, to the host).

    Places are those of questions and answers, part by part, then of what the next layer reads, then
    of what is written: 4 G in all, which also says that nothing is left. Layer -1 reads for the
    first.
    """
    hosts = traffic.read.shape[1]
    asks = False
    for part in range(hosts):
        asks = asks or traffic.ask[stage, part, task] > 0
    for place in range(after, 4 * hosts):
        part, to_host, grains = place % hosts, False, 0
        if place < 2 * hosts:
            part, to_host = place // 2, place % 2 == 0
            if asks and layer >= 0:
                asked = traffic.ask[stage, part, task]
                grains = asked if to_host else traffic.read[stage, part, task]
        elif place < 3 * hosts:
            if not asks and layer + 1 < traffic.layers[stage]:
                grains = traffic.read[stage, part, task]
        elif layer >= 0:
            to_host, grains = True, traffic.write[stage, part, task]
        if grains > 0:
            return place, part, grains, to_host
    return 4 * hosts, 0, 0, False


@kernel()
def _cycles_of(duration: int, index: int, parts: int) -> int:
    """Cycles of one of so many parts of a task, as even as whole cycles can be."""
    return duration * (index + 1) // parts - duration * index // parts


@kernel()
def _go_on(
    tasks: Tasks,
    traffic: Traffic,
    at: _At,
    under: Under,
    queue: list[Event],
    stage: int,
    now: int,
    serial: int,
) -> int:
    """Begin what follows in a task that moves KV; returns the next serial number."""
    stages, hosts, _ = tasks.need.shape
    task, layers = at.task[stage], traffic.layers[stage]
    last = at.shares[stage] * layers // tasks.layers[stage]  # layers within the shares that began
    while True:
        layer = at.layer[stage]
        place, part, grains, to_host = _next_transfer(traffic, stage, task, layer, at.place[stage])
        at.place[stage] = place
        if layer >= 0 and at.computed[stage] == NOT_YET and place >= 2 * hosts:
            at.computed[stage] = NOW
            cycles = _cycles_of(tasks.duration[stage, task], layer, layers)
            heapq.heappush(queue, (now + cycles, COMPUTED, serial, stage, task))
            serial += 1
        if place < 4 * hosts:
            host = tasks.host[stage, part]
            under.pair[stage] = stage * stages + host if to_host else host * stages + stage
            under.left[stage] = grains
            return serial
        if layer >= 0 and at.computed[stage] != YES:
            return serial
        at.layer[stage], at.place[stage], at.computed[stage] = layer + 1, 0, NOT_YET
        if layer + 1 == last:
            heapq.heappush(queue, (now, END, serial, stage, task))
            return serial + 1


@kernel()
def _hand_off(
    tasks: Tasks,
    traffic: Traffic,
    at: _At,
    under: Under,
    out: Schedule,
    queue: list[Event],
    stage: int,
    now: int,
    serial: int,
) -> int:
    """Let tasks that have ended leave a stage one by one; returns the next serial number."""
    stages = tasks.host.shape[0]
    flow = stages + stage
    while at.hand[stage] < at.task[stage] and under.left[flow] == 0:
        task = at.hand[stage]
        if under.pair[flow] == NO_PAIR and traffic.handoff[stage, task] > 0:
            under.pair[flow] = stage * stages + stage + 1
            under.left[flow] = traffic.handoff[stage, task]
            return serial
        under.pair[flow] = NO_PAIR
        at.hand[stage] += 1
        ready = now + tasks.handoff[stage, task]
        if task > 0:  # the link keeps the order of chunks
            ready = max(ready, out.input_ready[stage + 1, task - 1])
        out.input_ready[stage + 1, task] = ready
        heapq.heappush(queue, (ready, ARRIVAL, serial, stage + 1, task))
        serial += 1
    return serial


@kernel()
def _granted_now(
    tasks: Tasks,
    slot: Int64,
    at: _At,
    total: Int64,
    pairs: Int64,
    number: Int64,
    used: Int64,
    stage: int,
    moment: int,
) -> bool:
    """Whether the next share of a stage's task has its memory beside all grants that precede it."""
    steps, task = tasks.layers.max(), at.task[stage]
    for part in range(tasks.host.shape[1]):
        need = tasks.need[stage, part, task] // tasks.layers[stage]
        if need == 0:
            continue
        host = tasks.host[stage, part]
        claimed = used[host] + need
        for other in range(number[host]):  # grants to come that precede this one
            home, piece = pairs[host, other, 0], pairs[host, other, 1]
            bound = moment - home * steps + (1 if home < stage else 0)
            upper = begun_before(slot, tasks.layers[home], steps, bound)
            lower = at.task[home] * tasks.layers[home] + at.shares[home]
            if upper > lower:
                sums, needs = total[home, piece], tasks.need[home, piece]
                claimed += granted(sums, needs, tasks.layers[home], upper)
                claimed -= granted(sums, needs, tasks.layers[home], lower)
        if claimed > tasks.capacity[host, at.task[host]]:
            return False
    return True


@kernel()
def run(tasks: Tasks, slot: Int64, traffic: Traffic, links: Links, out: Schedule) -> int:
    """Run all tasks through all stages; fill ``out``. Returns DONE or DEADLOCK."""
    stages, hosts, count = tasks.need.shape
    steps = tasks.layers.max()
    total = np.zeros((stages, hosts, count + 1), np.int64)  # quanta of all tasks before one
    left = np.zeros((stages, count + 1), np.int64)  # of these, what was pushed away
    first = np.zeros(count, np.int64)  # of the task's request
    for task in range(count):
        total[:, :, task + 1] = total[:, :, task] + tasks.need[:, :, task]
        left[:, task + 1] = left[:, task] + tasks.leave[:, task]
        if task > 0:
            first[task] = task if tasks.last[task - 1] == 1 else first[task - 1]
    pairs, number = contributors(tasks.host)
    used = np.zeros(stages, np.int64)
    state = np.zeros((7, stages), np.int64)
    at = _At(state[0], state[1], state[2], state[3], state[4], state[5], state[6])
    under = under_way(2 * stages, links)  # of each stage its KV, then its hand-off
    under.pair[:] = NO_PAIR
    queue = [(0, 0, 0, 0, 0)]
    queue.pop()
    serial = 0
    for task in range(count):
        out.input_ready[0, task] = tasks.arrival[task]
        heapq.heappush(queue, (tasks.arrival[task], ARRIVAL, serial, 0, task))
        serial += 1
    done, before = 0, 0
    while True:
        until = next_end(under)
        if len(queue) == 0 and until == NEVER:
            break
        now = before + until if until < NEVER else queue[0][0]
        if len(queue) > 0:
            now = min(now, queue[0][0])
        advance(links, under, now - before)
        before = now
        for flow in range(2 * stages):
            if under.rate[flow] == 0 or under.left[flow] > 0:
                continue
            arrival, kind, stage = now, SENT, flow - stages
            if flow < stages:
                kind, stage, pair = MOVED, flow, under.pair[flow]
                arrival += links.latency[pair // stages, pair % stages]
            heapq.heappush(queue, (arrival, kind, serial, stage, at.task[stage]))
            serial += 1
        while len(queue) > 0 and queue[0][0] == now:
            _, kind, _, stage, task = heapq.heappop(queue)
            ended = kind == END
            if ended:
                layers = tasks.layers[stage]
                at.running[stage] = 0
                out.layer_end[stage, task, at.shares[stage] - 1] = now
                used[stage] -= tasks.leave[stage, task] // layers
                if tasks.last[task] == 1:
                    for part in range(hosts):
                        quanta = total[stage, part, task + 1] - total[stage, part, first[task]]
                        if part == 0:
                            quanta -= left[stage, task + 1] - left[stage, first[task]]
                        used[tasks.host[stage, part]] -= quanta // layers
                ended = at.shares[stage] == layers
            if ended:
                at.shares[stage] = 0
                at.task[stage] += 1
                done += 1
                out.end[stage, task] = now
            if stage + 1 < stages and (ended or kind == SENT):
                serial = _hand_off(tasks, traffic, at, under, out, queue, stage, now, serial)
            if kind == COMPUTED:
                at.computed[stage] = YES
            elif kind == MOVED:
                at.place[stage] += 1
            idle = at.place[stage] == 4 * hosts  # nothing is on its way for the stage
            if kind in (BEGUN, MOVED) or (kind == COMPUTED and idle):
                serial = _go_on(tasks, traffic, at, under, queue, stage, now, serial)
        for stage in range(stages):
            task, share = at.task[stage], at.shares[stage]
            if at.running[stage] == 1 or task == count:
                continue
            ready = out.input_ready[stage, task]
            if ready < 0 or ready > now:
                continue
            layers = tasks.layers[stage]
            moment = (slot[task] + stage) * steps + share * steps // layers
            if not _granted_now(tasks, slot, at, total, pairs, number, used, stage, moment):
                continue
            for part in range(hosts):
                host = tasks.host[stage, part]
                used[host] += tasks.need[stage, part, task] // layers
                out.peak[host] = max(out.peak[host], used[host])
            if share == 0:
                free = out.end[stage, task - 1] if task > 0 else 0
                out.start[stage, task] = now
                out.memory_wait[stage, task] = now - max(free, ready)
                at.layer[stage], at.computed[stage] = -1, YES
            else:
                out.layer_wait[stage, task] += now - out.layer_end[stage, task, share - 1]
            at.place[stage], at.running[stage], at.shares[stage] = 0, 1, share + 1
            out.layer_start[stage, task, share] = now
            kind, end = BEGUN, now
            if not _moves(traffic, stage, task):
                kind, end = END, now + _cycles_of(tasks.duration[stage, task], share, layers)
            heapq.heappush(queue, (end, kind, serial, stage, task))
            serial += 1
        fair_rates(links, under)
    out.link_busy[:] = under.busy
    return DONE if done == stages * count else DEADLOCK
