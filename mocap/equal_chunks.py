"""Cuts of least maximum time: by bisection over the times that occur, then by page moves."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["least_maximum", "move_pages"]

PROPORTIONAL = 2  # guesses at the end of a chunk by the rule of three
SECANTS = 8  # bounds by false position before every third one is halfway


def least_maximum(
    units: int, chunks: int, even: list[int], span: Callable[[int, int], int]
) -> list[int] | None:
    """Boundaries of least maximum time that the greedy cut finds; None if over all of `even`.

    For a bound the greedy cut takes the longest chunk within it each time. Bounds are times that
    occur, found by false position (Illinois) on the units that a bound leaves over or has to spare.

    Parameters
    ----------
    units, chunks
        What is cut, and into how many.
    even
        Times of even chunks.
    span
        Time from one boundary to another.
    """
    low, high, guess, tries = 0, max(even), sum(even) // len(even), 0
    short, spare, best = float(units), 1.0, None
    usual: list[int] = []  # lengths that the last bound gave: the next are near
    held: bool | None = None
    while low <= high:
        tries += 1
        halving = tries > SECANTS and tries % 3 == 0
        bound = (low + high) // 2 if halving else min(max(guess, low), high)
        ends, following = _latest(units, chunks, bound, span, usual)
        holds = ends[-1] == units and len(ends) == chunks + 1
        stale = held is holds  # the other side has not moved: it counts half
        if holds:
            best, high = ends, max(span(*chunk) for chunk in pairwise(ends)) - 1
            spare, short = max(1.0, _spare(ends)), short / 2 if stale else short
        else:
            low, short, spare = following, float(units - ends[-1]), spare / 2 if stale else spare
        held = holds
        guess = low + int((high - low) * short / (short + spare))
    return None if best is None else _middle(best, high + 1, span)


def _latest(
    units: int, chunks: int, bound: int, span: Callable[[int, int], int], usual: list[int]
) -> tuple[list[int], int]:
    """Latest boundaries within `bound`, and the next time that would let one be later.

    Each chunk leaves a unit to every one after it. ``usual`` lengths are started from, and kept.
    """
    ends, following = [0], sys.maxsize
    for i in range(chunks):
        start, last = ends[-1], units - (chunks - 1 - i)
        guess = usual[i] if i < len(usual) else usual[-1] if usual else units // chunks
        end = _last_within(start, last, start + guess, partial(span, start), bound)
        if end < last:
            following = min(following, span(start, end + 1))
        if end == start:
            break
        usual[i : i + 1] = [end - start]
        ends.append(end)
    return ends, following


def _spare(ends: list[int]) -> int:
    """Units that a bound could cut besides: chunks that only units to be left kept short."""
    units, chunks = ends[-1], len(ends) - 1
    lengths = [end - start for start, end in pairwise(ends)]
    full = [n for i, n in enumerate(lengths) if ends[i + 1] < units - (chunks - 1 - i)]
    longest = full[-1] if full else units // chunks
    return sum(longest - n for n in lengths[len(full) :])


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


def move_pages(
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
