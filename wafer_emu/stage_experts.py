"""Mixtures of experts on a stage: who works on which rows, one expert after another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_emu.layout import no_matrix
from wafer_emu.program import Experts, Route
from wafer_emu.stage_products import multiply
from wafer_emu.stage_tensors import Job, StageTensors
from wafer_kernels.numeric_routing import choose_by_group, choose_by_softmax, expert_rows

__all__ = ["Routes", "experts", "route"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class Routes(NamedTuple):
    """Experts of each token, the best first, and their weights (token, choice)."""

    chosen: Int64
    shares: Float32


def route(here: StageTensors, operation: Route, job: Job) -> Routes:
    """Choose experts; the choices (experts, then weights) steer where rows go."""
    moe = here.model.moe
    assert moe is not None
    scores = here.read(here.held[operation.source])
    chosen = np.empty((len(scores), moe.experts_per_token), np.int64)
    shares = np.empty(chosen.shape, np.float32)
    if moe.scoring == "softmax":
        choose_by_softmax(chosen, shares, scores, moe.norm_topk_prob)
    else:
        correction = here.read(here.weight("mlp.gate.e_score_correction_bias", job.layer))[0]
        choose_by_group(
            chosen, shares, scores, correction, moe.n_group, moe.topk_group,
            moe.norm_topk_prob, moe.routed_scaling_factor,
        )  # fmt: skip
    target = here.held[operation.target]
    here.write(target, np.concatenate([chosen.astype(np.float32), shares], axis=1))
    kept = here.read(target)
    return Routes(
        kept[:, : moe.experts_per_token].astype(np.int64),
        np.ascontiguousarray(kept[:, moe.experts_per_token :]),
    )


def experts(here: StageTensors, operation: Experts, routes: Routes, job: Job, work: Int64) -> None:
    """One expert after another; rows travel from their token's place and back."""
    chosen, weights = routes
    source, target = here.held[operation.source], here.held[operation.target]
    if operation.combine:
        here.write(target, np.zeros((target.line.size, int(target.bounds[-1])), np.float32))
    tokens, shares = np.empty(len(chosen), np.int64), np.empty(len(chosen), np.float32)
    for expert in range(operation.experts):
        count = expert_rows(tokens, shares, chosen, weights, expert)
        if count == 0:
            continue
        rows = tokens[:count].copy()
        choice = np.argmax(chosen[rows] == expert, axis=1)
        pairs = rows * operation.experts_per_token + choice
        weight = here.weight(operation.weight.format(expert=expert), job.layer)
        if operation.combine:
            multiply(
                here, operation, source, pairs, weight, target, rows, no_matrix(),
                shares[:count].copy(), work,
            )  # fmt: skip
        else:
            multiply(
                here, operation, source, rows, weight, target, pairs, no_matrix(),
                np.zeros(0, np.float32), work,
            )  # fmt: skip
