"""Routing of tokens to experts, and the rows that travel to an expert and back.

Equal scores are decided for the expert with the lower index. A token's experts are listed with the
best first.
"""

from __future__ import annotations

import numpy as np

from wafer_kernels._jit import kernel
from wafer_kernels.numeric import Float32, Int64

__all__ = ["choose_by_group", "choose_by_softmax", "expert_rows", "gather_rows", "scatter_rows_add"]


@kernel()
def _take_best(scores: Float32) -> int:
    """Index of the highest score, which is then struck out."""
    best = 0
    for e in range(1, scores.size):
        if scores[e] > scores[best]:
            best = e
    scores[best] = -np.inf
    return best


@kernel()
def _normalise(weights: Float32, floor: float) -> None:
    """Divide the weights by their sum; ``floor`` [1] keeps the divisor above zero."""
    total = np.float32(floor)
    for weight in weights:
        total += weight
    for r in range(weights.size):
        weights[r] /= total


@kernel()
def _sigmoid(x: np.float32) -> np.float32:
    return np.float32(1.0) / (np.float32(1.0) + np.exp(-x))


@kernel()
def choose_by_softmax(chosen: Int64, weights: Float32, logits: Float32, normalise: bool) -> None:
    """Choose each token's experts by the softmax of its router logits (Mixtral, Qwen3-MoE).

    Parameters
    ----------
    chosen, weights
        Result: experts and their weights (tokens, experts per token).
    logits
        Of the router (tokens, experts).
    normalise
        Whether a token's weights are divided by their sum.
    """
    for t in range(logits.shape[0]):
        peak = logits[t].max()
        total = np.float32(0.0)
        for logit in logits[t]:
            total += np.exp(logit - peak)
        rest = logits[t].copy()
        for r in range(chosen.shape[1]):
            best = _take_best(rest)
            chosen[t, r] = best
            weights[t, r] = np.exp(logits[t, best] - peak) / total
        if normalise:
            _normalise(weights[t], 0.0)


@kernel()
def _keep_best_groups(scores: Float32, groups: int, kept_groups: int) -> None:
    """Strike out the experts outside the groups whose two best scores have the largest sums."""
    size = scores.size // groups
    group_scores = np.empty(groups, np.float32)
    for g in range(groups):
        members = scores[g * size : (g + 1) * size].copy()
        group_scores[g] = 0.0
        for _ in range(min(2, size)):
            best = _take_best(members)
            group_scores[g] += scores[g * size + best]
    kept = np.zeros(groups, np.bool_)
    for _ in range(kept_groups):
        kept[_take_best(group_scores)] = True
    for e in range(scores.size):
        if not kept[e // size]:
            scores[e] = -np.inf


@kernel()
def choose_by_group(
    chosen: Int64,
    weights: Float32,
    logits: Float32,
    correction: Float32,
    groups: int,
    kept_groups: int,
    normalise: bool,
    scale: float,
) -> None:
    """Choose each token's experts by sigmoid scores inside its best groups (DeepSeek-V3).

    The correction bias takes part in the choice, never in the weights.

    Parameters
    ----------
    chosen, weights
        Result: experts and their weights (tokens, experts per token).
    logits
        Of the router (tokens, experts).
    correction
        Bias that balances the load of the experts (experts,).
    groups, kept_groups
        Groups of consecutive experts, and how many of them a token may use.
    normalise
        Whether a token's weights are divided by their sum before scaling.
    scale
        The model's ``routed_scaling_factor``.
    """
    tokens, experts = logits.shape
    corrected = np.empty(experts, np.float32)
    for t in range(tokens):
        for e in range(experts):
            corrected[e] = _sigmoid(logits[t, e]) + correction[e]
        _keep_best_groups(corrected, groups, kept_groups)
        for r in range(chosen.shape[1]):
            best = _take_best(corrected)
            chosen[t, r] = best
            weights[t, r] = _sigmoid(logits[t, best])
        if normalise:
            _normalise(weights[t], 1e-20)
        for r in range(chosen.shape[1]):
            weights[t, r] *= np.float32(scale)


@kernel()
def expert_rows(rows: Int64, shares: Float32, chosen: Int64, weights: Float32, expert: int) -> int:
    """List the tokens that chose an expert, in their order, and return how many they are.

    Parameters
    ----------
    rows, shares
        Result: token and weight (at least as many as tokens); the first ``count`` are written.
    chosen, weights
        Of a router (tokens, experts per token).
    expert
        The expert asked for.
    """
    count = 0
    for t in range(chosen.shape[0]):
        for r in range(chosen.shape[1]):
            if chosen[t, r] == expert:
                rows[count] = t
                shares[count] = weights[t, r]
                count += 1
    return count


@kernel()
def gather_rows(y: Float32, x: Float32, rows: Int64) -> None:
    """Copy the named rows of ``x`` (tokens, columns) to ``y`` (rows, columns)."""
    for i in range(rows.size):
        for j in range(x.shape[1]):
            y[i, j] = x[rows[i], j]


@kernel()
def scatter_rows_add(y: Float32, x: Float32, rows: Int64, shares: Float32) -> None:
    """Add ``shares[i]`` times row ``i`` of ``x`` (rows, columns) to row ``rows[i]`` of ``y``."""
    for i in range(rows.size):
        for j in range(x.shape[1]):
            y[rows[i], j] += shares[i] * x[i, j]
