"""The joint choice of stages and chunks: never worse than what one could have asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import mocap.policy
from tests.small_model import CONFIG
from wafer_emu.__main__ import main
from wafer_emu.candidates import Candidate, Judge, chunk_counts
from wafer_emu.emulation import emulate, max_length
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.pipeline_offer import pipeline_offer
from wafer_emu.search import _Search, search
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError, UsageError

WAFER = Wafer.preset("tiny-4x4")
MODEL = Model.from_hf(CONFIG)
WORKLOAD = Workload.single(192)
AUTO = Options(stages="auto", chunks="auto", search_seconds=120.0)


def makespan(policy: str, stages: int, chunks: int | None, workload: Workload = WORKLOAD) -> int:
    run = emulate(WAFER, MODEL, workload, policy, stages=stages, chunks=chunks)
    return int(run.summary["makespan_cycles"])


def test_auto_is_as_fast_as_every_baseline_at_its_best() -> None:
    run = emulate(WAFER, MODEL, WORKLOAD, "mocap", options=AUTO)
    found = run.summary["settings"]["search"]
    assert found["complete"]
    others = [makespan(policy, 1, None) for policy in ("layerwise", "prefill-only")]
    others += [makespan("gpipe", stages, None) for stages in (1, 2, 4)]
    for policy, stages, chunks in product(("uniform", "terapipe", "mocap"), (2, 4), (2, 4, 8)):
        others.append(makespan(policy, stages, chunks))
    assert run.summary["makespan_cycles"] <= min(others)
    assert run.summary["makespan_cycles"] == found["chosen"]["cycles"]


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("tokens", [96, 400])
def test_a_complete_search_finds_the_best_of_all_there_are(objective: str, tokens: int) -> None:
    """Every policy, number of stages and of chunks, planned and run one after the other."""
    workload, policy = Workload.single(tokens), mocap.policy.get("mocap")
    options = replace(AUTO, objective=objective)
    found = search(WAFER, MODEL, workload, policy, options, {}).tried
    assert found["complete"]
    assert not found["left"]
    every = _Search(Judge(WAFER, MODEL, workload, options, {}), policy)
    for name in ("mocap", *policy.rivals):
        one = mocap.policy.get(name)
        for stages in (1, 2, 4) if one.stage_count is None else (1,):
            for chunks in chunk_counts(stages, one, options, every.judge.longest):
                every.run(Candidate(0, 0, one, stages, chunks))
    family = [one["cycles"] for one in every.tried if "error" not in one]
    finer = [one["cycles"] for one in found["tried"] if "error" not in one]
    assert found["chosen"]["cycles"] == min(family + finer)
    names = {one["policy"] for one in found["tried"]} | set(found["ruled_out"])
    assert names == {"mocap", *policy.rivals}
    if objective == "latency":
        assert found["ruled_out"]


def test_chunks_are_refined_around_the_best() -> None:
    uniform = mocap.policy.get("uniform")
    hunt = _Search(Judge(WAFER, MODEL, WORKLOAD, replace(AUTO, stages=4), {}), uniform)
    assert not hunt.refine()  # there is no best yet
    for chunks in (4, 8):
        hunt.add(uniform, 4, chunks)
    hunt.run(Candidate(0, 0, uniform, 4, 8))
    hunt.queue.clear()
    assert hunt.refine()
    assert {one.chunks for one in hunt.queue} == {6, 10}  # of 12 pages at most
    hunt.queue.clear()
    assert hunt.refine()
    assert {one.chunks for one in hunt.queue} == {7, 9}
    hunt.queue.clear()
    assert not hunt.refine()


def test_a_new_best_is_followed_by_more_chunks_and_by_its_rivals() -> None:
    uniform, terapipe = mocap.policy.get("uniform"), mocap.policy.get("terapipe")
    judge = Judge(WAFER, MODEL, WORKLOAD, replace(AUTO, stages=4), {})
    hunt = _Search(judge, uniform, (terapipe, mocap.policy.get("gpipe")))
    slower, faster = sorted((2, 6), key=lambda chunks: -makespan("uniform", 4, chunks))
    hunt.add(uniform, 4, slower)
    hunt.add(terapipe, 4, slower)
    hunt.run(Candidate(0, 0, uniform, 4, slower))
    hunt.run(Candidate(0, 0, uniform, 4, faster))
    first = hunt.queue[0]
    assert first.expected <= min(one.expected for one in hunt.queue)
    assert first.chunks in (faster, min(n.chunks for n in hunt.queue if n.chunks > faster))
    assert ("terapipe", faster) in {(one.policy.name, one.chunks) for one in hunt.queue}
    assert "gpipe" not in {one.policy.name for one in hunt.queue}


def test_what_was_chosen_can_be_asked_for() -> None:
    chosen = search(WAFER, MODEL, WORKLOAD, mocap.policy.get("mocap"), AUTO, {}).tried["chosen"]
    assert chosen["cycles"] == makespan(chosen["policy"], chosen["stages"], chosen["chunks"])
    assert chosen["cores_used"] == 16


def test_the_best_of_what_was_tried_is_taken() -> None:
    found = search(WAFER, MODEL, WORKLOAD, mocap.policy.get("mocap"), AUTO, {})
    ran = [one["cycles"] for one in found.tried["tried"] if "error" not in one]
    assert found.tried["chosen"]["cycles"] == min(ran)
    tried = [(one["policy"], one["stages"], one["chunks"]) for one in found.tried["tried"]]
    assert len(set(tried)) == len(tried)
    assert {"layerwise", "mocap"} <= {one[0] for one in tried}


def test_chunks_alone() -> None:
    run = emulate(WAFER, MODEL, WORKLOAD, "uniform", stages=4, chunks="auto")
    found = run.summary["settings"]["search"]
    assert {one["policy"] for one in found["tried"]} == {"uniform"}
    assert {one["stages"] for one in found["tried"]} == {4}
    assert run.summary["makespan_cycles"] <= min(
        makespan("uniform", 4, chunks) for chunks in (4, 6, 8)
    )


def test_no_search_without_auto() -> None:
    assert emulate(WAFER, MODEL, WORKLOAD, stages=2).summary["settings"]["search"] is None


def test_throughput_is_judged_by_one_more_workload() -> None:
    options = Options(stages="auto", chunks="auto", objective="throughput", search_seconds=120.0)
    chosen = search(WAFER, MODEL, WORKLOAD, mocap.policy.get("mocap"), options, {}).tried["chosen"]
    policy, stages, chunks = chosen["policy"], chosen["stages"], chosen["chunks"]
    once = makespan(policy, stages, chunks)
    assert chosen["cycles"] == makespan(policy, stages, chunks, Workload.equal(2, 192)) - once
    gpipe = makespan("gpipe", 4, None, Workload.equal(2, 192)) - makespan("gpipe", 4, None)
    assert chosen["cycles"] <= gpipe


def test_a_short_time_still_tries_what_is_owed() -> None:
    options = Options(stages="auto", chunks="auto", search_seconds=1e-9)
    found = search(WAFER, MODEL, WORKLOAD, mocap.policy.get("mocap"), options, {}).tried
    assert not found["complete"]
    assert found["left"]
    owed = {one["policy"] for one in found["tried"]} | set(found["ruled_out"])
    assert {"layerwise", "prefill-only"} <= owed
    assert any(one["stages"] > 1 for one in found["tried"])


def test_nothing_fits() -> None:
    with pytest.raises(CapacityError):
        emulate(WAFER, MODEL, Workload.single(1_000_000), options=replace(AUTO, chunks=4))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_search_seconds_must_be_positive(seconds: float) -> None:
    with pytest.raises(UsageError, match="search_seconds"):
        Options(search_seconds=seconds)


def test_stages_that_no_region_allows_are_a_question_put_wrong() -> None:
    with pytest.raises(UsageError):
        emulate(WAFER, MODEL, WORKLOAD, stages=9, chunks="auto")


def test_the_longest_prompt_needs_one_layout() -> None:
    with pytest.raises(UsageError, match="one layout"):
        max_length(WAFER, MODEL, ["mocap"], options=AUTO)


def test_the_offer_of_a_pipeline() -> None:
    run = emulate(WAFER, MODEL, WORKLOAD, "mocap", options=AUTO)
    offer = pipeline_offer(WAFER, MODEL, WORKLOAD, AUTO, run.summary, lambda what, share: None)
    one_stage = run.summary["settings"]["search"]["chosen"]["stages"] == 1
    assert one_stage
    assert offer is not None
    assert offer["one_stage"]["makespan_cycles"] <= offer["pipeline"]["makespan_cycles"]
    assert offer["pipeline"]["noc_byte_hops"] > 0
    assert offer["one_stage"]["most_tokens"] > WORKLOAD.requests[0].tokens


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    words = ["run", "--wafer", "tiny-4x4", "--model", str(config), "--tokens", "96"]
    words += ["--stages", "auto", "--chunks", "auto"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["settings"]["search"]["asked_policy"] == "mocap"
    assert result["pipeline_offer"]["pipeline"]["stages"] > 1
    assert main(words) == 0
    assert "One stage is fastest" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--search-seconds", "0"]) == 2
    assert main([*words[:-1], "some"]) == 2
