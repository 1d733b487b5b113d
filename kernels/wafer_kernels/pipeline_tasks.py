"""What the pipeline's event loop is told and what it answers: tasks, traffic, schedule."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_kernels.noc import Links

__all__ = ["Schedule", "Tasks", "Traffic", "no_traffic", "schedule"]

Int64 = npt.NDArray[np.int64]


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
