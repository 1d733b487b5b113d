"""Floors of the joint search: no plan takes less, whatever its policy, memories and cuts."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import mocap.policy
from mocap.policy import Request, Setting
from mocap.uniform import Uniform
from tests.wafer_emu.small import DEEPSEEK, LLAMA, MIXTRAL, WAFERS
from wafer_emu.candidates import Candidate, Judge
from wafer_emu.engine import run_plan
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.plan import make_plan
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError, UsageError

WINDOW = {**LLAMA, "model_type": "mistral", "sliding_window": 40}
POLICIES = ["uniform", "lbcp", "terapipe", "mbkr", "mocap", "gpipe", "layerwise", "sglang"]


@st.composite
def questions(draw: st.DrawFn) -> tuple[Wafer, Model, str, Workload, Options]:
    """A small wafer, model, policy and workload, and options that fix stages and chunks."""
    wafer = draw(st.sampled_from(WAFERS)).replace(
        {"core.sram_bytes": draw(st.integers(4_000, 200_000)), "core.code_bytes": 0}
    )
    layers = draw(st.integers(1, 7))
    config: dict[str, Any] = {
        **draw(st.sampled_from([LLAMA, WINDOW, MIXTRAL, DEEPSEEK])),
        "num_hidden_layers": layers,
        "hidden_size": draw(st.sampled_from([16, 24, 40])),
    }
    name = draw(st.sampled_from(POLICIES))
    new, prefix = draw(st.integers(1, 500)), draw(st.sampled_from([0, 0, 70]))
    requests = draw(st.integers(1, 3))
    asked: dict[str, Any] = {"causal_skip": draw(st.booleans())}
    if draw(st.booleans()):
        asked["embedding"] = "first-stage"
    if wafer.dram is not None:
        tier = st.sampled_from(["auto", "sram", "dram"])
        asked |= {"weights_tier": draw(tier), "kv_tier": draw(tier), "activations_tier": draw(tier)}
    if mocap.policy.get(name).stage_count is None:
        asked["stages"] = draw(st.integers(1, min(4, layers)))
    if name != "layerwise":
        asked |= draw(
            st.fixed_dictionaries({"chunks": st.integers(1, 12)})
            | st.fixed_dictionaries({"chunk_tokens": st.integers(1, 200)})
        )
    workload = Workload.equal(requests, new + prefix, prefix)
    return wafer, Model.from_hf(config), name, workload, Options(**asked)


@settings(max_examples=40, deadline=None)
@given(questions())
def test_no_plan_takes_less_than_its_floors(
    question: tuple[Wafer, Model, str, Workload, Options],
) -> None:
    wafer, model, name, workload, options = question
    policy = mocap.policy.get(name)
    try:
        plan = make_plan(wafer, model, workload, policy, options)
    except (CapacityError, UsageError):
        return
    schedule = run_plan(plan)
    stages = len(plan.deployment.stages)
    latency = Judge(wafer, model, workload, options, {})
    candidate = Candidate(0, 0, policy, stages, options.given_chunks)
    while latency.raise_floor(candidate):
        assert candidate.floor <= int(schedule.end[-1, plan.last].sum())
    busy = Judge(
        wafer, model, workload, Options(**{**options.to_dict(), "objective": "throughput"}), {}
    )
    candidate = Candidate(0, 0, policy, stages, options.given_chunks)
    while busy.raise_floor(candidate):
        assert candidate.floor <= int(plan.tasks.duration.sum(axis=1).max())


def test_floors_of_a_pipeline_are_near_what_it_takes() -> None:
    """They would hold at 0 too: equal chunks of whole rounds leave them little to give away."""
    wafer, model = Wafer.preset("wsc-54"), Model.preset("llama-3-8b")
    workload, options = Workload.single(16_384), Options(stages=4, chunks=16)
    policy = mocap.policy.get("lbcp")
    makespan = int(run_plan(make_plan(wafer, model, workload, policy, options)).end.max())
    judge, candidate = Judge(wafer, model, workload, options, {}), Candidate(0, 0, policy, 4, 16)
    floors = []
    while judge.raise_floor(candidate):
        floors.append(candidate.floor / makespan)
    assert 0.75 < floors[0] <= floors[1] <= 1
    even, candidate = mocap.policy.get("uniform"), Candidate(0, 0, Uniform(), 4, 16)
    makespan = int(run_plan(make_plan(wafer, model, workload, even, options)).end.max())
    while judge.raise_floor(candidate):
        pass
    assert 0.95 < candidate.floor / makespan <= 1


def test_policies_say_how_many_chunks_they_make_at_most() -> None:
    for name in ("uniform", "lbcp", "mbkr", "mocap", "terapipe"):
        assert mocap.policy.most_chunks(mocap.policy.get(name), 7) == 7
    assert mocap.policy.most_chunks(mocap.policy.get("gpipe"), 7) == 1
    assert mocap.policy.most_chunks(mocap.policy.get("sglang"), 7) is None
    unbounded = mocap.policy.get("terapipe", {"max_chunks": 0})
    assert mocap.policy.most_chunks(unbounded, 7) is None


def test_what_a_policy_says_of_the_cuts_of_another_is_void() -> None:
    class Own(Uniform):
        def partition(self, request: Request, setting: Setting) -> list[int]:
            return [1] * request.new_tokens

    assert mocap.policy.most_chunks(Own(), 7) is None
