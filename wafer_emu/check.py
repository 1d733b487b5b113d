"""Plans on real numbers, against the dense reference: whether the answer is the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import mocap.policy
from mocap.policy import Policy
from wafer_emu.dense import Dense, forward
from wafer_emu.emulation import Run, emulate
from wafer_emu.model import Model
from wafer_emu.options import CHUNK_OPTIONS, Options
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError, UsageError

__all__ = ["TOLERANCE", "Question", "check", "compare_values"]

Float32 = npt.NDArray[np.float32]
Progress = Callable[[str, float], None]
DEFAULT_STAGES = DEFAULT_CHUNKS = 4
TOLERANCE = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}
"""Largest error of the logits over the largest logit that passes, by the type of activations."""
CLEAR = 10
"""Tolerances by which the best two logits must differ for their order to count."""


@dataclass(frozen=True)
class Question:
    """A prompt, and what is asked about its next token.

    Attributes
    ----------
    token_ids
        The whole prompt, resident prefix included.
    prefix_tokens
        Leading tokens whose KV is resident.
    score
        Tokens whose probability as the next one is wanted.
    pool
        Whether the last hidden state, or the mean of all, is wanted as an embedding.
    """

    token_ids: Sequence[int]
    prefix_tokens: int = 0
    score: Sequence[int] = ()
    pool: Literal["last", "mean"] | None = None


def check(
    wafer: Wafer,
    model: Model,
    weights: Mapping[str, Float32],
    question: Question,
    policies: Sequence[str],
    options: Options,
    progress: Progress = lambda what, share: None,
) -> Iterator[dict[str, Any]]:
    """Carry out a prompt under several policies, and compare all logits with the dense reference.

    Policies that reallocate KV do it on purpose (``trigger = "balance"``), and fail if nothing
    moved. Four stages and four chunks unless asked otherwise.

    Yields
    ------
    dict
        One row a policy: ``policy``, ``max_absolute_error``, ``max_relative_error`` (over the
        largest logit), ``argmax_equal``, ``reallocated_bytes``, ``makespan_cycles``, ``passed``,
        ``tolerance``; where it does not fit ``policy``, ``passed`` and ``error``.

    Raises
    ------
    UsageError
        If a scored token is none of the vocabulary.
    """
    if any(not 0 <= token < model.vocab_size for token in question.score):
        raise UsageError(f"--score takes tokens from 0 to {model.vocab_size - 1}")
    if options.layers is not None:
        model = model.with_layers(options.layers)
    if options.stages is None and options.region is None:
        options = replace(options, stages=min(DEFAULT_STAGES, model.layers))
    if all(getattr(options, name) is None for name in CHUNK_OPTIONS):
        options = replace(options, chunks=DEFAULT_CHUNKS)
    progress("dense reference", 0.0)
    dense = forward(model, weights, question.token_ids)
    workload = Workload.single(len(question.token_ids), question.prefix_tokens)
    for index, name in enumerate(policies):
        progress(name, (index + 1) / (len(policies) + 1))
        policy, moves = _moving(name, options)
        try:
            run = emulate(
                wafer, model, workload, policy, options=options, numbers=weights,
                token_ids=[question.token_ids], logits="all",
            )  # fmt: skip
        except CapacityError as error:
            refused = {"kind": error.kind, "message": error.message}
            yield {"policy": name, "passed": False, "error": refused}
        else:
            yield _row(name, run, dense, question, moves)


def _moving(name: str, options: Options) -> tuple[Policy, bool]:
    """A policy, and whether it must move KV; one that can is told to."""
    has = mocap.policy.get(name).option_types()
    own = {key: value for key, value in options.policy.items() if key in has}
    if "trigger" in has:
        own = {"trigger": "balance", **own}
    return mocap.policy.get(name, own), "trigger" in has


def _row(name: str, run: Run, dense: Dense, question: Question, moves: bool) -> dict[str, Any]:
    expected = dense.logits[question.prefix_tokens :]
    tolerance = TOLERANCE[run.plan.deployment.model.dtype]
    row = {"policy": name, **compare_values(run.logits, expected, tolerance)}
    moved = run.summary["reallocated_bytes"]
    row["reallocated_bytes"] = moved
    row["makespan_cycles"] = run.summary["makespan_cycles"]
    row["tolerance"] = tolerance
    row["passed"] = bool(
        row["max_relative_error"] <= tolerance and row["argmax_equal"] and (moved or not moves)
    )
    if question.score:
        row["scores"] = _next_token(run.logits[-1], question.score)
    if question.pool is not None:
        hidden = run.hidden[-1] if question.pool == "last" else run.hidden.mean(axis=0)
        row["embedding"] = [float(value) for value in hidden]
    return row


def compare_values(found: Float32, expected: Float32, tolerance: float) -> dict[str, Any]:
    """Errors of logits (tokens, vocabulary): ``max|a - b|``, and that over ``max|b|``.

    The best token must be the same wherever the expected best two differ by more than ten
    tolerances.
    """
    largest = float(np.abs(expected).max())
    error = float(np.abs(found - expected).max()) if np.isfinite(found).all() else np.inf
    second, best = np.partition(expected, -2, axis=1)[:, -2:].T
    clear = best - second > CLEAR * tolerance * largest
    return {
        "max_absolute_error": error,
        "max_relative_error": error / largest,
        "argmax_equal": bool(
            np.array_equal(found[clear].argmax(axis=1), expected[clear].argmax(axis=1))
        ),
    }


def _next_token(logits: Float32, tokens: Sequence[int]) -> dict[str, float]:
    """Probability of each of some next tokens, among the whole vocabulary."""
    shares = np.exp(logits - logits.max(), dtype=np.float64)
    return {str(token): float(shares[token] / shares.sum()) for token in tokens}
