"""The frozen constants of wse-2 and wse-3-pipeline: their errors, and the fit that found them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from wafer_emu.emulation import Run, emulate
from wafer_emu.model import Model
from wafer_emu.validate import validate
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def calibrate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibrate", TOOLS / "calibrate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wse_2_reproduces_the_errors_that_its_preset_states() -> None:
    (found,) = validate(["waferllm-prefill"])
    assert len(found.cases) == 6
    assert {case.role for case in found.cases} == {"calibrated"}
    stated = Wafer.preset("wse-2").provenance_of("core.step_cycles")
    match = re.search(r"mean error ([0-9.]+) %, largest ([0-9.]+) %", stated)
    assert match is not None
    mean, largest = (float(each) / 100 for each in match.groups())
    assert found.mean_absolute_relative_error == pytest.approx(mean, abs=0.002)
    assert found.max_absolute_relative_error == pytest.approx(largest, abs=0.004)
    assert found.mean_absolute_relative_error <= 0.05
    assert found.max_absolute_relative_error <= 0.08


def test_what_waferllm_leaves_out_is_a_fifth_of_a_percent() -> None:
    """Embedding rows from the host and the head of the last token, on the fastest row."""
    run = emulate(
        Wafer.preset("wse-2"),
        Model.preset("llama-3-8b"),
        Workload.single(4096),
        "layerwise",
        region=(720, 720),
        layers=2,
    )
    clock = run.plan.deployment.clocks[0]
    makespan, chunk = run.summary["makespan_cycles"], 4096
    left_out = makespan - 16 * 2 * clock.layer(0, chunk, 0)
    assert 0 < left_out / makespan < 0.002


def test_wse_3_pipeline_reproduces_the_measured_chunks() -> None:
    (found,) = validate(["wse3-chunked-prefill"])
    assert [case.role for case in found.cases] == ["predicted"] + 4 * ["calibrated"]
    for case in found.cases:
        assert abs(case.relative_error) <= (0.001 if case.role == "calibrated" else 0.005)


def pipeline_run(tokens: int, prefix: int = 0) -> Run:
    return emulate(
        Wafer.preset("wse-3-pipeline"),
        Model.preset("qwen3-1.7b"),
        Workload.single(tokens, prefix),
        "uniform",
        region=(256, 256),
        chunk_tokens=256,
    )


def test_chunks_of_the_pipeline_grow_by_the_same_cycles() -> None:
    """Four layers on the slowest stages, six times as many in the drain of the last chunk."""
    run = pipeline_run(2048, 512)
    stages = run.summary["settings"]["stage_layers"]
    assert max(stages) == 4
    assert sum(stages) == 28
    slowest = np.array(run.summary["chunk_cycles"][0])
    assert set(np.diff(slowest, 2).tolist()) == {0}
    fixed = Wafer.preset("wse-3-pipeline").request_cycles
    form = int(slowest.sum()) + 6 * int(slowest[-1]) + fixed
    assert run.summary["makespan_cycles"] == pytest.approx(form, rel=3e-4)


def test_16384_tokens_are_resident_on_the_pipeline() -> None:
    run = pipeline_run(16384, 16384 - 512)
    assert run.summary["sram_peak_bytes_per_core"] < 48 * 1024
    assert all(invariant["holds"] for invariant in run.summary["invariants"])


def test_a_fit_finds_the_constants_that_made_its_figures(calibrate: ModuleType) -> None:
    base = np.array([3.0, 5.0, 8.0, 9.0])
    gradient = np.array([[0.1, 1.0], [0.2, 3.0], [0.1, 2.0], [0.4, 2.5]])
    linear = calibrate.Linear(base, gradient)
    measured = base + gradient @ np.array([40.0, 2.0])
    everything = np.ones(4, np.bool_)
    constants = calibrate.fit(linear, measured, everything, issue=True)
    assert constants == pytest.approx([40, 2])
    assert calibrate.errors(linear, measured, constants) == pytest.approx(np.zeros(4))


def test_a_fit_gives_no_constant_below_zero(calibrate: ModuleType) -> None:
    base = np.array([3.0, 5.0, 8.0])
    gradient = np.array([[0.1, 1.0], [0.2, 3.0], [0.1, 2.0]])
    measured = base + gradient @ np.array([40.0, -0.5])
    constants = calibrate.fit(calibrate.Linear(base, gradient), measured, np.ones(3, bool), True)
    assert constants[1] == 0
    assert constants[0] > 0


def test_another_form_of_cost_changes_what_it_says(calibrate: ModuleType) -> None:
    wafer = Wafer.preset("wse-2")
    changed = calibrate.with_form(wafer, calibrate.Form(2, True, "products"))
    assert changed.core.compute.lanes == 2
    assert (wafer.attention, changed.attention) == ("ring", "products")
    assert str(calibrate.Form(2, True, "ring")) == "ceil(m / 2) + g per call, ring"
