"""Independent measurements, shared out to as many processes as there are cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

__all__ = ["in_processes"]

Case = TypeVar("Case")
Found = TypeVar("Found")


def in_processes(function: Callable[[Case], Found], cases: Sequence[Case]) -> Iterator[Found]:
    """What a picklable function returns for each case, in order; one case stays in this process."""
    workers = min(len(cases), os.cpu_count() or 1)
    if workers <= 1:
        yield from map(function, cases)
        return
    # Spawned, not forked: a fork hangs after a parallel kernel.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, cases)
