"""What follows what in a task that moves KV, and how tasks leave a stage.

A stage's KV goes one flow at a time: what the first layer reads comes before it; beside each layer
go what the next one reads, then what it writes itself. Queries and partial results of remote
attention go before a layer. Hand-offs leave a stage one by one.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_kernels._jit import kernel
from wafer_kernels.noc import Under
from wafer_kernels.pipeline_tasks import Schedule, Tasks, Traffic

__all__ = [
    "ARRIVAL",
    "BEGUN",
    "COMPUTED",
    "END",
    "MOVED",
    "NO_PAIR",
    "SENT",
    "YES",
    "At",
    "Event",
    "cycles_of",
    "go_on",
    "hand_off",
    "moves",
]

Int64 = npt.NDArray[np.int64]
Event = tuple[int, int, int, int, int]  # cycle, priority, serial, stage, task

# What happens, by priority at equal cycles: frees precede grants.
END, ARRIVAL, COMPUTED, MOVED, SENT, BEGUN = 0, 1, 2, 3, 4, 5
NOT_YET, NOW, YES = 0, 1, 2  # whether a layer has computed
NO_PAIR = -1  # of a hand-off that is not under way


class At(NamedTuple):
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
def moves(traffic: Traffic, stage: int, task: int) -> bool:
    """Whether a task reads KV from other stages, writes it to them or asks them for attention."""
    for part in range(1, traffic.read.shape[1]):
        away = traffic.read[stage, part, task] + traffic.write[stage, part, task]
        if away + traffic.ask[stage, part, task] > 0:
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
def cycles_of(duration: int, index: int, parts: int) -> int:
    """Cycles of one of so many parts of a task, as even as whole cycles can be."""
    return duration * (index + 1) // parts - duration * index // parts


@kernel()
def go_on(
    tasks: Tasks,
    traffic: Traffic,
    at: At,
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
            cycles = cycles_of(tasks.duration[stage, task], layer, layers)
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
def hand_off(
    tasks: Tasks,
    traffic: Traffic,
    at: At,
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
