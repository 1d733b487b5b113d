"""The reproduction of the paper's claims, on a small wafer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import mooncake_trace
from tools import reproduce_mocap as tool
from wafer_emu.model import Model
from wafer_emu.wafer import Wafer

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def bench() -> tool.Bench:
    """Sixteen layers on sixteen cores."""
    wafer = Wafer.preset("tiny-4x4")
    return tool.Bench(wafer, Model.from_hf(CONFIG))


def test_claims_stand_beside_their_ideal(bench: tool.Bench) -> None:
    rows = list(tool.claims(bench, [512, 100_000]))
    assert [(row["N"], row["M"]) for row in rows] == 2 * list(tool.LAYOUTS)
    ran = [row for row in rows if "binds" not in row]
    assert {row["tokens"] for row in ran} == {512}
    for row in ran:
        assert row["throughput ratio"] == row["gpipe [s]"] / row["mocap [s]"]
        share = row["throughput ratio"] / tool.ideal_ratio(row["N"], row["M"])
        assert row["share of ideal [%]"] == pytest.approx(100 * share)
        assert row["tiers gpipe"] == row["tiers mocap"] == "sram sram sram"  # no die memory here
        assert row["gpipe's tile L/M [%]"] >= row["share of ideal [%]"]  # its own is the fastest
    for row in rows:
        if "binds" in row:
            assert row["binds"].startswith(("gpipe: ", "mocap: "))
            assert "too many" in row["binds"]
    assert "N = M = 8" in tool.summary(rows)
    assert tool.summary([row for row in rows if "binds" in row]) == "nothing fits"


@pytest.mark.parametrize(("tokens", "layout"), [(65_536, (8, 8)), (131_072, (16, 16))])
def test_long_prompts_reach_what_cutting_can_give_and_no_more(
    tokens: int, layout: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares above 101 % would be gpipe's memory, or its tiles, and no merit of mocap."""
    monkeypatch.setattr(tool, "LAYOUTS", (layout,))
    paper = tool.Bench(Wafer.preset("wsc-54"), Model.preset("llama-3-8b"))
    (row,) = tool.claims(paper, [tokens])
    for share in ("share of ideal [%]", "skip off [%]", "memory aside [%]"):
        assert 95 <= row[share] <= 101
    assert row["lower latency [%]"] > 76


def test_bounds_reach_the_closed_forms(bench: tool.Bench) -> None:
    row = next(row for row in tool.bounds(bench, []) if (row["N"], row["M"]) == (8, 8))
    for kind in ("alone", "stream"):
        assert row[f"pairs, {kind}"] == pytest.approx(4 / 3, rel=2e-3)
        assert row[f"mirror, {kind}"] == pytest.approx(16 / 15, rel=2e-3)
        assert row[f"groups of 4, {kind}"] == pytest.approx(1.6, rel=2e-3)
        assert 1.75 < row[f"optimal, {kind}"] <= 16 / 9
    assert 1.2 < row["pairs, equal times"] < 1.3  # front-loaded chunks weaken pairs
    assert row["pairs, equal times"] < row["pairs, stream"]


def test_moves_cost_more_if_nothing_hides_them(bench: tool.Bench) -> None:
    rows = list(tool.ablation(bench, [256]))
    assert all("mocap [s]" in row for row in rows)
    options = tool.Options(stages=8, chunks=8, policy={"trigger": "balance"})
    plan = bench.plan("mbkr", 512, options)
    free, hidden, serial = (
        tool._makespan(plan, plan.compute),
        tool._price(plan),
        tool._price(plan, overlap=False),
    )
    assert free > 0
    assert 1 <= hidden <= serial
    assert serial > 1


def test_static_and_dynamic_gain_multiply(bench: tool.Bench) -> None:
    for row in tool.ledger(bench, []):
        assert row["mbkr"] >= row["uniform"] > 0
        gain = row["static gain"] * row["dynamic gain"]
        assert gain == pytest.approx(row["mbkr/terapipe"])


def test_json_and_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: tool.Bench
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    words = ["ablation", "--wafer", "tiny-4x4", "--models", str(config), "--tokens", "64"]
    tool.main([*words, "--json"])
    assert len(json.loads(capsys.readouterr().out)["sections"]["ablation"]) == len(tool.LAYOUTS)
    tool.main([*words, "--markdown"])
    assert capsys.readouterr().out.startswith("## ablation")


def test_a_trace_by_policy_and_order_of_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    trace = tmp_path / "trace.jsonl"
    lengths = (400, 300, 40, 200)
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": k, "input_length": tokens, "hash_ids": [k]})
            for k, tokens in enumerate(lengths)
        )
    )
    words = [str(trace), "--wafer", "tiny-4x4", "--model", str(tmp_path / "config.json")]
    mooncake_trace.main([*words, "--compress", "1000", "--chunk-tokens", "100", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2 * 2 * len(mooncake_trace.POLICIES)
    by_order = {
        (row["policy"], row["order"]): row["mean [s]"] for row in rows if not row["prefix reuse"]
    }
    for policy in mooncake_trace.POLICIES:
        assert by_order[policy, "shortest first"] < by_order[policy, "first come"]


def test_without_a_trace_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mooncake_trace.main([str(tmp_path / "none.jsonl")])
    said = capsys.readouterr()
    assert not said.out
    assert "skipped" in said.err
