"""Counts of a decoder layer, written out from the equations with loops over tokens and heads."""

from __future__ import annotations


def visible_keys(query: int, window: int | None) -> int:
    """Keys that the query at a position sees: itself and those before it, inside the window."""
    seen = 0
    for key in range(query + 1):
        if window is None or query - key < window:
            seen += 1
    return seen


def pairs(chunk: int, prefix: int, window: int | None) -> int:
    """(query, key) pairs of a chunk."""
    total = 0
    for query in range(prefix, prefix + chunk):
        total += visible_keys(query, window)
    return total


def matrix_macs(tokens: int, inner: int, out: int) -> int:
    """One multiply-accumulate per token, input and output."""
    return tokens * inner * out


def plain_layer_macs(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    inner: int,
    chunk: int,
    prefix: int,
    window: int | None = None,
) -> int:
    """Q, K, V, attention head by head, O, gate, up, down."""
    total = matrix_macs(chunk, hidden, heads * head_dim)
    total += 2 * matrix_macs(chunk, hidden, kv_heads * head_dim)
    for _head in range(heads):
        for query in range(prefix, prefix + chunk):
            keys = visible_keys(query, window)
            total += keys * head_dim  # scores
            total += keys * head_dim  # weighted sum of values
    total += matrix_macs(chunk, heads * head_dim, hidden)
    total += 3 * matrix_macs(chunk, hidden, inner)
    return total


def expert_macs(hidden: int, inner: int, experts: int, chosen: int, shared: int, chunk: int) -> int:
    """Router, then for each token its experts one by one, then the shared ones."""
    total = matrix_macs(chunk, hidden, experts)
    for _token in range(chunk):
        for _expert in range(chosen + shared):
            total += 3 * hidden * inner
    return total


def latent_attention_macs(
    hidden: int,
    heads: int,
    q_rank: int | None,
    kv_rank: int,
    nope: int,
    rope: int,
    value: int,
    chunk: int,
    prefix: int,
) -> int:
    """Latent attention, keys and values of every resident token made anew from its latent."""
    if q_rank is None:
        total = matrix_macs(chunk, hidden, heads * (nope + rope))
    else:
        total = matrix_macs(chunk, hidden, q_rank)
        total += matrix_macs(chunk, q_rank, heads * (nope + rope))
    total += matrix_macs(chunk, hidden, kv_rank + rope)
    for _token in range(prefix + chunk):
        total += kv_rank * heads * nope
        total += kv_rank * heads * value
    for _head in range(heads):
        total += pairs(chunk, prefix, None) * (nope + rope + value)
    total += matrix_macs(chunk, heads * value, hidden)
    return total
