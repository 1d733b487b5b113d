"""Fit the constants of the wse-2 and wse-3-pipeline presets, with the emulator itself.

    python tools/calibrate.py wse-2            # the six rows of LLaMA3-8B and LLaMA2-13B
    python tools/calibrate.py wse-3-pipeline   # the four rows of 8,192 tokens

Nothing is written: the printed values go into data/wafers by hand, with their errors. Cycles of a
run are linear in the constants up to the rounding of single steps, so every fit is a linear
least-squares problem of relative errors, solved from runs at as many points as there are constants.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from wafer_emu.hardware import Program
from wafer_emu.validate import published
from wafer_emu.validate_runs import (
    CALIBRATED_TOKENS,
    chunked_prefill_cycles,
    prefill_tokens_per_second,
    waferllm_rows,
)
from wafer_emu.wafer import Wafer

Float64 = npt.NDArray[np.float64]
STEP, ISSUE = "core.step_cycles", "core.compute.issue_millicycles"
STEP_POINTS, ISSUE_POINT = (200, 600), 4000


class Form(NamedTuple):
    """A form of the cost: lanes of a vector multiply-add, whether it has a start-up, attention."""

    lanes: int
    issue: bool
    attention: str

    def __str__(self) -> str:
        vector = f"ceil(m / {self.lanes})" if self.lanes > 1 else "m"
        return f"{vector}{' + g' if self.issue else ''} per call, {self.attention}"


FORMS = [
    Form(lanes, issue, attention)
    for attention, (lanes, issue) in product(
        ("ring", "products"), ((1, False), (1, True), (2, True), (4, True))
    )
]


class Linear(NamedTuple):
    """Seconds of every row as ``base + gradient @ (step cycles, issue cycles)``."""

    base: Float64
    gradient: Float64


def with_form(wafer: Wafer, form: Form) -> Wafer:
    """The wafer with another form of cost."""
    program = Program(attention=form.attention, request_cycles=0)  # type: ignore[arg-type]
    return msgspec.structs.replace(
        wafer,
        program=program,
        provenance=wafer.provenance | {"program": "assumed: a form that is tried"},
    ).replace({"core.compute.lanes": form.lanes})


def linearise(wafer: Wafer, rows: Sequence[Mapping[str, str]]) -> Linear:
    """Run every row at three points."""

    def seconds(step: int, issue: int) -> Float64:
        changed = wafer.replace({STEP: step, ISSUE: issue})
        rates = [prefill_tokens_per_second(changed, dict(row)) for row in rows]
        return np.array([int(row["tokens"]) for row in rows]) / np.array(rates)

    low, high = STEP_POINTS
    at_low, at_high = seconds(low, 0), seconds(high, 0)
    per_step = (at_high - at_low) / (high - low)
    per_issue = (seconds(high, ISSUE_POINT) - at_high) / (ISSUE_POINT / 1000)
    return Linear(at_low - low * per_step, np.stack((per_step, per_issue), axis=1))


def fit(linear: Linear, measured: Float64, chosen: npt.NDArray[np.bool_], issue: bool) -> Float64:
    """(step cycles, issue cycles) of least relative squares on the chosen rows, none negative."""
    matrix = linear.gradient[chosen] / measured[chosen, np.newaxis]
    target = 1 - linear.base[chosen] / measured[chosen]
    if issue:
        both = np.linalg.lstsq(matrix, target)[0]
        if both.min() >= 0:
            return both.astype(np.float64)
    step = np.linalg.lstsq(matrix[:, :1], target)[0]
    return np.array([step[0], 0.0])


def errors(linear: Linear, measured: Float64, constants: Float64) -> Float64:
    """Relative errors of the rows' tokens/s."""
    predicted = linear.base + linear.gradient @ constants
    relative: Float64 = measured / predicted - 1
    return relative


def figures(relative: Iterable[float]) -> str:
    """Mean and largest absolute error."""
    sizes = 100 * np.abs(np.array(list(relative)))
    return f"{sizes.mean():4.1f} {sizes.max():5.1f}"


def calibrate_wse2() -> None:
    """Print, for each form, the constants, their errors, and those of the model left out."""
    rows = waferllm_rows()
    models = np.array([row["model"] for row in rows])
    tokens = np.array([int(row["tokens"]) for row in rows])
    measured = tokens / np.array([float(row["tokens_per_second"]) for row in rows])
    wafer = Wafer.preset("wse-2")
    known: dict[tuple[int, str], Linear] = {}
    print("tokens/s, errors in %            step  issue | calibrated | model left out | by row")
    for form in FORMS:
        key = (form.lanes, form.attention)
        if key not in known:
            known[key] = linearise(with_form(wafer, form), rows)
        linear = known[key]
        everything = np.ones(len(rows), np.bool_)
        constants = fit(linear, measured, everything, form.issue)
        relative = errors(linear, measured, constants)
        left_out = [
            error
            for model in np.unique(models)
            for error in errors(
                linear, measured, fit(linear, measured, models != model, form.issue)
            )[models == model]
        ]
        by_row = " ".join(f"{100 * error:+.1f}" for error in relative)
        print(
            f"{form!s:30s} {constants[0]:6.1f} {constants[1]:6.2f} | {figures(relative)} "
            f"| {figures(left_out):14s} | {by_row}",
            flush=True,
        )


def calibrate_wse3_pipeline() -> None:
    """Print the constants, rounded to what single steps resolve, that leave the least error."""
    rows = [
        row for row in published("wse3_chunked_prefill") if row["tokens"] == str(CALIBRATED_TOKENS)
    ]
    measured = np.array([int(row["cycles"]) for row in rows], np.float64)
    wafer = Wafer.preset("wse-3-pipeline").replace({"program.request_cycles": 0})

    def cycles(step: int, issue: int) -> Float64:
        changed = wafer.replace({STEP: step, ISSUE: issue})
        return np.array([chunked_prefill_cycles(changed, row) for row in rows], np.float64)

    step, issue = STEP_POINTS[1], 8000
    for _ in range(2):  # Newton; the second turn takes care of the rounding of steps
        at = cycles(step, issue)
        matrix = np.stack(
            (
                (cycles(step + 50, issue) - at) / 50,
                (cycles(step, issue + 2000) - at) / 2000,
                np.ones(len(rows)),
            ),
            axis=1,
        )
        change = np.linalg.lstsq(matrix / measured[:, np.newaxis], (measured - at) / measured)[0]
        step, issue = step + round(change[0]), issue + round(change[1])
    print("step  issue [1/1000]  request cycles  largest error [%]")
    for nearby in (issue - 125, issue, issue + 125):  # one cycle of a step of eight calls
        at = cycles(step, nearby)
        request = round(float(np.mean(measured - at)))
        largest = np.abs((at + request) / measured - 1).max()
        print(f"{step:4d} {nearby:9d} {request:15,d} {100 * largest:12.4f}", flush=True)


if __name__ == "__main__":
    {"wse-2": calibrate_wse2, "wse-3-pipeline": calibrate_wse3_pipeline}[sys.argv[1]]()
