"""Kernels on several threads: each takes an equal share of cores or columns.

Kernels release the interpreter's lock, so that plain threads suffice. Each writes to its own cores
only: a result does not depend on the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

__all__ = ["share_out"]

WORTH_A_THREAD = 2_000_000  # multiply-accumulates: about a millisecond


@cache
def _pool() -> tuple[ThreadPoolExecutor, int]:
    workers = os.cpu_count() or 1
    return ThreadPoolExecutor(workers, "wafer-emu"), workers


def share_out(kernel: Callable[..., None], members: int, macs: int, *arguments: Any) -> None:
    """Call ``kernel(*arguments, first, last)`` on equal ranges of ``members``.

    Parameters
    ----------
    kernel
        Works on the members ``first`` to ``last - 1``.
    members
        Cores, or columns of cores.
    macs
        Multiply-accumulates of all members; few of them are not worth a second thread.
    arguments
        What comes before the range.
    """
    pool, workers = _pool()
    shares = max(1, min(workers, members, macs // WORTH_A_THREAD))
    bounds = [members * share // shares for share in range(shares + 1)]
    rest = [pool.submit(kernel, *arguments, first, last) for first, last in pairwise(bounds[1:])]
    kernel(*arguments, bounds[0], bounds[1])
    for each in rest:
        each.result()
