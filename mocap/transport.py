"""The bound on reallocation: a transport plan over all regions, by linear programming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mocap.policy import Move, Setting
from mocap.timeline import Block, blocks, layers_held, occupancy
from wafer_kernels.errors import CapacityError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["optimal"]


def optimal(
    cuts: Sequence[Sequence[int]], setting: Setting, layers: Sequence[int] = ()
) -> list[Move]:
    """Moves of least byte-hops with which every region holds its KV at every slot.

    With x[b, h] the tokens of block b that region h hosts, and w_b the KV bytes per token of its
    home,

        min   sum_b sum_h  w_b hops(home, h) (1 + later chunks) x[b, h]
        s.t.  own(k, s) - sum_{b of k} w_b x[b, h] + sum_b w_b x[b, k] <= capacity(k)   for all k, s
              sum_h x[b, h] <= tokens(b),   x >= 0

    over the blocks alive at slot s: a moved token is written once and read back by every later
    chunk of its request. Where KV is freed layer by layer (``layers`` of each stage), s counts the
    steps of every slot and w_b the layers that are there in that step. Moves are rounded down to
    whole pages; the program leaves room for that: a page a chunk at first, twice as much whenever
    that was not enough.

    Raises
    ------
    CapacityError
        If no plan fits: names the slot at which all regions together are fullest.

    Notes
    -----
    Assumes that KV may be split at will: a bound, not a protocol.
    """
    from scipy.optimize import LinearConstraint, milp

    alive = list(blocks(cuts, setting.stages))
    own = occupancy(cuts, [], setting.kv_bytes_per_token, layers)
    capacity = np.array(setting.kv_capacity_bytes, np.int64)[:, None]
    if (own <= capacity).all():
        return []
    if setting.stages == 1:
        raise _infeasible(own, setting, 0, layers)
    choices = [(b, h) for b, block in enumerate(alive) for h in _others(block.stage, setting)]
    weights = np.array(
        [
            setting.kv_bytes_per_token[alive[b].stage]
            * setting.hops[alive[b].stage][h]
            * (len(cuts[alive[b].request]) - alive[b].chunk)
            for b, h in choices
        ],
        np.float64,
    )
    weights /= max(1.0, weights.max())
    constraints = _constraints(alive, choices, setting, layers or [1] * setting.stages)
    tokens = [block.tokens for block in alive]
    unit = max(setting.kv_bytes_per_token)
    pages = max(map(len, cuts))
    while True:
        margin = pages * setting.page_tokens * unit
        most = np.array([*((capacity - margin - own) / unit).ravel(), *tokens])
        solved = milp(weights, constraints=LinearConstraint(constraints, ub=most))
        if solved.x is None:
            raise _infeasible(own, setting, margin, layers)
        moves = []
        for (b, host), amount in zip(choices, solved.x, strict=True):
            whole = int(amount + 1e-6) // setting.page_tokens * setting.page_tokens
            if whole:
                block = alive[b]
                moves.append(Move(block.request, block.stage, block.chunk, whole, host))
        if (occupancy(cuts, moves, setting.kv_bytes_per_token, layers) <= capacity).all():
            return moves
        pages *= 2


def _others(stage: int, setting: Setting) -> list[int]:
    return [host for host in range(setting.stages) if host != stage]


def _constraints(
    alive: Sequence[Block],
    choices: Sequence[tuple[int, int]],
    setting: Setting,
    layers: Sequence[int],
) -> csr_array:
    """Rows: every region at every step of a slot [largest KV per token], every block [tokens]."""
    from scipy.sparse import csr_array

    block = np.array([b for b, _ in choices])
    host = np.array([h for _, h in choices])
    home, start, end = np.array([(one.stage, one.start, one.end) for one in alive])[block].T
    steps, columns = max(layers), max(one.end for one in alive) * max(layers)
    weight = np.array(setting.kv_bytes_per_token) / max(setting.kv_bytes_per_token)
    life = (end - start) * steps
    variable = np.repeat(np.arange(len(choices)), life)
    step = np.arange(life.sum()) - np.repeat(life.cumsum() - life, life) + steps * start[variable]
    held = [
        weight[k] * layers_held(layers[k], steps, slots) / layers[k]
        for k, slots in zip(home.tolist(), (end - start).tolist(), strict=True)
    ]
    share = np.concatenate(held)
    rows = [
        home[variable] * columns + step,
        host[variable] * columns + step,
        setting.stages * columns + block,
    ]
    entries = [variable, variable, np.arange(len(choices))]
    values = [-share, share, np.ones(len(choices))]
    return csr_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(entries))),
        shape=(setting.stages * columns + len(alive), len(choices)),
    )


def _infeasible(
    own: NDArray[np.int64], setting: Setting, margin: int, layers: Sequence[int]
) -> CapacityError:
    total, capacity = own.sum(axis=0), sum(setting.kv_capacity_bytes)
    step = int(total.argmax())
    slot = step // max(layers, default=1)
    return CapacityError(
        f"no reallocation fits: at slot {slot} the KV of all stages is {total[step]} bytes, the "
        f"capacity of all regions {capacity} bytes, of which {margin} a region are kept for whole "
        "pages; shorter or fewer requests would help",
        stage=int(own[:, step].argmax()),
        slot=slot,
        short_bytes=int(max(1, total[step] - capacity + margin * setting.stages)),
    )
