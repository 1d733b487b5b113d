"""The times that TeraPipe's dynamic program needs: those of chunks that a best cut may have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["INTEGER_BITS", "cost_table"]

Cost = Callable[[int, int], Any]

INTEGER_BITS = 40


def cost_table(
    edges: NDArray[np.int64], stages: int, cost: Cost, max_chunks: int | None, prefix_tokens: int
) -> NDArray[np.int64]:
    """Times of chunks between two edges, as ``t[chunk_units - 1, prefix_units]``.

    Chunks that no best cut has take as long as all others together.
    """
    if getattr(cost, "monotone", False):
        start, end, values = _worth_asking(edges, stages, cost, max_chunks, prefix_tokens)
    else:
        start, end = np.triu_indices(len(edges), 1)
        values = _asked(cost, edges[end] - edges[start], prefix_tokens + edges[start])
    if not np.issubdtype(values.dtype, np.integer):
        values = np.rint(values * (2**INTEGER_BITS / (values.max() or 1.0)))
    units = len(edges) - 1
    table = np.full((units, units), int(values.max()) * units + 1, np.int64)
    table[end - start - 1, start] = values
    return table


def _worth_asking(
    edges: NDArray[np.int64], stages: int, cost: Cost, chunks: int | None, prefix_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.generic]]:
    """Start and end edge of chunks that a least makespan may have, and their times (chunk,).

    For a cost that never falls as the chunk or its prefix grows. A makespan is at least ``stages
    t`` of any of its chunks; and ``stages - 1`` times that plus what all tokens take at the least
    time of a token. So a chunk that exceeds the makespan of even chunks so is out, and with it all
    longer ones from the same edge: chunks are asked for by length, from edges still open.
    """
    units = len(edges) - 1
    even = np.linspace(0, units, min(chunks or units, units) + 1).round().astype(np.int64)
    times = _asked(cost, np.diff(edges[even]), prefix_tokens + edges[even[:-1]])
    bound = times.sum() + (stages - 1) * times.max()
    starts, ends = np.triu_indices(units + 1, 1)
    lengths = edges[ends] - edges[starts]
    token = _least_time_of_a_token(np.unique(lengths), cost, prefix_tokens, bound / stages)
    all_tokens = token * (edges[-1] - edges[0])
    by_length = np.argsort(lengths, kind="stable")
    changes = np.flatnonzero(np.diff(lengths[by_length])) + 1
    is_open = np.ones(units, np.bool_)
    kept, values = [], []
    for alike in np.split(by_length, changes):
        asked = alike[is_open[starts[alike]]]
        if asked.size > 0:
            found = _asked(cost, lengths[asked], prefix_tokens + edges[starts[asked]])
            least = np.maximum(stages * found, (stages - 1) * found + all_tokens)
            is_open[starts[asked[least > bound]]] = False
            kept.append(asked)
            values.append(found)
    pairs = np.concatenate(kept)
    return starts[pairs], ends[pairs], np.concatenate(values)


def _least_time_of_a_token(
    lengths: NDArray[np.int64], cost: Cost, prefix_tokens: int, most: float
) -> float:
    """What a token of any chunk takes at least, chunks that alone take over `most` left out.

    Between two lengths that are asked for a chunk takes as long as the shorter, per token of the
    longer.
    """
    steps = np.unique(np.geomspace(1, len(lengths), 8 * len(lengths).bit_length()).astype(np.int64))
    some = lengths[steps - 1]
    least = math.inf
    for length, longer in zip(
        some.tolist(), [*(some[1:] - 1).tolist(), int(some[-1])], strict=True
    ):
        time = float(_asked(cost, np.array([length]), np.array([prefix_tokens]))[0])
        if time > most:
            break
        least = min(least, time / longer)
    return 0.0 if math.isinf(least) else least


def _asked(
    cost: Cost, chunks: NDArray[np.int64], prefixes: NDArray[np.int64]
) -> NDArray[np.generic]:
    """Times of chunks after prefixes, in one call if the cost has a table."""
    if hasattr(cost, "table"):
        return np.asarray(cost.table(chunks, prefixes))
    pairs = zip(chunks.tolist(), prefixes.tolist(), strict=True)
    return np.array([cost(chunk, prefix) for chunk, prefix in pairs])
