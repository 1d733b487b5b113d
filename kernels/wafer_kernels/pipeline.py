"""The event loop over (task, stage): who runs when, and what each stage waits for.

Tasks are chunks in service order; every stage runs them in that order. A task starts when its input
has arrived, its stage is free and its memory is there. Memory is granted in quanta on the stages
that host the task's KV and freed when the request's last task on the home stage ends; both at once
or, where a stage counts its layers, layer by layer as they begin and end.

*Slots* order the grants. In slot time every task lasts one slot: task i runs on stage k in slot
``slot[i] + k``, and its layer j of L in the share ``[j / L, (j + 1) / L)`` of it, rounded down to
sub-slots. A plan that fits in slot time is admitted. In real time a layer may take memory only if
every grant that comes earlier in slot order still fits beside it: so an admitted plan never
deadlocks (the earliest outstanding grant can always be served once the layers before it end).
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
    quanta granted to a task; ``leave`` (N, T) quanta of part 0 that are freed as a task ends, since
    it pushed them to a host; ``layers`` (N,) equal shares of a task's cycles by which its quanta
    are granted and freed, all divisible by it (1: the whole task at once); ``capacity`` (N, T + 1)
    quanta that a stage can hold from task i on, never less for a later task.
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


class Schedule(NamedTuple):
    """What the loop answers, all int64 of shape (N, T) but ``peak`` (N,) [quanta].

    ``memory_wait`` comes before the start of a task, ``layer_wait`` between its layers;
    ``layer_start`` and ``layer_end`` are (N, T, most layers).
    """

    input_ready: Int64
    start: Int64
    end: Int64
    memory_wait: Int64
    layer_wait: Int64
    layer_start: Int64
    layer_end: Int64
    peak: Int64


def schedule(tasks: Tasks) -> Schedule:
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
    )


@kernel()
def _added(tasks: Tasks, first: int, chunks: int) -> Int64:
    """Quanta (stage, sub-slot after the request's first) that one request's KV takes."""
    stages, hosts, _ = tasks.need.shape
    steps = tasks.layers.max()
    added = np.zeros((stages, (chunks + stages - 1) * steps + 1), np.int64)
    for home in range(stages):
        layers = tasks.layers[home]
        for part in range(hosts):
            change = added[tasks.host[home, part]]
            for layer in range(layers):
                begin, end = layer * steps // layers, (layer + 1) * steps // layers
                held = 0
                for chunk in range(chunks):
                    at = (home + chunk) * steps
                    more = tasks.need[home, part, first + chunk] // layers
                    less = tasks.leave[home, first + chunk] // layers if part == 0 else 0
                    change[at + begin] += more
                    change[at + end] -= less
                    held += more - less
                change[(home + chunks - 1) * steps + end] -= held
    for stage in range(stages):
        for at in range(1, added.shape[1]):
            added[stage, at] += added[stage, at - 1]
    return added[:, :-1]


@kernel()
def admit(tasks: Tasks, slot: Int64, shortage: Int64) -> int:
    """Find slots in which every request fits; the plan's exact admission test.

    Requests follow back to back where they fit, else later by as few slots as needed. ``slot`` (T,)
    is overwritten. Returns ADMITTED, or 1 + the first task of the request that does not fit even
    alone; ``shortage`` then holds (stage, slot within the request, quanta short in the fullest part
    of that slot).
    """
    stages, _, count = tasks.need.shape
    steps = tasks.layers.max()
    requests = 0
    for task in range(count):
        requests += tasks.last[task]
    used = np.zeros((stages, (count + (requests + 1) * stages) * steps), np.int64)
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
                for offset in range(chunks + stages - 1):
                    # The task that this stage is at, or waits for, in this slot.
                    working = start + offset - stage
                    task = first + min(max(working - start, 0), chunks)
                    if working < start:
                        task = int(np.searchsorted(slot[:first], working))
                    room = tasks.capacity[stage, task]
                    alone = tasks.capacity[stage, max(task, first)]
                    short = 0
                    for at in range(offset * steps, (offset + 1) * steps):
                        if added[stage, at] == 0:
                            continue
                        short = max(short, added[stage, at] - alone)
                        if used[stage, start * steps + at] + added[stage, at] > room:
                            fits = False
                    if short > 0:
                        shortage[0], shortage[1], shortage[2] = stage, offset, short
                        return 1 + first
            if not fits:
                start += 1
        used[:, start * steps : start * steps + added.shape[1]] += added
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
def _begun_before(slot: Int64, layers: int, steps: int, bound: int) -> int:
    """Layers, a task's after those of the tasks before it, that begin before sub-slot ``bound``.

    Sub-slots count from the first slot of the stage; layer j of a task in slot s begins at
    ``s * steps + floor(j * steps / layers)``.
    """
    tasks = np.searchsorted(slot, -(-bound // steps))  # those whose slot begins before it
    if tasks == 0:
        return 0
    inside = bound - slot[tasks - 1] * steps
    return (tasks - 1) * layers + min(layers, -(-inside * layers // steps))


@kernel()
def _granted(total: Int64, need: Int64, layers: int, begun: int) -> int:
    """Quanta of the first ``begun`` layers; ``total`` (T + 1,) those of all tasks before one."""
    task = begun // layers
    quanta = total[task]
    if begun > task * layers:
        quanta += need[task] // layers * (begun - task * layers)
    return quanta


@kernel()
def run(tasks: Tasks, slot: Int64, out: Schedule) -> int:
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
    pairs, number = _contributors(tasks.host)
    used = np.zeros(stages, np.int64)
    current = np.zeros(stages, np.int64)  # the task that a stage runs, or will run next
    begun = np.zeros(stages, np.int64)  # its layers that have begun
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
            layers = tasks.layers[stage]
            running[stage] = 0
            used[stage] -= tasks.leave[stage, task] // layers
            if tasks.last[task] == 1:
                for part in range(hosts):
                    quanta = total[stage, part, task + 1] - total[stage, part, first[task]]
                    if part == 0:
                        quanta -= left[stage, task + 1] - left[stage, first[task]]
                    used[tasks.host[stage, part]] -= quanta // layers
            if begun[stage] < layers:
                continue
            begun[stage] = 0
            current[stage] += 1
            done += 1
            out.end[stage, task] = now
            if stage + 1 < stages:
                ready = now + tasks.handoff[stage, task]
                if task > 0:  # the link keeps the order of chunks
                    ready = max(ready, out.input_ready[stage + 1, task - 1])
                out.input_ready[stage + 1, task] = ready
                heapq.heappush(queue, (ready, ARRIVAL, serial, stage + 1, task))
                serial += 1
        for stage in range(stages):
            task, layer = current[stage], begun[stage]
            if running[stage] == 1 or task == count:
                continue
            ready = out.input_ready[stage, task]
            if ready < 0 or ready > now:
                continue
            layers = tasks.layers[stage]
            moment = (slot[task] + stage) * steps + layer * steps // layers
            granted = True
            for part in range(hosts):
                need = tasks.need[stage, part, task] // layers
                if need == 0:
                    continue
                host = tasks.host[stage, part]
                claimed = used[host] + need
                for other in range(number[host]):  # grants to come that precede this one
                    home, piece = pairs[host, other, 0], pairs[host, other, 1]
                    bound = moment - home * steps + (1 if home < stage else 0)
                    upper = _begun_before(slot, tasks.layers[home], steps, bound)
                    lower = current[home] * tasks.layers[home] + begun[home]
                    if upper > lower:
                        sums, needs = total[home, piece], tasks.need[home, piece]
                        claimed += _granted(sums, needs, tasks.layers[home], upper)
                        claimed -= _granted(sums, needs, tasks.layers[home], lower)
                if claimed > tasks.capacity[host, current[host]]:
                    granted = False
                    break
            if not granted:
                continue
            for part in range(hosts):
                host = tasks.host[stage, part]
                used[host] += tasks.need[stage, part, task] // layers
                out.peak[host] = max(out.peak[host], used[host])
            if layer == 0:
                free = out.end[stage, task - 1] if task > 0 else 0
                out.start[stage, task] = now
                out.memory_wait[stage, task] = now - max(free, ready)
            else:
                out.layer_wait[stage, task] += now - out.layer_end[stage, task, layer - 1]
            begun[stage] = layer + 1
            running[stage] = 1
            cycles = tasks.duration[stage, task]
            end = now + cycles * (layer + 1) // layers - cycles * layer // layers
            out.layer_start[stage, task, layer] = now
            out.layer_end[stage, task, layer] = end
            heapq.heappush(queue, (end, END, serial, stage, task))
            serial += 1
    return DONE if done == stages * count else DEADLOCK
