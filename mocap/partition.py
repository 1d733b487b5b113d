"""Cutting a prompt into chunks, for any cost ``t(chunk_tokens, prefix_tokens)``.

Sizes are in service order. A cost may be cycles or measured times, smooth, a hinge or a
staircase; it should not fall when the chunk or the prefix grows. Costs that are not integers are
rounded to 2**-40 of the largest one met, since all searches run on integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mocap.cost_table import INTEGER_BITS, Cost, Known, cost_table
from mocap.equal_chunks import least_maximum, move_pages
from mocap.least_time import LeastTime
from mocap.serving import atom, seq1f1b, sglang, vllm_ascend
from wafer_kernels.errors import UsageError

__all__ = [
    "Cost",
    "atom",
    "equal_time",
    "fixed",
    "lbcp",
    "makespan",
    "seq1f1b",
    "sglang",
    "terapipe",
    "times",
    "uniform",
    "vllm_ascend",
]

GRID_UNITS = 128  # half of TeraPipe's own resolution, refined around what it finds
NEARBY = 5  # possible boundaries around each one found, when the grid is refined


def times(sizes: Sequence[int], cost: Cost, prefix_tokens: int = 0) -> list[Any]:
    """Time of each chunk (chunk,), in the cost's own unit."""
    prefixes = accumulate(sizes, initial=prefix_tokens)
    return [cost(size, prefix) for size, prefix in zip(sizes, prefixes, strict=False)]


def makespan(sizes: Sequence[int], cost: Cost, stages: int, prefix_tokens: int = 0) -> Any:
    """Time of an in-order pipeline of equal stages: ``sum t + (stages - 1) max t``."""
    chunk_times = times(sizes, cost, prefix_tokens)
    return sum(chunk_times) + (stages - 1) * max(chunk_times)


def fixed(tokens: int, chunk_tokens: int) -> list[int]:
    """Chunks of `chunk_tokens`, the last one what is left."""
    _positive(tokens=tokens, chunk_tokens=chunk_tokens)
    full, rest = divmod(tokens, chunk_tokens)
    return [chunk_tokens] * full + [rest] * (rest > 0)


def uniform(tokens: int, chunks: int, page_tokens: int = 1) -> list[int]:
    """Exactly `chunks` equal chunks of whole pages, one of them with the last, ragged page.

    Pages are dealt to the chunks in turn, so that one token more lengthens one chunk and shortens
    none: a longer prompt is never faster. Where there are fewer pages than chunks, single tokens
    are dealt; where there are fewer tokens than chunks, there are fewer chunks.

    Raises
    ------
    UsageError
        If a count is not positive.
    """
    _positive(tokens=tokens, chunks=chunks, page_tokens=page_tokens)
    chunks = min(chunks, tokens)
    page = _page(tokens, chunks, page_tokens)
    pages, rest = divmod(tokens, page)
    share, extra = divmod(pages, chunks)
    sizes = [(share + (i < extra)) * page for i in range(chunks)]
    sizes[extra] += rest
    return sizes


def terapipe(
    tokens: int,
    stages: int,
    cost: Cost,
    step: int | None = None,
    max_chunks: int | None = None,
    prefix_tokens: int = 0,
    page_tokens: int = 1,
) -> list[int]:
    """Chunks of least ``sum t + (stages - 1) max t`` on a grid, exactly.

    Parameters
    ----------
    tokens
        Tokens to cut.
    stages
        Pipeline stages.
    cost
        Time of a chunk on (chunk tokens, prefix tokens). All feasible pairs of the grid are
        asked for: in one call ``cost.table(chunks, prefixes)`` if the cost has it.
    step
        Distance of possible boundaries [tokens]; the last unit is shorter if need be. None lays
        at most 128 steps, then solves again with steps halved around the boundaries found, down
        to a page: never worse than the first solution, but no longer exact.
    max_chunks
        Most chunks; None for no bound.
    prefix_tokens
        Tokens before the first chunk.
    page_tokens
        What the halved steps are multiples of.

    Raises
    ------
    UsageError
        If a count is not positive.

    Source: Li et al., TeraPipe, arXiv 2102.07988.
    """
    _positive(tokens=tokens, stages=stages, page_tokens=page_tokens)
    for name, value in (("step", step), ("max_chunks", max_chunks)):
        if value is not None:
            _positive(**{name: value})
    width = step or -(-tokens // (GRID_UNITS * page_tokens)) * page_tokens
    edges = np.array([*range(0, tokens, width), tokens])
    units = len(edges) - 1
    least = (
        LeastTime(cost, tokens, prefix_tokens, stages) if getattr(cost, "monotone", False) else None
    )

    def solve(edges: NDArray[np.int64], known_ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Boundaries that the dynamic program picks, both ends included."""
        from wafer_kernels import partition as kernel

        known: Known | None = None
        if least is not None:
            bound = float(makespan(np.diff(known_ends).tolist(), cost, stages, prefix_tokens))
            known = Known(bound, least.of_all(bound))
        table = cost_table(edges, stages, cost, prefix_tokens, known)
        return edges[np.cumsum([0, *kernel.terapipe(table, stages, max_chunks or 0)])]

    even = np.linspace(0, units, min(max_chunks or units, units) + 1).round().astype(np.int64)
    ends = solve(edges, edges[even])
    while step is None and width > page_tokens and NEARBY * len(ends) <= GRID_UNITS:
        width = -(-width // (2 * page_tokens)) * page_tokens
        nearby = ends[:, None] + width * np.arange(-(NEARBY // 2), NEARBY // 2 + 1)
        ends = solve(np.unique(np.clip(nearby, 0, tokens)), ends)
    return [int(size) for size in np.diff(ends)]


def lbcp(
    tokens: int,
    chunks: int,
    cost: Cost,
    page_tokens: int = 1,
    prefix_tokens: int = 0,
    stages: int | None = None,
) -> list[int]:
    """Exactly `chunks` chunks of equal time: least maximum by bisection, then by page moves.

    For a bound T the greedy cut takes the longest chunk with ``t <= T`` each time; T is bisected
    over the times that occur. Between the earliest and the latest boundaries that keep to the
    least T, the middle ones are taken. A search then moves single pages between any two
    chunks while that lowers the maximum, for costs whose steps mislead the greedy cut. Uniform
    cuts are evaluated as well, and kept where they are better.

    Parameters
    ----------
    tokens
        Tokens to cut.
    chunks
        Chunks wanted; fewer only if there are fewer tokens.
    cost
        Time of a chunk on (chunk tokens, prefix tokens).
    page_tokens
        Sizes are multiples of this, but for the last one, which also takes the remainder: alone
        if this is half a page or more, else on top. Single tokens where pages do not suffice.
    prefix_tokens
        Tokens before the first chunk.
    stages
        If given, "better" is the makespan over so many stages; else the maximum, then the sum.

    Raises
    ------
    UsageError
        If a count is not positive.

    Notes
    -----
    LBCP is named in MOCAP, arXiv 2606.22968; the algorithm here is reconstructed.
    """
    even = uniform(tokens, chunks, page_tokens)
    chunks = len(even)
    time = _integers(cost, max(times(even, cost, prefix_tokens)))
    page = _page(tokens, chunks, page_tokens)
    edges = [unit * page for unit in range(max(chunks, (2 * tokens + page) // (2 * page)))]
    edges.append(tokens)

    def span(start: int, end: int) -> int:
        return time(edges[end] - edges[start], prefix_tokens + edges[start])

    even_times = times(even, time, prefix_tokens)
    units = least_maximum(len(edges) - 1, chunks, even_times, span)
    sizes = even if units is None else [edges[b] - edges[a] for a, b in pairwise(units)]
    candidates = [move_pages(sizes, page, time, prefix_tokens)]
    if stages is not None:
        candidates.append(even)

    def worth(sizes: list[int]) -> tuple[int, int]:
        chunk_times = times(sizes, time, prefix_tokens)
        total, maximum = sum(chunk_times), max(chunk_times)
        return (maximum, total) if stages is None else (total + (stages - 1) * maximum, maximum)

    return min(candidates, key=worth)


def equal_time(tokens: float, chunks: int, cost: Callable[[float, float], float]) -> list[float]:
    """Real-valued sizes of `chunks` chunks of equal time, for a continuous rising cost [tokens]."""

    def longest(bound: float, prefix: float) -> float:
        low, high = 0.0, tokens
        for _ in range(64):
            middle = (low + high) / 2
            low, high = (middle, high) if cost(middle, prefix) <= bound else (low, middle)
        return low

    def fill(bound: float) -> list[float]:
        sizes: list[float] = []
        for _ in range(chunks):
            sizes.append(longest(bound, math.fsum(sizes)))
        return sizes

    low, high = 0.0, cost(tokens, 0.0)
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if math.fsum(fill(middle)) >= tokens else (middle, high)
    return fill(high)


def _positive(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UsageError(f"{name} must be a positive integer, not {value}")


def _page(tokens: int, chunks: int, page_tokens: int) -> int:
    """The page, or a single token where there are fewer pages than chunks."""
    return page_tokens if tokens >= chunks * page_tokens else 1


def _integers(cost: Cost, largest: Any) -> Callable[[int, int], int]:
    """The cost, remembered, as integers; `largest` tells its type and scale."""
    exact = isinstance(largest, Integral)
    scale = 1.0 if exact else 2**INTEGER_BITS / (largest or 1.0)

    @cache
    def time(chunk: int, prefix: int) -> int:
        value = cost(chunk, prefix)
        return int(value) if exact else round(float(value) * scale)

    return time
