"""Searches over chunk boundaries, on int64 cycles; tokens are counted in units of a grid.

``table[c - 1, p]`` is the time of a chunk of `c` units after a prefix of `p` units; only entries
with ``c + p <= units`` are read. No shape of the cost is assumed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wafer_kernels._jit import kernel

__all__ = ["UNREACHABLE", "PageMoves", "best_page_move", "terapipe"]

UNREACHABLE = 2**62


class PageMoves(NamedTuple):
    """Times of the chunks of one cut, and of their neighbours in a page's distance (chunk,).

    Attributes
    ----------
    kept
        As they are [cycles].
    shrunk, grown
        A page less or more at its end.
    earlier, later
        As long as now, but after a page less or more of prefix.
    grown_earlier
        A page more, after a page less of prefix.
    shrunk_later
        A page less, after a page more of prefix.
    """

    kept: NDArray[np.int64]
    shrunk: NDArray[np.int64]
    grown: NDArray[np.int64]
    earlier: NDArray[np.int64]
    later: NDArray[np.int64]
    grown_earlier: NDArray[np.int64]
    shrunk_later: NDArray[np.int64]


@kernel()
def best_page_move(times: PageMoves) -> tuple[int, int, int]:
    """Find the page move between two chunks after which the slowest chunk is fastest.

    Returns
    -------
    giver, taker, maximum
        Chunk indices, and the time of the slowest chunk after the move [cycles]. Both indices
        are -1 if no move is better than none.
    """
    chunks = times.kept.size
    before = np.zeros(chunks + 1, np.int64)  # slowest of the chunks before i
    after = np.zeros(chunks + 1, np.int64)  # slowest of the chunks from i on
    for i in range(chunks):
        before[i + 1] = max(before[i], times.kept[i])
        after[chunks - 1 - i] = max(after[chunks - i], times.kept[chunks - 1 - i])
    giver, taker, best = -1, -1, before[chunks]
    for first in range(chunks):
        forward = max(before[first], times.shrunk[first])
        backward = max(before[first], times.grown[first])
        for last in range(first + 1, chunks):
            given = max(forward, times.grown_earlier[last], after[last + 1])
            if given < best:
                giver, taker, best = first, last, given
            taken = max(backward, times.shrunk_later[last], after[last + 1])
            if taken < best:
                giver, taker, best = last, first, taken
            forward = max(forward, times.earlier[last])
            backward = max(backward, times.later[last])
    return giver, taker, best


@kernel()
def _shorten(table: NDArray[np.int64], bound: int, reach: NDArray[np.int64]) -> None:
    """Lower ``reach[p]`` to the longest chunk after `p` that takes no longer than `bound`."""
    for prefix in range(reach.size):
        while reach[prefix] > 0 and table[reach[prefix] - 1, prefix] > bound:
            reach[prefix] -= 1


@kernel()
def _fewest(
    table: NDArray[np.int64], bound: int, reach: NDArray[np.int64], fewest: NDArray[np.int64]
) -> None:
    """Fill the fewest chunks from each boundary to the end (unit,), no chunk over `bound`."""
    units = reach.size
    fewest[units] = 0
    for prefix in range(units - 1, -1, -1):
        fewest[prefix] = UNREACHABLE
        for chunk in range(reach[prefix], 0, -1):
            if table[chunk - 1, prefix] <= bound:
                fewest[prefix] = min(fewest[prefix], fewest[prefix + chunk] + 1)


@kernel()
def _cheapest(
    table: NDArray[np.int64],
    bound: int,
    reach: NDArray[np.int64],
    fewest: NDArray[np.int64],
    sums: NDArray[np.int64],
    peaks: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> int:
    """Fill the least (sum, maximum) of chunk times up to each boundary, no chunk over `bound`.

    Row `m` of the work arrays (row, unit), modified in place, is for exactly `m` chunks; a single
    row is for any number. Returns the row of the best complete cut, -1 if there is none.
    """
    rows, units = sums.shape[0], sums.shape[1] - 1
    step = 1 if rows > 1 else 0
    most = rows - 1 if rows > 1 else units
    sums[:] = UNREACHABLE
    sums[0, 0] = 0
    peaks[0, 0] = 0
    for row in range(max(1, rows - 1)):
        target = row + step
        for prefix in range(units):
            so_far, peak = sums[row, prefix], peaks[row, prefix]
            if so_far == UNREACHABLE or row + fewest[prefix] > most:
                continue
            for chunk in range(1, reach[prefix] + 1):
                time = table[chunk - 1, prefix]
                if time > bound:
                    continue
                total, end = so_far + time, prefix + chunk
                if total < sums[target, end]:
                    sums[target, end] = total
                    peaks[target, end] = max(peak, time)
                    lengths[target, end] = chunk
                elif total == sums[target, end] and max(peak, time) < peaks[target, end]:
                    peaks[target, end] = max(peak, time)
                    lengths[target, end] = chunk
    best = -1
    for row in range(rows):
        if sums[row, units] < UNREACHABLE and (
            best < 0
            or sums[row, units] < sums[best, units]
            or (sums[row, units] == sums[best, units] and peaks[row, units] < peaks[best, units])
        ):
            best = row
    return best


@kernel()
def _path(lengths: NDArray[np.int64], row: int) -> NDArray[np.int64]:
    """Chunk lengths of the cut that ends in `row`."""
    step = 1 if lengths.shape[0] > 1 else 0
    end = lengths.shape[1] - 1
    backwards = np.empty(end, np.int64)
    count = 0
    while end > 0:
        backwards[count] = lengths[row, end]
        end -= lengths[row, end]
        row -= step
        count += 1
    return backwards[:count][::-1].copy()


@kernel()
def terapipe(table: NDArray[np.int64], stages: int, max_chunks: int) -> NDArray[np.int64]:
    """Chunk lengths of least ``sum t + (stages - 1) max t`` [units].

    For a bound T on chunk times, the dynamic program gives the least sum S(T) and the maximum m
    on its path. A lower bound T' < m can only win where ``S(T) + (stages - 1) T'`` is below the
    best so far, since S falls in T; so T descends to the larger of those values, not through all
    distinct times. The result is exact.

    Parameters
    ----------
    table
        Times (unit, unit), non-negative and below 2**50 [cycles].
    stages
        Pipeline stages.
    max_chunks
        Most chunks; 0 for no bound.

    Source: Li et al., TeraPipe, arXiv 2102.07988, section 3.3.
    """
    units = table.shape[0]
    rows = min(max_chunks, units) + 1 if max_chunks > 0 else 1
    sums = np.empty((rows, units + 1), np.int64)
    peaks = np.zeros((rows, units + 1), np.int64)
    lengths = np.zeros((rows, units + 1), np.int64)
    reach = np.arange(units, 0, -1)
    fewest = np.empty(units + 1, np.int64)
    bound = UNREACHABLE
    best = UNREACHABLE
    chunks = np.empty(0, np.int64)
    while bound >= 0:
        _shorten(table, bound, reach)
        _fewest(table, bound, reach, fewest)
        row = _cheapest(table, bound, reach, fewest, sums, peaks, lengths)
        if row < 0:
            break
        total, peak = sums[row, units], peaks[row, units]
        if total + (stages - 1) * peak < best:
            best = total + (stages - 1) * peak
            chunks = _path(lengths, row)
        if stages == 1:
            break
        bound = min(peak - 1, (best - total - 1) // (stages - 1))
    return chunks
