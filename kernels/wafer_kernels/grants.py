"""Grants of memory in slot order: those that precede another, and how much they take."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wafer_kernels._jit import kernel

__all__ = ["begun_before", "contributors", "granted"]

Int64 = npt.NDArray[np.int64]


@kernel()
def contributors(host: Int64) -> tuple[Int64, Int64]:
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
def begun_before(slot: Int64, layers: int, steps: int, bound: int) -> int:
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
def granted(total: Int64, need: Int64, layers: int, begun: int) -> int:
    """Quanta of the first ``begun`` layers; ``total`` (T + 1,) those of all tasks before one."""
    task = begun // layers
    quanta = total[task]
    if begun > task * layers:
        quanta += need[task] // layers * (begun - task * layers)
    return quanta
