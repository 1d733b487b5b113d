"""Admission in slots: whether every request's memory fits, and when each may begin.

In slot time every task lasts one slot: task i runs on stage k in slot ``slot[i] + k``, and its
layer j of L in the share ``[j / L, (j + 1) / L)`` of it, rounded down to sub-slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wafer_kernels._jit import kernel
from wafer_kernels.pipeline_tasks import Tasks

__all__ = ["ADMITTED", "admit"]

Int64 = npt.NDArray[np.int64]

ADMITTED = 0


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
