"""Entries for callers that ask thousands of times for one number.

Numba's dispatcher needs some hundred microseconds to recognise a NamedTuple within a NamedTuple,
and a few for plain nested tuples: these entries take costs as :func:`plain` tuples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from wafer_kernels import attention, mesh
from wafer_kernels._jit import kernel
from wafer_kernels.attention import AttentionCost
from wafer_kernels.mesh import GridCost
from wafer_kernels.systolic import CoreCost

__all__ = [
    "compute_shift_cycles",
    "first_row_queries",
    "own_bounds",
    "own_tile",
    "plain",
    "steps_cycles",
]

Int64 = npt.NDArray[np.int64]
_closed_form, _own, _bounds, _queries, _step = (
    mesh.closed_form,
    attention.own_tile,
    attention.own_bounds,
    attention.row_queries,
    attention.step_cycles,
)


def plain(cost: tuple[Any, ...]) -> tuple[Any, ...]:
    """A cost as plain tuples, all the way down."""
    return tuple(plain(each) if isinstance(each, tuple) else each for each in cost)


@kernel()
def compute_shift_cycles(grid: tuple[Any, ...], m: int, k: int, n: int) -> int:
    """:func:`mesh.closed_form` of a MeshGEMM with B stored aligned; -1 where it does not hold."""
    cost = GridCost(grid[0], grid[1], CoreCost(*grid[2]), *grid[3:])
    return _closed_form(cost, m, k, n, 0, 0, 1)


@kernel()
def own_tile(cost: tuple[Any, ...], chunk: int) -> tuple[int, int]:
    """:func:`attention.own_tile`."""
    return _own(AttentionCost(CoreCost(*cost[0]), *cost[1:]), chunk)


@kernel()
def own_bounds(cost: tuple[Any, ...], chunk: int) -> Int64:
    """:func:`attention.own_bounds`."""
    return _bounds(AttentionCost(CoreCost(*cost[0]), *cost[1:]), chunk)


@kernel()
def first_row_queries(cost: tuple[Any, ...], chunk: int) -> int:
    """Query tokens of row 0 that see the key in front of the chunk."""
    return _queries(AttentionCost(CoreCost(*cost[0]), *cost[1:]), chunk, 0, -1, -1)


@kernel()
def steps_cycles(cost: tuple[Any, ...], queries: Int64, keys: Int64) -> Int64:
    """Cycles (S,) of ring steps of so many queries and keys (S,)."""
    named = AttentionCost(CoreCost(*cost[0]), *cost[1:])
    cycles = np.empty_like(queries)
    for index in range(queries.size):
        cycles[index] = _step(named, queries[index], keys[index])
    return cycles
