"""The event loop over (task, stage): who runs when, and what each stage waits for.

Tasks are chunks in service order; every stage runs them in that order. A task starts when its input
has arrived, its stage is free and its memory is there. Memory is granted in quanta on the stages
that host the task's KV and freed when the request's last task on the home stage ends; both at once
or, where a stage counts its layers, layer by layer as they begin and end.

Grants are ordered by slots (:mod:`wafer_kernels.slots`). A plan that fits in slot time is admitted.
In real time a layer may take memory only if every grant that comes earlier in slot order still fits
beside it: so an admitted plan never deadlocks (the earliest outstanding grant can always be served
once the layers before it end).

Hand-offs and KV on its way are flows that share links (:mod:`wafer_kernels.noc`).
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from wafer_kernels._jit import kernel
from wafer_kernels.grants import begun_before, contributors, granted
from wafer_kernels.noc import NEVER, Links, advance, fair_rates, next_end, under_way
from wafer_kernels.pipeline_tasks import Schedule, Tasks, Traffic, no_traffic, schedule
from wafer_kernels.pipeline_traffic import (
    ARRIVAL,
    BEGUN,
    COMPUTED,
    END,
    MOVED,
    NO_PAIR,
    SENT,
    YES,
    At,
    cycles_of,
    go_on,
    hand_off,
    moves,
)

__all__ = ["DEADLOCK", "DONE", "Schedule", "Tasks", "Traffic", "no_traffic", "run", "schedule"]

Int64 = npt.NDArray[np.int64]

DONE, DEADLOCK = 0, 1


@kernel()
def _granted_now(
    tasks: Tasks,
    slot: Int64,
    at: At,
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
    at = At(state[0], state[1], state[2], state[3], state[4], state[5], state[6])
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
                serial = hand_off(tasks, traffic, at, under, out, queue, stage, now, serial)
            if kind == COMPUTED:
                at.computed[stage] = YES
            elif kind == MOVED:
                at.place[stage] += 1
            idle = at.place[stage] == 4 * hosts  # nothing is on its way for the stage
            if kind in (BEGUN, MOVED) or (kind == COMPUTED and idle):
                serial = go_on(tasks, traffic, at, under, queue, stage, now, serial)
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
            if not moves(traffic, stage, task):
                kind, end = END, now + cycles_of(tasks.duration[stage, task], share, layers)
            heapq.heappush(queue, (end, kind, serial, stage, task))
            serial += 1
        fair_rates(links, under)
    out.link_busy[:] = under.busy
    return DONE if done == stages * count else DEADLOCK
