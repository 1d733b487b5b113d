"""Cutting a prompt into chunks, for any cost ``t(chunk_tokens, prefix_tokens)``.

Sizes are in service order. A cost may be cycles or measured times, smooth, a hinge or a
staircase; it should not fall when the chunk or the prefix grows. Costs that are not integers are
rounded to 2**-40 of the largest one met, since all searches run on integers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

Cost = Callable[[int, int], Any]

GRID_UNITS = 128  # half of TeraPipe's own resolution, refined around what it finds
NEARBY = 5  # possible boundaries around each one found, when the grid is refined
INTEGER_BITS = 40
PROPORTIONAL = 2  # guesses at the end of a chunk by the rule of three


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
    ends = _solve(edges, stages, cost, max_chunks, prefix_tokens)
    while step is None and width > page_tokens and NEARBY * len(ends) <= GRID_UNITS:
        width = -(-width // (2 * page_tokens)) * page_tokens
        nearby = ends[:, None] + width * np.arange(-(NEARBY // 2), NEARBY // 2 + 1)
        edges = np.unique(np.clip(nearby, 0, tokens))
        ends = _solve(edges, stages, cost, max_chunks, prefix_tokens)
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

    starts = [even]
    slowest = max(times(even, time, prefix_tokens))
    units = _least_maximum(len(edges) - 1, chunks, slowest, span)
    if units is not None:
        starts.insert(0, [edges[b] - edges[a] for a, b in pairwise(units)])
    candidates = [_move_pages(sizes, page, time, prefix_tokens) for sizes in starts]
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


def _solve(
    edges: NDArray[np.int64], stages: int, cost: Cost, max_chunks: int | None, prefix_tokens: int
) -> NDArray[np.int64]:
    """Boundaries out of `edges` that TeraPipe's dynamic program picks, both ends included."""
    from wafer_kernels import partition as kernel

    if getattr(cost, "monotone", False):
        start, end, values = _worth_asking(edges, stages, cost, max_chunks, prefix_tokens)
    else:
        start, end = np.triu_indices(len(edges), 1)
        values = _asked(cost, edges[end] - edges[start], prefix_tokens + edges[start])
    table = _table(len(edges) - 1, start, end, values)
    return edges[np.cumsum([0, *kernel.terapipe(table, stages, max_chunks or 0)])]


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


def _table(
    units: int, start: NDArray[np.int64], end: NDArray[np.int64], values: NDArray[np.generic]
) -> NDArray[np.int64]:
    """Times of chunks between two edges, as ``t[chunk_units - 1, prefix_units]``.

    Chunks without a value take as long as all others together.
    """
    if not np.issubdtype(values.dtype, np.integer):
        values = np.rint(values * (2**INTEGER_BITS / (values.max() or 1.0)))
    table = np.full((units, units), int(values.max()) * units + 1, np.int64)
    table[end - start - 1, start] = values
    return table


def _least_maximum(
    units: int, chunks: int, slowest: int, span: Callable[[int, int], int]
) -> list[int] | None:
    """Boundaries of least maximum time that the greedy cut finds, None if over `slowest`."""
    usual = [units // chunks] * chunks  # lengths that the last bound gave: the next are near

    def latest(bound: int) -> tuple[list[int], int]:
        """Latest boundaries within `bound`, and the next time that would let one be later."""
        ends, following = [0], 2 * slowest + 1
        for i in range(chunks):
            start, last = ends[-1], units - (chunks - 1 - i)
            end = _last_within(start, last, start + usual[i], partial(span, start), bound)
            if end < last:
                following = min(following, span(start, end + 1))
            if end == start:
                break
            usual[i] = end - start
            ends.append(end)
        return ends, following

    # The bounds are times that occur. They are found by false position on the units that a bound
    # leaves over or has to spare, every third by halving.
    low, high, guess, tries = 0, slowest, slowest * 3 // 4, 0
    short, spare, best = float(units), 1.0, None
    while low <= high:
        tries += 1
        bound = min(max(guess, low), high) if tries % 3 else (low + high) // 2
        ends, following = latest(bound)
        if ends[-1] == units and len(ends) == chunks + 1:
            spans = [span(*chunk) for chunk in pairwise(ends)]
            best, high = ends, max(spans) - 1
            spare = max(1.0, units * (1 - sum(spans) / (chunks * max(1, bound))))
        else:
            low, short = following, float(units - ends[-1])
        guess = low + int((high - low) * short / (short + spare))
    return None if best is None else _middle(best, high + 1, span)


def _last_within(start: int, last: int, guess: int, time: Callable[[int], int], bound: int) -> int:
    """Last place after `start` and up to `last` with a time within a bound; `start` if none is.

    All places up to it are within. It is looked for from `guess` on: as if times rose in
    proportion, then around what that gives in steps that double, last by halving.
    """
    low, high, at, step, asked = start, last + 1, guess, 1, 0
    rises = False
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        value = time(at)
        within = value <= bound
        low, high = (at, high) if within else (low, at)
        if asked < PROPORTIONAL:
            at = start + (at - start) * bound // max(1, value)
        elif asked == PROPORTIONAL or (step and within == rises):
            rises = within
            at += step if rises else -step
            step *= 2
        else:
            step = 0
            at = (low + high) // 2
        asked += 1
    return low


def _middle(latest: list[int], bound: int, span: Callable[[int, int], int]) -> list[int]:
    """Boundaries midway between the latest and the earliest ones within `bound`, if they are."""

    def earliest(first: int, end: int) -> int:
        """Earliest start from `first` on of a chunk up to `end`; `end` if there is none."""
        starts = range(first, end)
        return first + bisect_left(starts, True, key=lambda start: span(start, end) <= bound)

    end = latest[-1]
    middle = [end]
    for i in range(len(latest) - 2, 0, -1):
        start = earliest(i, end)
        if start == end:
            return latest
        middle.append((start + latest[i]) // 2)
        end = start
    middle = [0, *reversed(middle)]
    if all(a < b and span(a, b) <= bound for a, b in pairwise(middle)):
        return middle
    return latest


def _move_pages(
    sizes: list[int], page: int, time: Callable[[int, int], int], prefix_tokens: int
) -> list[int]:
    """Move single pages between chunks for as long as that lowers the maximum."""
    from wafer_kernels import partition as kernel

    sizes = list(sizes)
    total = prefix_tokens + sum(sizes)

    def shifted(chunk: int, prefix: int) -> NDArray[np.int64]:
        shifted_times, start = [], prefix_tokens
        for size in sizes:
            possible = (
                (chunk >= 0 or 2 * (size + chunk) >= page)
                and start + prefix >= prefix_tokens
                and start + prefix + size + chunk <= total
            )
            shifted_times.append(
                time(size + chunk, start + prefix) if possible else kernel.UNREACHABLE
            )
            start += size
        return np.array(shifted_times, np.int64)

    while True:
        giver, taker, _ = kernel.best_page_move(
            kernel.PageMoves(
                kept=shifted(0, 0),
                shrunk=shifted(-page, 0),
                grown=shifted(page, 0),
                earlier=shifted(0, -page),
                later=shifted(0, page),
                grown_earlier=shifted(page, -page),
                shrunk_later=shifted(-page, page),
            )
        )
        if giver < 0:
            return sizes
        sizes[giver] -= page
        sizes[taker] += page
