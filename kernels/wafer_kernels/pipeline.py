"""The event loop over (task, stage): who runs when, and what each stage waits for.

Tasks are chunks in service order; every stage runs them in that order. A task starts when its input
has arrived, its stage is free and its memory is there. Memory is granted in quanta on the stages
that host the task's KV and freed when the request's last task on the home stage ends.

*Slots* order the grants. In slot time every task lasts one slot: task i runs on stage k in slot
``slot[i] + k``. A plan that fits in slot time is admitted. In real time a task may take memory only
if every grant that comes earlier in slot order still fits beside it: so an admitted plan never
deadlocks (the earliest outstanding grant can always be served once the tasks before it end).
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_kernels._jit import kernel

__all__ = ["ADMITTED", "DEADLOCK", "DONE", "Schedule", "Tasks", "admit", "run", "schedule"]

Int64 = npt.NDArray[np.int64]

ADMITTED, DONE, DEADLOCK = 0, 0, 1
END, ARRIVAL = 0, 1  # priorities at equal cycles: frees precede allocations


class Tasks(NamedTuple):
    """What the loop is told, all int64: N stages, T tasks, G hosts a stage.

    ``arrival`` (T,) cycle at which a task may enter stage 0; ``last`` (T,) 1 where the task is its
    request's last; ``duration`` (N, T); ``handoff`` (N, T) cycles from the end on a stage to the
    arrival at the next; ``host`` (N, G) stage that hosts part g of the stage's KV (part 0: itself,
    the others distinct; an unused part repeats the stage and needs nothing); ``need`` (N, G, T)
    quanta; ``capacity`` (N, T + 1) quanta that a stage can hold from task i on, never less for a
    later task.
    """

    arrival: Int64
    last: Int64
    duration: Int64
    handoff: Int64
    host: Int64
    need: Int64
    capacity: Int64


class Schedule(NamedTuple):
    """What the loop answers, all int64 of shape (N, T) but ``peak`` (N,) [quanta]."""

    input_ready: Int64
    start: Int64
    end: Int64
    memory_wait: Int64
    peak: Int64


def schedule(stages: int, tasks: int) -> Schedule:
    """Return an empty schedule; an input that is not on its way is ready at cycle -1."""
    shape = stages, tasks
    return Schedule(
        input_ready=np.full(shape, -1, np.int64),
        start=np.zeros(shape, np.int64),
        end=np.zeros(shape, np.int64),
        memory_wait=np.zeros(shape, np.int64),
        peak=np.zeros(stages, np.int64),
    )


@kernel()
def _added(tasks: Tasks, first: int, chunks: int) -> Int64:
    """Quanta (stage, slot after the request's first) that one request's KV takes in slot time."""
    stages, hosts, _ = tasks.need.shape
    added = np.zeros((stages, chunks + stages - 1), np.int64)
    for home in range(stages):
        for part in range(hosts):
            held = 0
            for chunk in range(chunks):
                held += tasks.need[home, part, first + chunk]
                added[tasks.host[home, part], home + chunk] += held
    return added


@kernel()
def admit(tasks: Tasks, slot: Int64, shortage: Int64) -> int:
    """Find slots in which every request fits; the plan's exact admission test.

    Requests follow back to back where they fit, else later by as few slots as needed. ``slot`` (T,)
    is overwritten. Returns ADMITTED, or 1 + the first task of the request that does not fit even
    alone; ``shortage`` then holds (stage, slot within the request, quanta short).
    """
    stages, _, count = tasks.need.shape
    requests = 0
    for task in range(count):
        requests += tasks.last[task]
    used = np.zeros((stages, count + (requests + 1) * stages), np.int64)
    first, start = 0, 0
    while first < count:
        chunks = 1
        while tasks.last[first + chunks - 1] == 0:
            chunks += 1
        added = _added(tasks, first, chunks)
        fits = False
        while not fits:
            fits = True
            for stage in range(stages):
                for offset in range(added.shape[1]):
                    if added[stage, offset] == 0:
                        continue
                    # The task that this stage is at, or waits for, in this slot.
                    working = start + offset - stage
                    task = first + min(max(working - start, 0), chunks)
                    if working < start:
                        task = int(np.searchsorted(slot[:first], working))
                    room = tasks.capacity[stage, task]
                    if added[stage, offset] > tasks.capacity[stage, max(task, first)]:
                        shortage[0], shortage[1] = stage, offset
                        shortage[2] = added[stage, offset] - tasks.capacity[stage, max(task, first)]
                        return 1 + first
                    if used[stage, start + offset] + added[stage, offset] > room:
                        fits = False
            if not fits:
                start += 1
        used[:, start : start + added.shape[1]] += added
        for chunk in range(chunks):
            slot[first + chunk] = start + chunk
        first += chunks
        start += chunks
    return ADMITTED


@kernel()
def _contributors(host: Int64) -> tuple[Int64, Int64]:
    """For every stage the (home, part) pairs whose KV it hosts, and their number."""
    stages, hosts = host.shape
    pairs = np.zeros((stages, stages * hosts, 2), np.int64)
    number = np.zeros(stages, np.int64)
    for home in range(stages):
        for part in range(hosts):
            stage = host[home, part]
            if part == 0 or stage != home:
                pairs[stage, number[stage], 0] = home
                pairs[stage, number[stage], 1] = part
                number[stage] += 1
    return pairs, number


@kernel()
def run(tasks: Tasks, slot: Int64, out: Schedule) -> int:
    """Run all tasks through all stages; fill ``out``. Returns DONE or DEADLOCK."""
    stages, hosts, count = tasks.need.shape
    total = np.zeros((stages, hosts, count + 1), np.int64)  # quanta of all tasks before one
    for task in range(count):
        total[:, :, task + 1] = total[:, :, task] + tasks.need[:, :, task]
    pairs, number = _contributors(tasks.host)
    used = np.zeros(stages, np.int64)
    held = np.zeros((stages, hosts), np.int64)
    current = np.zeros(stages, np.int64)  # the task that a stage runs, or will run next
    running = np.zeros(stages, np.int64)
    queue = [(np.int64(0), 0, 0, 0, 0)]
    queue.pop()
    serial = 0
    for task in range(count):
        out.input_ready[0, task] = tasks.arrival[task]
        heapq.heappush(queue, (tasks.arrival[task], ARRIVAL, serial, 0, task))
        serial += 1
    done = 0
    while len(queue) > 0:
        now = queue[0][0]
        while len(queue) > 0 and queue[0][0] == now:
            _, kind, _, stage, task = heapq.heappop(queue)
            if kind == ARRIVAL:
                continue
            running[stage] = 0
            current[stage] += 1
            done += 1
            if tasks.last[task] == 1:
                for part in range(hosts):
                    used[tasks.host[stage, part]] -= held[stage, part]
                    held[stage, part] = 0
            if stage + 1 < stages:
                ready = now + tasks.handoff[stage, task]
                if task > 0:  # the link keeps the order of chunks
                    ready = max(ready, out.input_ready[stage + 1, task - 1])
                out.input_ready[stage + 1, task] = ready
                heapq.heappush(queue, (ready, ARRIVAL, serial, stage + 1, task))
                serial += 1
        for stage in range(stages):
            task = current[stage]
            if running[stage] == 1 or task == count:
                continue
            ready = out.input_ready[stage, task]
            if ready < 0 or ready > now:
                continue
            granted = True
            for part in range(hosts):
                need = tasks.need[stage, part, task]
                if need == 0:
                    continue
                host = tasks.host[stage, part]
                claimed = used[host] + need
                for other in range(number[host]):  # grants to come that precede this one
                    home, piece = pairs[host, other, 0], pairs[host, other, 1]
                    bound = slot[task] + stage - home + (1 if home < stage else 0)
                    upper = np.searchsorted(slot, bound)
                    lower = current[home] + running[home]
                    if upper > lower:
                        claimed += total[home, piece, upper] - total[home, piece, lower]
                if claimed > tasks.capacity[host, current[host]]:
                    granted = False
                    break
            if not granted:
                continue
            for part in range(hosts):
                host = tasks.host[stage, part]
                used[host] += tasks.need[stage, part, task]
                held[stage, part] += tasks.need[stage, part, task]
                out.peak[host] = max(out.peak[host], used[host])
            running[stage] = 1
            free = out.end[stage, task - 1] if task > 0 else 0
            out.start[stage, task] = now
            out.end[stage, task] = now + tasks.duration[stage, task]
            out.memory_wait[stage, task] = now - max(free, ready)
            heapq.heappush(queue, (out.end[stage, task], END, serial, stage, task))
            serial += 1
    return DONE if done == stages * count else DEADLOCK
