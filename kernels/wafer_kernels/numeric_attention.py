"""Attention by tiles with an online softmax: the keys of a query may come in any pieces.

For each query the state holds the highest score ``m`` so far, ``l = sum exp(s - m)`` and
``a = sum exp(s - m) v``. A new tile of scores with peak ``m'`` rescales ``l`` and ``a`` by
``exp(m - max(m, m'))``; two states merge in the same way; the result is ``a / l``. Source: Milakov
and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wafer_kernels._jit import kernel
from wafer_kernels.numeric import Float32, Int64, product_add, product_add_transposed

__all__ = [
    "SoftmaxState",
    "attend",
    "attention_finish",
    "attention_reset",
    "attention_tile",
    "merge",
]


class SoftmaxState(NamedTuple):
    """What a set of queries has gathered from the keys it has seen so far."""

    peaks: Float32
    """Highest score (queries,); minus infinity before the first visible key."""
    sums: Float32
    """Sum of the exponentials of score minus peak (queries,)."""
    values: Float32
    """Sum of the values, weighted by these exponentials (queries, value dim)."""


@kernel()
def attention_reset(state: SoftmaxState) -> None:
    """Forget all keys."""
    state.peaks[:] = -np.inf
    state.sums[:] = 0.0
    state.values[:] = 0.0


@kernel()
def attend(
    state: SoftmaxState,
    scores: Float32,
    v: Float32,
    scale: float,
    q_positions: Int64,
    k_positions: Int64,
    window: int,
) -> None:
    """Add one tile of keys, whose products with the queries are known, to the state.

    Parameters
    ----------
    state
        Modified in place.
    scores
        Products ``q k^T`` (queries, keys); used up as workspace.
    v
        Values (keys, value dim).
    scale
        Factor of the products, such as ``1 / sqrt(dim)``.
    q_positions, k_positions
        Positions in the request (queries,), (keys,); a query sees no key behind its own position.
    window
        Positions that a query sees, its own included; 0 for all.
    """
    queries, keys = scores.shape
    for i in range(queries):
        first = q_positions[i] - window if window > 0 else np.int64(-1)
        peak = state.peaks[i]
        for j in range(keys):
            visible = first < k_positions[j] <= q_positions[i]
            scores[i, j] = scores[i, j] * np.float32(scale) if visible else -np.inf
            peak = max(peak, scores[i, j])
        if peak == -np.inf:
            scores[i, :] = 0.0
            continue
        decay = np.exp(state.peaks[i] - peak)
        total = state.sums[i] * decay
        for j in range(keys):
            scores[i, j] = np.exp(scores[i, j] - peak)
            total += scores[i, j]
        state.peaks[i] = peak
        state.sums[i] = total
        for j in range(v.shape[1]):
            state.values[i, j] *= decay
    product_add(state.values, scores, v)


@kernel()
def attention_tile(
    state: SoftmaxState,
    scores: Float32,
    q: Float32,
    k: Float32,
    v: Float32,
    scale: float,
    q_positions: Int64,
    k_positions: Int64,
    window: int,
) -> None:
    """Add one tile of keys and values to the state of the queries.

    The rows of ``q`` may belong to several heads that share the keys: repeat their positions.

    Parameters
    ----------
    state
        Modified in place.
    scores
        Workspace (queries, keys).
    q
        Queries (queries, dim).
    k
        Keys (keys, dim).
    v, scale, q_positions, k_positions, window
        As in ``attend``.
    """
    scores[:] = 0.0
    product_add_transposed(scores, q, k)
    attend(state, scores, v, scale, q_positions, k_positions, window)


@kernel()
def merge(state: SoftmaxState, other: SoftmaxState) -> None:
    """Add what the same queries gathered elsewhere to their state; ``other`` is unchanged."""
    for i in range(state.peaks.size):
        peak = max(state.peaks[i], other.peaks[i])
        if peak == -np.inf:
            continue
        mine = np.exp(state.peaks[i] - peak)
        theirs = np.exp(other.peaks[i] - peak)
        state.peaks[i] = peak
        state.sums[i] = state.sums[i] * mine + other.sums[i] * theirs
        for j in range(state.values.shape[1]):
            state.values[i, j] = state.values[i, j] * mine + other.values[i, j] * theirs


@kernel()
def attention_finish(output: Float32, state: SoftmaxState) -> None:
    """Write the attention (queries, value dim); NaN for a query that saw no key."""
    for i in range(state.sums.size):
        for j in range(output.shape[1]):
            output[i, j] = state.values[i, j] / state.sums[i]
