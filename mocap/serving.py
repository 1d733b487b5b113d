"""Chunk rules of serving systems and training frameworks, and the cost models that they fit.

Each rule picks the next chunk from a fitted model of its time; none of them searches. Models are
fitted on samples of any cost ``t(chunk_tokens, prefix_tokens)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wafer_kernels.errors import UsageError

__all__ = [
    "ChunkModel",
    "Quadratic",
    "atom",
    "fit_chunk_model",
    "fit_quadratic",
    "profile_sizes",
    "seq1f1b",
    "sglang",
    "vllm_ascend",
]

Cost = Callable[[int, int], Any]

LEAST_ALIGNMENT = 64  # tokens, in SGLang and in vLLM-Ascend
HISTORY_SAMPLES = (5, 30)  # chunks from which, and up to which, vLLM-Ascend fits again


class Quadratic(NamedTuple):
    """Time of a whole prefill of `l` tokens: ``f(l) = square l^2 + linear l + constant``."""

    square: float
    linear: float
    constant: float

    def __call__(self, tokens: float) -> float:
        """Time of `tokens` tokens from scratch."""
        return (self.square * tokens + self.linear) * tokens + self.constant


class ChunkModel(NamedTuple):
    """Time of `x` tokens after `P`: ``square (2 P x + x^2) + linear x + prefix P + constant``."""

    square: float
    linear: float
    prefix: float
    constant: float

    def __call__(self, tokens: float, prefix: float) -> float:
        """Time of a chunk of `tokens` tokens after `prefix`."""
        growth = self.square * (2 * prefix + tokens) * tokens
        return growth + self.linear * tokens + self.prefix * prefix + self.constant


def profile_sizes(base_tokens: int, samples: int) -> list[int]:
    """Prefill sizes that are profiled: from 1.25 base downwards in equal steps [tokens].

    SGLang takes 128 and drops the first, a warm-up; vLLM-Ascend takes 64. Steps are at least one
    token, so that small bases give fewer sizes.
    """
    most = base_tokens * 5 // 4
    step = max(1, most // samples)
    return [most - i * step for i in range(samples) if most - i * step > 0]


def fit_quadratic(cost: Cost, sizes: Sequence[int]) -> Quadratic:
    """Least squares of the time of whole prefills."""
    lengths = np.array(sizes, np.float64)
    basis = np.stack([lengths**2, lengths, np.ones_like(lengths)], axis=1)
    return Quadratic(*_least_squares(basis, [cost(size, 0) for size in sizes]))


def fit_chunk_model(cost: Cost, samples: Sequence[tuple[int, int]]) -> ChunkModel:
    """Least squares of the time of chunks, given as (chunk tokens, prefix tokens)."""
    chunk, prefix = np.array(samples, np.float64).T
    basis = np.stack([2 * prefix * chunk + chunk**2, chunk, prefix, np.ones_like(chunk)], axis=1)
    return ChunkModel(*_least_squares(basis, [cost(*sample) for sample in samples]))


def sglang(
    tokens: int,
    base_tokens: int,
    model: Quadratic,
    page_tokens: int = 1,
    smooth: float = 0.75,
    prefix_tokens: int = 0,
) -> list[int]:
    """SGLang's dynamic chunks: x such that ``f(P + x) - f(P) = f(base) - f(0)``.

    The solution is smoothed to ``base + smooth (x - base)``, kept above base / 4 and rounded down
    to a multiple of the page, at least 64 tokens. A falling linear term is taken as none; without
    a rising square term, chunks stay at the base, as when SGLang's profile fails.

    Source: sgl-project/sglang, scheduler_pp_mixin.py, ChunkSizePredictor.
    """
    square, linear = model.square, max(0.0, model.linear)
    if square <= 0:
        return _cut(tokens, prefix_tokens, lambda _: base_tokens)
    target = Quadratic(square, linear, 0.0)(base_tokens)
    align = max(page_tokens, LEAST_ALIGNMENT)

    def following(prefix: int) -> int:
        solution = _root(square, 2 * square * prefix + linear, -target)
        size = max(int(base_tokens + smooth * (solution - base_tokens)), base_tokens // 4)
        return max(align, size // align * align)

    return _cut(tokens, prefix_tokens, following)


def vllm_ascend(
    tokens: int,
    base_tokens: int,
    model: Quadratic,
    cost: Cost,
    page_tokens: int = 1,
    smooth: float = 0.8,
    least_tokens: int = 4096,
    prefix_tokens: int = 0,
) -> list[int]:
    """vLLM-Ascend's chunks: SGLang's equation first, then a model fitted on the chunks served.

    After five chunks of the request, ``f(x, P) = a x (P + x) + b (P + x) + c`` is fitted on the
    chunks so far, the first thirty at most, and solved for the time of the base chunk. Sizes are
    smoothed, kept above `least_tokens` and rounded up to a multiple of the page, at least 64.

    Source: vllm-project/vllm-ascend, profiling_chunk_predictor.py.
    """
    square, linear = max(model.square, 1e-9), model.linear
    align = max(page_tokens, LEAST_ALIGNMENT)
    least, most = HISTORY_SAMPLES
    served: list[tuple[int, int]] = []

    def following(prefix: int) -> int:
        if len(served) < least:
            target = Quadratic(square, linear, 0.0)(base_tokens)
            solution = _root(square, 2 * square * prefix + linear, -target)
        else:
            a, b, c = _fit_history(cost, served[:most])
            solution = _root(a, a * prefix + b, b * prefix + c - cost(base_tokens, 0))
        size = base_tokens
        if solution > 0:
            size = max(int(base_tokens + smooth * (solution - base_tokens)), least_tokens)
        size = -(-size // align) * align
        served.append((min(size, prefix_tokens + tokens - prefix), prefix))
        return size

    return _cut(tokens, prefix_tokens, following)


def atom(
    tokens: int, base_tokens: int, model: ChunkModel, page_tokens: int = 1, prefix_tokens: int = 0
) -> list[int]:
    """ROCm ATOM's dynamic chunks: every chunk takes the modelled time of the base chunk.

    Solves ``a x^2 + (b + 2 a P) x + c + gamma P - T = 0``, which keeps the fixed cost c and the
    cost gamma P of going through the prefix; kept above base / 4 and rounded down to whole pages.

    Source: ROCm/ATOM, dynamic chunking guide (the model); the equal-time rule is derived from it,
    the floor is SGLang's.
    """
    target = model(base_tokens, 0)

    def following(prefix: int) -> int:
        rest = model.constant + model.prefix * prefix - target
        solution = _root(model.square, model.linear + 2 * model.square * prefix, rest)
        size = max(int(solution + 1e-9), base_tokens // 4)
        return max(page_tokens, size // page_tokens * page_tokens)

    return _cut(tokens, prefix_tokens, following)


def seq1f1b(tokens: int, chunks: int, linear: float, causal: float, multiple: int = 1) -> list[int]:
    """Seq1F1B's chunks of equal work: ``F(s, E) = linear s + causal (s E - s^2 / 2)``.

    F is the work of a segment of `s` tokens that ends at position E. From the end backwards each
    segment gets a share of 1 / chunks, rounded down to `multiple`; the first one takes the rest.

    Raises
    ------
    UsageError
        If a count is not positive, or there are fewer tokens than chunks.

    Source: MayDomine/Seq1F1B, split_solver.py.
    """
    if not 1 <= chunks <= tokens:
        raise UsageError(f"{tokens} tokens make no {chunks} chunks")
    share = (linear * tokens + causal * tokens * tokens / 2) / chunks
    sizes: list[int] = []
    end = tokens
    for others in range(chunks - 1, 0, -1):
        # the root of causal s^2 / 2 - (linear + causal E) s + share = 0 that is below E
        half = linear + causal * end
        length = 2 * share / (half + math.sqrt(max(0.0, half * half - 2 * causal * share)))
        rounded = int(length + 1e-9) // multiple * multiple
        sizes.append(min(max(rounded, 1), end - others))
        end -= sizes[-1]
    return [end, *reversed(sizes)]


def _cut(tokens: int, prefix_tokens: int, following: Callable[[int], int]) -> list[int]:
    """Take the chunk that `following` gives for each prefix until all tokens are cut."""
    sizes: list[int] = []
    left = tokens
    while left > 0:
        sizes.append(min(left, following(prefix_tokens + tokens - left)))
        left -= sizes[-1]
    return sizes


def _root(a: float, b: float, c: float) -> float:
    """Larger root of ``a x^2 + b x + c``; of the line where a is not positive; 0 if none."""
    if a <= 0:
        return -c / b if b > 0 else 0.0
    discriminant = b * b - 4 * a * c
    return (math.sqrt(discriminant) - b) / (2 * a) if discriminant >= 0 else 0.0


def _fit_history(cost: Cost, served: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    chunk, prefix = np.array(served, np.float64).T
    basis = np.stack([chunk * (chunk + prefix), chunk + prefix, np.ones_like(chunk)], axis=1)
    a, b, c = _least_squares(basis, [cost(*sample) for sample in served])
    return max(a, 1e-9), b, c


def _least_squares(basis: NDArray[np.float64], values: Sequence[Any]) -> list[float]:
    scale = np.maximum(np.abs(basis).max(axis=0), 1.0)
    solution = np.linalg.lstsq(basis / scale, np.array(values, np.float64), rcond=None)[0]
    return [float(one) for one in solution / scale]
