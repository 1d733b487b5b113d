"""Reports: they fit 80 columns, and say what must stand next to a figure."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from tests.wafer_emu.summaries import a_refusal, a_row, a_summary
from wafer_emu import quantities
from wafer_emu.conditions import conditions
from wafer_emu.placement import Region, place_regions
from wafer_emu.report import run_report
from wafer_emu.report_compare import compare_report, max_length_report
from wafer_emu.wafer import Wafer
from wafer_emu.wafer_picture import wafer_picture


def shown(report: RenderableType, width: int = 80) -> str:
    """What a terminal of that width shows."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(report)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def one_line(report: RenderableType) -> str:
    """The same without line breaks, however it was wrapped."""
    return " ".join(shown(report).split())


def assert_tidy(text: str, width: int) -> None:
    """No line is wider than the terminal, nothing was cut off."""
    assert max(map(cell_len, text.splitlines())) <= width
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize(("wafer", "stages"), [("wse-2", 8), ("wsc-54", 16), ("tiny-4x4", 4)])
def test_a_run_report_fits_the_terminal(wafer: str, stages: int, width: int) -> None:
    summary = a_summary(wafer=wafer, stages=stages)
    assert_tidy(shown(run_report(summary, Wafer.preset(wafer)), width), width)


def test_a_run_report_says_what_was_found() -> None:
    text = one_line(run_report(a_summary(), Wafer.preset("wse-2")))
    for words in (
        "llama-3-8b on wse-2: 32,768 tokens, mocap",
        "latency 1.234 s 1,357,400,123 cycles at 1.1 GHz",
        "26,554 tokens/s",
        "bubble 46.7 %",
        "39.18 KiB of its 48.00 KiB",
        "8 x 4,096 tokens",
        "stage 7",
        "layers 28-31",
        "1,500 unused",
        "KV 77 %",
        "kJ",
        "✓ MACs over tiles = closed form",
    ):
        assert words in text


def test_what_must_stand_next_to_a_speed_up() -> None:
    text = one_line(run_report(a_summary("gpipe"), Wafer.preset("wse-2")))
    for words in (
        "requests in flight 1",
        "stages 8 of 375x248 cores",
        "chunks 8",
        "cores used 744,000 of 745,500",
        "gpipe's tile 4,096 tokens",
        "causal skip on",
        "rounding pages of 16 tokens",
        "weights bfloat16 in SRAM",
        "KV bfloat16 in SRAM",
        "KV room a stage",
        "KV freed as the request",
        "not used chunks",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"requests": 3, "workload": "3 x 32768 tokens"}, "wse-2: 3 x 32,768 tokens, mocap"),
        ({"prefix_tokens": 4096}, "wse-2: 32,768 tokens, 4,096 of them resident, mocap"),
        ({"requests": 9, "workload": "trace.csv"}, "wse-2: 9 requests of trace.csv, mocap"),
    ],
)
def test_the_work_in_words(changed: dict[str, object], words: str) -> None:
    assert words in one_line(run_report(a_summary(**changed), Wafer.preset("wse-2")))


def test_a_budget_stands_in_for_the_memory_of_kv() -> None:
    found = conditions(a_summary(kv_budget_bytes=2**30, kv_tier="budget"))
    assert found["KV"] == "bfloat16 in a budget of 1.000 GiB a stage"


def test_a_broken_invariant_is_seen() -> None:
    summary = a_summary()
    summary["invariants"][0]["holds"] = False
    assert "✗ broken MACs" in one_line(run_report(summary, Wafer.preset("wse-2")))


@pytest.mark.parametrize(
    ("wafer", "policy", "settings_of_run", "sentence", "expected"),
    [
        ("wsc-54", "gpipe", {}, "simulated, never validated", True),
        ("wse-2", "gpipe", {}, "never validated", False),
        ("wse-2", "mocap", {}, "mocap: reconstructed", True),
        ("wse-2", "terapipe", {}, "reconstructed", False),
        ("wse-2", "mbkr", {"kv_budget_bytes": 5}, "A KV budget replaces the memory ledger", True),
        ("wse-2", "mbkr", {"beyond_model_positions": False}, "longer than the positions", False),
        ("wse-2", "mbkr", {}, "longer than the positions", True),
        ("wse-2", "uniform", {"causal_skip": False}, "off: masked half charged", True),
        ("wse-2", "uniform", {"layers_emulated": 2}, "2 emulated, scaled to 32", True),
    ],
)
def test_caveats(
    wafer: str, policy: str, settings_of_run: dict[str, object], sentence: str, expected: bool
) -> None:
    stages = 16 if wafer == "wsc-54" else 8
    summary = a_summary(policy, wafer, stages, **settings_of_run)
    text = one_line(run_report(summary, Wafer.preset(wafer)))
    assert (sentence in text) is expected


@pytest.mark.parametrize("width", [80, 120])
def test_a_comparison_shows_ratios_refusals_and_what_differs(width: int) -> None:
    rows = [a_row("gpipe", 1.0), a_refusal("terapipe"), a_row("prefill-only", 0.235)]
    longest = {"gpipe": 50_000, "terapipe": 0, "prefill-only": 16_777_216}
    report = compare_report(rows, Wafer.preset("wse-2"), None, longest)
    assert_tidy(shown(report, width), width)
    text = one_line(report)
    assert "0.235x" in text
    assert "4.255x" in text
    assert "terapipe refuses: stage 7 does not fit: core (374, 993) needs 51,234 B" in text
    assert "16,777,216" in text
    assert "gpipe 4,096 tokens chunks" in text  # its own conditions


def test_pipelines_are_held_against_the_whole_wafer() -> None:
    pipeline, wafer = a_row("mocap", 1.0), Wafer.preset("wse-2")
    whole = {"policy": "layerwise", "makespan_cycles": 5, "makespan_seconds": 0.5}
    words = "(layerwise), takes 500.0 ms: faster than the fastest pipeline here (mocap, 1.234 s)"
    assert words in one_line(compare_report([pipeline], wafer, whole))
    whole["makespan_cycles"] = pipeline["makespan_cycles"]
    assert "no faster than" in one_line(compare_report([pipeline], wafer, whole))
    one_stage = a_row("layerwise", 1.0, stages=1)
    assert "whole wafer" not in one_line(compare_report([one_stage], wafer, whole))


def test_the_longest_prompts() -> None:
    limiting = {"stage": 7, "slot": 3, "tier": "sram", "short_bytes": 512, "items": {"own": 9}}
    rows = [
        {"policy": "terapipe", "max_tokens": 100_000, "ratio": 1.0, "limiting": limiting},
        {"policy": "mocap", "max_tokens": 0, "ratio": 0.0, "limiting": {"message": "no room"}},
    ]
    assert_tidy(shown(max_length_report(rows)), 80)
    text = one_line(max_length_report(rows))
    assert "terapipe 100,000 tokens 1.000x stage 7, slot 3: 512 B short in SRAM" in text
    assert "mocap nothing fits 0.000x no room" in text


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 60),
    columns=st.integers(1, 60),
    down=st.integers(1, 8),
    across=st.integers(1, 8),
    width=st.integers(8, 100),
)
def test_a_picture_of_any_fabric_has_straight_edges(
    rows: int, columns: int, down: int, across: int, width: int
) -> None:
    high, wide = max(1, rows // down), max(1, columns // across)
    regions = [
        Region(row * high, column * wide, high, wide)
        for row in range(rows // high)
        for column in range(columns // wide)
    ]
    captions = [[[f"stage {k}", f"{k}"]] for k in range(len(regions))]
    lines = wafer_picture(rows, columns, regions, captions, width).plain.splitlines()
    assert {len(line) for line in lines} == {width}
    assert len(lines) <= 27


def test_every_stage_and_the_unused_cores_are_drawn_in_their_place() -> None:
    wafer = Wafer.preset("wsc-54")
    regions = place_regions(wafer, 16, None, 32)
    captions = [[[f"stage {k}", f"<{k}>"]] for k in range(16)]
    drawn = wafer_picture(wafer.core_rows, wafer.core_columns, regions, captions, 76).plain
    order = [drawn.index(f"<{k}>") for k in range(16)]
    assert order[:9] == sorted(order[:9])  # out
    assert order[9:] == sorted(order[9:], reverse=True)  # and back
    assert "·" in drawn


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0 s"), (1.2345, "1.234 s"), (0.0123456, "12.35 ms"), (5.6e-6, "5.600 µs"),
     (3600.0, "3,600 s"), (None, "-")],
)  # fmt: skip
def test_durations(value: float | None, words: str) -> None:
    assert quantities.seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0 B"), (9_999, "9,999 B"), (49_152, "48.00 KiB"), (2**30, "1.000 GiB"), (None, "-"),
     (1023 * 1024, "1,023 KiB"), (10**18, "888.2 PiB")],
)  # fmt: skip
def test_sizes(value: int | None, words: str) -> None:
    assert quantities.size(value) == words


def test_other_quantities() -> None:
    assert quantities.runs([4096, 4096, 3584, 4096]) == "2 x 4,096, 3,584, 4,096"
    assert quantities.percent(0.4376) == "43.8 %"
    assert quantities.joules(4200.0) == "4.200 kJ"
    assert quantities.multiple(0.2351) == "0.235x"
    assert quantities.rate(27011.4, "tokens/s") == "27,011 tokens/s"
