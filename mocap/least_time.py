"""What all chunks of a prompt take at least together, for a cost that rises with chunk and prefix.

A chunk of c tokens that starts after p tokens takes ``t(c, p) / c`` a token, no less than the least
such rate of any length after p or fewer tokens. Proof in docs/method.md, "TeraPipe".
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from mocap.cost_table import Cost

__all__ = ["EXACT", "LeastTime"]

MARKS = 16  # prefixes, at most, at which rates are worked out: fewer make the sum lower
FEW_STAGES = 4  # up to which that pays; with more, ``t <= bound / stages`` says nearly as much
LADDER = 1.05  # ratio of neighbouring lengths that are asked for: wider makes the sum lower
ROUNDS = 4  # of what all chunks take and how long one may be, each from the other
EXACT = 1 - 1e-9  # floats are rounded down by this
NEWS = 0.98  # of the last bound, above which a lower one is no reason to sum anew


@dataclass
class LeastTime:
    """Least sum of the times of chunks of ``tokens`` after ``prefix_tokens``, whatever the cut.

    For cuts whose makespan over ``stages`` is within a bound.
    """

    cost: Cost
    tokens: int
    prefix_tokens: int
    stages: int
    _rates: dict[int, float] = field(default_factory=dict)
    _known: tuple[float, float] = math.inf, 0.0  # the last bound, and the sum for it

    def of_all(self, bound: float) -> float:
        """Sum of all chunk times, at least, of a cut whose makespan is within a bound.

        Its chunks take ``t <= bound / stages``, and ``(stages - 1) t`` beside the sum itself. What
        is asked for later has a lower bound.
        """
        if bound < NEWS * self._known[0]:
            self._known = bound, self._within(bound)
        return self._known[1]

    def _within(self, bound: float) -> float:
        most, total = bound / self.stages, 0.0
        for _ in range(ROUNDS):
            total = self._sum(most)
            if self.stages == 1 or (bound - total) / (self.stages - 1) >= most:
                break
            most = (bound - total) / (self.stages - 1)
        return EXACT * total

    @cached_property
    def _marks(self) -> list[int]:
        """Tokens in front of which a chunk may start, besides the prefix."""
        count = max(1, MARKS * FEW_STAGES**2 // max(FEW_STAGES, self.stages) ** 2)
        return sorted({self.tokens * mark // count for mark in range(count)})

    @cached_property
    def _ladder(self) -> list[int]:
        """First lengths of the steps between which lengths are not told apart, and their end."""
        lengths = [1]
        while lengths[-1] <= self.tokens:
            lengths.append(max(lengths[-1] + 1, int(lengths[-1] * LADDER)))
        return [*lengths[:-1], self.tokens + 1]

    def _sum(self, most: float) -> float:
        """Tokens at the rate of the first mark that a chunk within ``most`` can hold them from."""
        total, begin = 0.0, 0
        for mark, following in pairwise([*self._marks, self.tokens]):
            steps = self._steps(mark, most)
            end = min(self.tokens, following - 1 + self._ladder[steps] - 1)
            if end > begin:
                total += (end - begin) * self._rate(mark, steps)
                begin = end
        return total

    def _steps(self, mark: int, most: float) -> int:
        """Steps of the ladder whose first length is within a time after a mark; one at least."""
        within = range(1, len(self._ladder) - 1)
        return 1 + bisect_right(within, False, key=lambda step: self._time(step, mark) > most)

    def _time(self, step: int, mark: int) -> Any:
        return self.cost(self._ladder[step], self.prefix_tokens + mark)

    def _rate(self, mark: int, steps: int) -> float:
        """Least time of a token of a chunk within so many steps that starts after a mark.

        Between two lengths a chunk takes no less than the shorter, and its tokens no less than as a
        part of the longer. The steps with the least such bound are halved down to single ones.
        """
        if mark not in self._rates:  # steps only get fewer later: the rate holds

            def bounded(first: int, end: int) -> tuple[float, int, int]:
                return float(self._time(first, mark)) / (self._ladder[end] - 1), first, end

            spans = [bounded(0, steps)]
            while spans[0][2] - spans[0][1] > 1:
                _, first, end = heapq.heappop(spans)
                middle = (first + end) // 2
                heapq.heappush(spans, bounded(first, middle))
                heapq.heappush(spans, bounded(middle, end))
            self._rates[mark] = spans[0][0]
        return self._rates[mark]
