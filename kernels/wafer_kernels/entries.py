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

__all__ = ["blocks_cycles", "compute_shift_cycles", "own_cycles", "plain"]

Int64 = npt.NDArray[np.int64]
_closed_form, _own, _prefix = (
    mesh.closed_form,
    attention.diagonal_cycles,
    attention.prefix_cycles,
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
def own_cycles(cost: tuple[Any, ...], chunk: int) -> int:
    """:func:`attention.diagonal_cycles`."""
    return _own(AttentionCost(CoreCost(*cost[0]), *cost[1:]), chunk)


@kernel()
def blocks_cycles(cost: tuple[Any, ...], blocks: Int64, own: Int64, earlier: Int64) -> Int64:
    """Cycles (P, B) of B query blocks that meet ``earlier`` (P, B) keys and then their own.

    ``own`` (B,) are the cycles against their own keys, as :func:`own_cycles` gives them.
    """
    named = AttentionCost(CoreCost(*cost[0]), *cost[1:])
    cycles = np.empty_like(earlier)
    for index in range(earlier.shape[0]):
        for block in range(blocks.size):
            met = _prefix(named, blocks[block], earlier[index, block])
            cycles[index, block] = met + own[block]
    return cycles
