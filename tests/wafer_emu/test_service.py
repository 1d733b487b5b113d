"""Who is served next when requests arrive over time, and traces on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mocap.policy
from mocap.policy import Policy
from mocap.prefill_only import ShortestFirst
from tests.small_model import CONFIG
from wafer_emu.__main__ import main
from wafer_emu.emulation import emulate
from wafer_emu.engine import run_plan
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.plan import Plan, make_plan
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Request, Workload

WAFER = Wafer.preset("tiny-4x4")
MODEL = Model.from_hf(CONFIG)
Arrivals = list[tuple[int, float]]  # (tokens, arrival [s]) of each request


def workload(arrivals: Arrivals) -> Workload:
    ordered = sorted(arrivals, key=lambda one: one[1])
    return Workload(
        tuple(
            Request(index=index, tokens=tokens, arrival_seconds=at)
            for index, (tokens, at) in enumerate(ordered)
        ),
        "made up",
    )


def plan_of(arrivals: Arrivals, policy: str | Policy, stages: int = 1) -> Plan:
    served = mocap.policy.get(policy) if isinstance(policy, str) else policy
    options = Options(stages=stages, chunk_tokens=64)
    return make_plan(WAFER, MODEL, workload(arrivals), served, options)


def order_of(arrivals: Arrivals, policy: str | Policy) -> list[int]:
    return [request.tokens for request in plan_of(arrivals, policy).requests]


def test_the_shortest_of_those_that_wait_is_served() -> None:
    # 250 is alone when the wafer is free; the others arrive while it runs, 40 long after.
    arrivals = [(250, 0.0), (200, 1e-6), (100, 2e-6), (150, 3e-6), (40, 1.0)]
    assert order_of(arrivals, "prefill-only") == [250, 100, 150, 200, 40]
    assert order_of(arrivals, "layerwise") == [250, 200, 100, 150, 40]


def test_all_that_wait_from_the_start_are_sorted() -> None:
    assert order_of([(30, 0.0), (10, 0.0), (20, 0.0)], "prefill-only") == [10, 20, 30]


def test_a_free_wafer_waits_for_nobody() -> None:
    """A short request to come does not keep a long one that is there waiting."""
    plan = plan_of([(200, 0.0), (10, 1.0)], "prefill-only")
    start = run_plan(plan).start[0]
    assert start[0] < WAFER.core.clock_hz // 1000
    assert start[1] >= WAFER.core.clock_hz


requests = st.lists(st.tuples(st.integers(1, 250), st.floats(0, 2e-4)), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(requests)
def test_no_shorter_request_was_waiting(arrivals: Arrivals) -> None:
    """One stage, whole requests: what the order was decided on is what happens, latency apart."""
    plan = plan_of(arrivals, "prefill-only")
    served = plan.requests
    assert sorted(one.index for one in served) == list(range(len(arrivals)))
    free = 0
    for place, one in enumerate(served):
        begin = max(free, min(each.arrival_cycle for each in served[place:]))
        later = [each for each in served[place:] if each.arrival_cycle <= begin]
        assert one in later
        assert one.new_tokens == min(each.new_tokens for each in later)
        free = begin + plan.deployment.stage_cost(0, one.new_tokens, 0)


def test_any_policy_can_serve_the_shortest_first() -> None:
    class Served(ShortestFirst, type(mocap.policy.get("mocap"))):  # type: ignore[misc]
        name = "shortest mocap"

    arrivals = [(250, 0.0), (200, 1e-6), (20, 2e-6), (30, 2e-6)]
    first, shortest = plan_of(arrivals, "mocap", 4), plan_of(arrivals, Served(), 4)
    assert [one.tokens for one in shortest.requests] == [250, 20, 30, 200]

    def mean_wait(plan: Plan) -> float:
        arrived = np.array([one.arrival_cycle for one in plan.requests])
        return float(np.mean(run_plan(plan).end[-1, plan.last] - arrived))

    assert mean_wait(shortest) < mean_wait(first)


def test_summary_counts_waits_from_each_request_s_own_arrival() -> None:
    arrivals = [(250, 0.0), (200, 1e-6), (20, 2e-6)]
    run = emulate(WAFER, MODEL, workload(arrivals), "prefill-only")
    ends = run.schedule.end[-1] / WAFER.core.clock_hz
    waits = [end - at for end, at in zip(ends, (0.0, 2e-6, 1e-6), strict=True)]
    found = run.summary["time_to_first_token_seconds"]
    assert found["mean"] == pytest.approx(np.mean(waits), abs=1e-8)
    assert found["max"] == pytest.approx(max(waits), abs=1e-8)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": 100 * k, "input_length": 100, "output_length": 1, "hash_ids": [1]}
        for k in range(4)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_traces_are_cut_and_compressed_and_reused(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--wafer", "tiny-4x4", "--model", str(trace.parent / "config.json"), "--json"]
    asked = [*words, "--workload", str(trace), "--stages", "2"]

    def result(*more: str) -> dict[str, Any]:
        assert main([*asked, *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)["result"]
        return found

    whole = result()
    assert whole["settings"]["requests"] == 4
    assert whole["makespan_seconds"] == pytest.approx(0.3, rel=0.01)
    assert result("--head", "2")["settings"]["requests"] == 2
    assert result("--compress", "3")["makespan_seconds"] == pytest.approx(0.1, rel=0.02)
    reused = result("--prefix-reuse")
    assert [sum(each) for each in reused["chunk_tokens"]] == [100, 1, 1, 1]
    assert main([*words, "--tokens", "64", "--head", "2"]) == 2
    assert main([*asked, "--compress", "-1"]) == 2
