"""The times that TeraPipe's dynamic program needs: those of chunks that a best cut may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["INTEGER_BITS", "Cost", "Known", "cost_table"]

Cost = Callable[[int, int], Any]

INTEGER_BITS = 40


class Known(NamedTuple):
    """A makespan that some cut on the edges has, and what all chunks of a better one take."""

    makespan: float
    all_chunks: float


def cost_table(
    edges: NDArray[np.int64], stages: int, cost: Cost, prefix_tokens: int, known: Known | None
) -> NDArray[np.int64]:
    """Times of chunks between two edges, as ``t[chunk_units - 1, prefix_units]``.

    Chunks that no best cut has take as long as all others together. ``known``: what a cost that
    never falls as the chunk or its prefix grows lets one leave out.
    """
    if known is not None:
        start, end, values = _worth_asking(edges, stages, cost, prefix_tokens, known)
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
    edges: NDArray[np.int64], stages: int, cost: Cost, prefix_tokens: int, known: Known
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
    """Start and end edge of chunks that a least makespan may have, and their times (chunk,).

    A makespan is at least ``stages t`` of any of its chunks; and ``stages - 1`` times that plus
    what all chunks take at least. So a chunk that exceeds a known makespan so is out, and with it
    all longer ones from the same edge: chunks are asked for by length, from edges still open.
    """
    starts, ends = np.triu_indices(len(edges), 1)
    lengths = edges[ends] - edges[starts]
    by_length = np.argsort(lengths, kind="stable")
    changes = np.flatnonzero(np.diff(lengths[by_length])) + 1
    is_open = np.ones(len(edges) - 1, np.bool_)
    kept, values = [], []
    for alike in np.split(by_length, changes):
        asked = alike[is_open[starts[alike]]]
        if asked.size > 0:
            found = _asked(cost, lengths[asked], prefix_tokens + edges[starts[asked]])
            least = np.maximum(stages * found, (stages - 1) * found + known.all_chunks)
            is_open[starts[asked[least > known.makespan]]] = False
            kept.append(asked)
            values.append(found)
    pairs = np.concatenate(kept)
    return starts[pairs], ends[pairs], np.concatenate(values)


def _asked(cost: Cost, chunks: NDArray[np.int64], prefixes: NDArray[np.int64]) -> NDArray[Any]:
    """Times of chunks after prefixes, in one call if the cost has a table."""
    if hasattr(cost, "table"):
        return np.asarray(cost.table(chunks, prefixes))
    pairs = zip(chunks.tolist(), prefixes.tolist(), strict=True)
    return np.array([cost(chunk, prefix) for chunk, prefix in pairs])
