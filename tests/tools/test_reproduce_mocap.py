"""The reproduction of the paper's claims, on a small wafer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mocap.policy
from tests.tools.small import CONFIG, bench
from tools import mocap_bench, mocap_bounds, mocap_joint, mocap_links
from tools import reproduce_mocap as tool
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.wafer import Wafer

DEEP = Model.from_hf({**CONFIG, "num_hidden_layers": 16})


def test_claims_stand_beside_their_ideal() -> None:
    deep = mocap_bench.Bench(Wafer.preset("tiny-4x4"), DEEP, ((8, 8), (16, 16)))
    rows = list(tool.claims(deep, [512, 100_000]))
    assert [(row["N"], row["M"]) for row in rows] == 2 * [(8, 8), (16, 16)]
    ran = [row for row in rows if "binds" not in row]
    assert {row["tokens"] for row in ran} == {512}
    for row in ran:
        assert row["throughput ratio"] == row["gpipe [s]"] / row["mocap [s]"]
        share = row["throughput ratio"] / tool.ideal_ratio(row["N"], row["M"])
        assert row["share of ideal [%]"] == pytest.approx(100 * share)
        assert row["tiers gpipe"] == row["tiers mocap"] == "sram sram sram"  # no die memory here
        coarse = row["gpipe's tile L/M [%]"]  # its own tile is the fastest
        assert coarse is None or coarse >= row["share of ideal [%]"]
    refused = [row for row in rows if "binds" in row]
    assert all("short" in row["binds"] for row in refused)
    assert "N = M = 8 (1 cases)" in tool.summary(rows)
    assert tool.summary(refused) == "nothing fits"


@pytest.mark.parametrize(("tokens", "layout"), [(65_536, (8, 8)), (131_072, (16, 16))])
def test_long_prompts_reach_what_cutting_can_give_and_no_more(
    tokens: int, layout: tuple[int, int]
) -> None:
    """Shares above 101 % would be gpipe's memory, or its tiles, and no merit of mocap."""
    wafer, model = Wafer.preset("wsc-54"), Model.preset("llama-3-8b")
    (row,) = tool.claims(mocap_bench.Bench(wafer, model, (layout,)), [tokens])
    for share in ("share of ideal [%]", "skip off [%]", "memory aside [%]"):
        assert 95 <= row[share] <= 101
    assert row["lower latency [%]"] > 76


def test_ablation_takes_one_step_at_a_time() -> None:
    rows = list(tool.ablation(bench(), [512, 100_000]))
    for row in rows[:2]:
        assert row["chunking [x]"] == row["gpipe [s]"] / row["uniform [s]"] > 1
        assert row["then LBCP [x]"] == row["uniform [s]"] / row["lbcp [s]"]
        assert row["then MBKR [x]"] == row["lbcp [s]"] / row["mocap [s]"]
        assert row["KV moved [MB]"] == 0
        assert row["balance: KV moved [MB]"] > 0
        assert row["balance: price of moves [%]"] >= 0
    for row in rows[2:]:  # refused, but still there, with all that refuse
        assert row["mocap [s]"] is None
        assert row["then LBCP [x]"] is None
        for policy in tool.STEPS:
            assert policy in row["binds"]


def test_bounds_reach_the_closed_forms() -> None:
    row = next(row for row in mocap_bounds.bounds() if (row["N"], row["M"]) == (8, 8))
    for kind in ("alone", "stream"):
        assert row[f"pairs, {kind}"] == pytest.approx(4 / 3, rel=2e-3)
        assert row[f"mirror, {kind}"] == pytest.approx(16 / 15, rel=2e-3)
        assert row[f"groups of 4, {kind}"] == pytest.approx(1.6, rel=2e-3)
        assert 1.75 < row[f"optimal, {kind}"] <= 16 / 9
    assert 1.2 < row["pairs, equal times"] < 1.3  # front-loaded chunks weaken pairs
    assert row["pairs, equal times"] < row["pairs, stream"]


def test_front_loaded_chunks_weaken_pairs() -> None:
    rows = list(mocap_bounds.coupling(bench(), [256, 2048]))
    assert len(rows) == 4
    for row in rows:
        assert row["pairs, LBCP cuts"] <= row["pairs, uniform cuts"] + 1e-9
        assert row["pairs, LBCP cuts"] == pytest.approx(row["2 / (1 + f)"])  # M = N in all
        assert row["pairs, uniform cuts"] == pytest.approx(4 / 3)
    short, long = (row for row in rows if row["N"] == 4)
    assert long["first half of LBCP's chunks [%]"] > short["first half of LBCP's chunks [%]"]


def test_moves_cost_more_if_nothing_hides_them() -> None:
    deep = mocap_bench.Bench(Wafer.preset("tiny-4x4"), DEEP)
    options = Options(stages=8, chunks=8, policy={"trigger": "balance"})
    plan = deep.plan("mbkr", 512, options)
    hidden, serial = mocap_bench.price(plan), mocap_bench.price(plan, overlap=False)
    assert 1 <= hidden <= serial
    assert serial > 1
    assert mocap_bench.moved_bytes(plan) > 0
    still = deep.plan("uniform", 512, Options(stages=8, chunks=8))
    assert mocap_bench.price(still) == mocap_bench.price(still, overlap=False) == 1


def test_static_and_dynamic_gain_multiply() -> None:
    rows = list(tool.ledger(bench(), []))
    longest = {(row["N"], row["policy"]): row["longest"] for row in rows}
    for row in rows:
        assert row["binds"]
        assert row["longest"] >= longest[row["N"], "uniform"] or not row["policy"].startswith(
            "mbkr"
        )
        if "static" in row:
            gain = row["static gain"] * row["dynamic gain"]
            assert gain == pytest.approx(row["over terapipe"])
    assert longest[4, "mbkr, pairs"] > longest[4, "uniform"] > 0
    assert longest[4, "mbkr, optimal"] >= longest[4, "mbkr, mirror"]


@pytest.fixture
def two_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mocap_links, "GIGABYTES_PER_SECOND", (2, 2000))
    monkeypatch.setattr(mocap_links, "OVERHEAD_GIGABYTES_PER_SECOND", (10,))


@pytest.mark.usefixtures("two_rates")
def test_slower_links_raise_the_price_of_moves() -> None:
    rows = list(mocap_links.bandwidth(bench(), []))
    assert [row["layout"] for row in rows[::2]] == ["N = 2, M = 2", "N = M = 4, a die each"]
    for slow, fast in zip(rows[::2], rows[1::2], strict=True):
        assert slow["KV moved [MB]"] == fast["KV moved [MB]"]
        assert slow[mocap_links.HIDDEN] >= fast[mocap_links.HIDDEN] >= 0
        assert slow[mocap_links.SERIAL] >= fast[mocap_links.SERIAL] >= 0
        assert slow[mocap_links.MOVED] >= fast[mocap_links.MOVED]
    assert rows[-1]["KV moved [MB]"] > 0
    assert rows[-2][mocap_links.SERIAL] > rows[-1][mocap_links.SERIAL] > 0
    crossed = list(mocap_links.crossover(bench(), []))
    heads = [head for head in crossed[0] if "over 5 %" in head or "alone" in head]
    prices = (mocap_links.HIDDEN, mocap_links.ALONE, mocap_links.SERIAL)
    for row, slow, fast in zip(crossed, rows[::2], rows[1::2], strict=True):
        assert slow[mocap_links.HIDDEN] >= slow[mocap_links.ALONE] >= 0
        for head, price in zip(heads, prices, strict=True):
            if slow[price] > 5 >= fast[price]:
                assert 2 <= row[head] < 2000
            else:
                assert row[head] in ("< 2", "> 2000")


@pytest.mark.parametrize("edge", [3.0, 47.0, 1500.0])
def test_a_crossover_is_found_from_the_side_that_does_not_pay(edge: float) -> None:
    found = mocap_links._below(lambda rate: rate <= edge * 1e9)
    assert isinstance(found, float)
    assert edge / mocap_links.CLOSE <= found <= edge
    assert mocap_links._below(lambda rate: False) == "< 1"
    assert mocap_links._below(lambda rate: True) == "> 4000"


@pytest.mark.usefixtures("two_rates")
def test_counting_the_moves_is_held_against_not_counting_them() -> None:
    rows = list(mocap_links.overhead(bench(), []))
    assert len(rows) == 2
    for row in rows:
        best = min(row["o ignored [s]"], row["uniform cuts [s]"])
        assert row["counted over the better [%]"] == pytest.approx(
            100 * (row["o counted [s]"] / best - 1)
        )


def test_a_wafer_without_dies_has_no_links_to_sweep() -> None:
    uniform = mocap_bench.Bench(Wafer.preset("tiny-4x4"), Model.from_hf(CONFIG), ((2, 2),))
    for section in (mocap_links.bandwidth, mocap_links.crossover, mocap_links.overhead):
        assert ["no links" in row["binds"] for row in section(uniform, [])] == [True]


def words(tmp_path: Path, *more: str) -> list[str]:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    small = ["--models", str(config), "--tokens", "64", "--layouts", "2x2"]
    return [*more, "--wafer", "tiny-4x4", *small]


def test_json_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool.main([*words(tmp_path, "ablation"), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert len(found["sections"]["ablation"]) == 1
    tool.main([*words(tmp_path, "ablation"), "--markdown"])
    assert capsys.readouterr().out.startswith("## ablation")
    tool.main(words(tmp_path, "coupling"))
    assert "pairs, LBCP" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tool.main(words(tmp_path, "nothing"))
    assert "choose from claims" in capsys.readouterr().err


def test_several_wafers_stand_in_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words(tmp_path, "claims", "--figures", str(tmp_path / "figures"))
    asked[asked.index("tiny-4x4")] = "tiny-4x4,check-32x32"
    tool.main([*asked, "--markdown"])
    said = capsys.readouterr()
    assert "| tiny-4x4 |" in said.out
    assert "| check-32x32 |" in said.out
    assert said.out.count("means of all") == 2
    assert (tmp_path / "figures" / "claims.png").exists()


def test_no_rival_at_its_own_best_is_faster_than_the_joint_choice() -> None:
    options = Options(stages="auto", chunks="auto", search_seconds=60.0)
    small = mocap_bench.Bench(Wafer.preset("tiny-4x4"), Model.from_hf(CONFIG))
    rows = list(mocap_joint.joint(small, [192, 100_000], options))
    ran = [row for row in rows if "binds" not in row]
    assert [row["asked for"] for row in ran] == ["mocap", *mocap.policy.get("mocap").rivals]
    assert ran[0]["over mocap"] == 1
    for row in ran:
        assert row["left"] == 0
        assert row["over mocap"] == row["latency [s]"] / ran[0]["latency [s]"] >= 1
    assert len(rows) == 2 * len(ran)  # none holds the long prompt
