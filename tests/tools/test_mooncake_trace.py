"""The table of a request trace: its rows, its columns, and what is remembered."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mocap.policy
from tests.tools.small import CONFIG
from tools import mooncake_trace as tool
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.plan import make_plan
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload

WAFER, MODEL = Wafer.preset("tiny-4x4"), Model.from_hf(CONFIG)
OPTIONS = Options(stages=4, chunk_tokens=100)
FIGURES = ("mean", "p50", "p95", "p99", "req/s")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four requests a millisecond apart; the third begins like the second."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "trace.jsonl"
    lines = [(400, [1]), (600, [3, 4]), (600, [3, 5]), (300, [2])]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": k, "input_length": tokens, "hash_ids": blocks})
            for k, (tokens, blocks) in enumerate(lines)
        )
    )
    return path


def rows_of(trace: Path, policy: str, reuse: bool = False) -> list[dict[str, Any]]:
    return tool.measure(
        WAFER, MODEL, Workload.from_file(trace), [1, 1000], OPTIONS, (policy, reuse)
    )


@pytest.mark.parametrize("policy", tool.POLICIES)
def test_every_policy_serves_in_both_orders(trace: Path, policy: str) -> None:
    rows = rows_of(trace, policy)
    assert [(row["arrivals"], row["order"]) for row in rows] == [
        (arrivals, order) for arrivals in ("1x", "1000x") for order in tool.ORDERS
    ]
    for row in rows:
        assert row["p50 [s]"] <= row["p95 [s]"] <= row["p99 [s]"]
        assert 0 < row["mean [s]"] <= row["p99 [s]"]
    first, shortest = rows[2:]  # all are there at once
    assert shortest["mean [s]"] < first["mean [s]"]


def test_figures_are_those_of_a_plan_that_remembers_nothing(trace: Path) -> None:
    from wafer_emu.emulation import emulate

    workload = Workload.from_file(trace).compressed(1000)
    for policy in ("mocap", "terapipe"):
        row = rows_of(trace, policy)[2]
        found = emulate(
            WAFER, MODEL, workload, policy, stages=4, chunk_tokens=100
        ).summary  # first come first served
        waits = found["time_to_first_token_seconds"]
        assert [row[f"{name} [s]"] for name in ("mean", "p50", "p95", "p99")] == pytest.approx(
            [waits[name] for name in ("mean", "p50", "p95", "p99")]
        )
        assert row["requests/s"] == pytest.approx(found["requests_per_second"])


def test_cuts_are_remembered_where_nothing_that_they_depend_on_changes(trace: Path) -> None:
    workload = Workload.from_file(trace)
    cuts: tool.Cuts = {}
    cutting = tool.remembering("mocap", cuts)
    shelf: dict[tuple[object, ...], Any] = {}
    for order in tool.ORDERS:
        plan = make_plan(WAFER, MODEL, workload, tool.served(cutting, order), OPTIONS, shelf)
        alone = make_plan(WAFER, MODEL, workload, mocap.policy.get("mocap"), OPTIONS)
        assert sorted(plan.cuts) == sorted(alone.cuts)
    assert len(cuts) == 3  # of four requests two are alike
    larger = Options(stages=4, chunk_tokens=200)
    plan = make_plan(WAFER, MODEL, workload, tool.served(cutting, order), larger, shelf)
    assert max(map(len, plan.cuts)) == 3


@pytest.mark.parametrize("policy", tool.POLICIES)
def test_plans_that_share_a_shelf_are_those_made_alone(trace: Path, policy: str) -> None:
    cutting = tool.remembering(policy, {})
    shelf: dict[tuple[object, ...], Any] = {}
    for factor, order in product((1, 1000), tool.ORDERS):
        workload, asked = Workload.from_file(trace).compressed(factor), tool.served(cutting, order)
        shared = make_plan(WAFER, MODEL, workload, asked, OPTIONS, shelf)
        alone = make_plan(WAFER, MODEL, workload, asked, OPTIONS)
        assert shared.requests == alone.requests
        assert shared.cuts == alone.cuts
        assert shared.deployment.tile_tokens == alone.deployment.tile_tokens
        assert shared.deployment.tiers == alone.deployment.tiers
        for mine, theirs in zip(shared.tasks, alone.tasks, strict=True):
            assert np.array_equal(mine, theirs)


def test_load_is_the_work_of_the_busiest_stage_over_the_time_of_arrivals(trace: Path) -> None:
    as_given, _, compressed, _ = rows_of(trace, "uniform")
    assert compressed["load"] == pytest.approx(1000 * as_given["load"], rel=0.01)
    assert compressed["load"] > 1 > as_given["load"]
    assert compressed["queued"] == 0.75  # all but the first
    table = tool.by_order([as_given, compressed], "first come")
    assert [str(row["load"]).endswith("!") for row in table] == [False, True]
    assert any(
        "1000x" in line and "saturated: uniform" in line for line in tool.remarks([compressed])
    )


def test_reuse_saves_the_time_of_what_is_there(trace: Path) -> None:
    off, on = rows_of(trace, "uniform")[2], rows_of(trace, "uniform", reuse=True)[2]
    assert on["mean [s]"] < off["mean [s]"]
    assert on["prefix reuse"]
    assert not off["prefix reuse"]


def test_a_policy_that_does_not_run_keeps_its_row(trace: Path) -> None:
    requests = [{"timestamp": 0, "input_length": 4_000_000}]
    trace.write_text("\n".join(json.dumps(each) for each in requests))
    for row in rows_of(trace, "uniform"):
        assert "short in" in row["binds"]
        assert "mean [s]" not in row
    for order in tool.ORDERS:
        table = tool.by_order(rows_of(trace, "uniform"), order)
        assert [row["arrivals"] for row in table] == ["1x", "1000x"]
        assert all(row["mean"] is None and row["load"] is None for row in table)
    said = tool.remarks(rows_of(trace, "uniform"))
    assert len(said) == 1
    assert said[0].startswith("uniform: does not run: ")


def test_one_command_prints_the_table(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(trace), "--wafer", "tiny-4x4", "--model", str(trace.parent / "config.json")]
    words += ["--policies", "gpipe", "--stages", "4", "--chunk-tokens", "100", "--compress", "1,8"]
    tool.main([*words, "--markdown"])
    said = capsys.readouterr().out.splitlines()
    lines = [line.strip("| ").split(" | ") for line in said if line.startswith("|")]
    for order, some in zip(tool.ORDERS, (lines[:6], lines[6:]), strict=True):
        assert f"## time to first token [s], {order}" in said
        heads, _, *rows = some
        assert heads == ["arrivals", "reuse", "policy", "load", "queued", *FIGURES]
        cases = [(arrivals, reuse, "gpipe") for arrivals in ("1x", "8x") for reuse in ("off", "on")]
        assert [tuple(row[:3]) for row in rows] == cases
    assert "4 requests" in said[-1]
    assert "475 tokens on average" in said[-1]
    assert "26.9% of" in said[-1]  # 512 of 1,900 tokens
    tool.main(words)
    said = capsys.readouterr().out.splitlines()
    assert max(map(len, said)) <= 80
    assert said[0].strip() == "time to first token [s], first come"
    tool.main([*words, "--json", "--head", "3"])
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 2 * 2 * len(tool.ORDERS)


def test_without_a_trace_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool.main([str(tmp_path / "none.jsonl")])
    said = capsys.readouterr()
    assert not said.out
    assert "skipped" in said.err
