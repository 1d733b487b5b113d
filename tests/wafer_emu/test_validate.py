"""The suites that hold the emulator against others' figures, and how they are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wafer_emu import validate_plot
from wafer_emu.__main__ import main
from wafer_emu.validate import SUITES, Case, Suite, published, validate
from wafer_kernels.errors import UsageError

CASE_KEYS = {"case", "reference", "emulated", "relative_error", "role"}


def suite(name: str) -> Suite:
    (found,) = validate([name])
    assert found.name == name
    return found


def test_errors_are_relative_to_the_reference() -> None:
    cases = (Case("a", 200, 190, "predicted"), Case("b", 10.0, 11.0, "calibrated"))
    found = Suite("s", "cycles", "by hand", cases)
    assert [case.relative_error for case in cases] == pytest.approx([-0.05, 0.1])
    assert found.mean_absolute_relative_error == pytest.approx(0.075)
    assert found.max_absolute_relative_error == pytest.approx(0.1)


def test_systolic_meets_every_row_of_scale_sim() -> None:
    found = suite("systolic")
    assert len(found.cases) == len(published("scalesim_cycles")) == 90
    assert {case.role for case in found.cases} == {"exact"}
    assert found.max_absolute_relative_error == 0
    first = published("scalesim_cycles")[0]
    assert found.cases[0].reference == int(first["total_cycles"]) + 1
    assert "index of the last cycle" in found.notes[0]


def test_collectives_meet_every_published_form() -> None:
    found = suite("collectives")
    assert len(found.cases) == 6
    assert found.max_absolute_relative_error == 0


def test_the_mesh_has_booksims_slope_and_offset() -> None:
    found = suite("noc-latency")
    assert [case.role for case in found.cases[:2]] == ["calibrated"] * 2
    assert {case.role for case in found.cases[2:]} == {"predicted"}
    assert len(found.cases) == 8
    assert found.max_absolute_relative_error <= 0.02


def test_measured_pipelines_follow_from_their_chunks() -> None:
    """11 chunks of 1.235 s on average and one of 1.828 s more; half a minute without a pipeline."""
    one, two, llama = suite("pipeline-identity").cases
    assert one.emulated == pytest.approx(11 * 2754)
    assert two.emulated == pytest.approx(11 * 1235 + 1828, abs=0.01)
    assert abs(one.relative_error) < 0.001
    assert abs(two.relative_error) < 0.015
    assert abs(llama.relative_error) < 0.03


def test_a_layer_of_waferllm_takes_the_bytes_of_its_source() -> None:
    found = suite("sram-footprint")
    assert {case.role for case in found.cases} == {"exact"}
    assert found.max_absolute_relative_error == 0
    assert found.cases[0].reference == 4606  # s = 7, d = 7, f = 22 of the 660 x 660 grid


def test_every_suite_is_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="no suite 'cycles': there are systolic, collectives"):
        list(validate(["cycles"]))
    assert main(["validate", "--suite", "nonsense"]) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in SUITES)


def test_the_document_and_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["validate", "--suite", "collectives", "--suite", "noc-latency"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "validate"
    suites = document["result"]["suites"]
    assert [each["name"] for each in suites] == ["collectives", "noc-latency"]
    for each in suites:
        assert {"mean_absolute_relative_error", "max_absolute_relative_error"} <= set(each)
        assert all(set(case) == CASE_KEYS for case in each["cases"])
        worst = max(abs(case["relative_error"]) for case in each["cases"])
        assert each["max_absolute_relative_error"] == worst
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "collectives [cycles]" in out
    assert "largest 1.4 %" in out


def test_a_long_suite_shows_its_worst_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--suite", "systolic"]) == 0
    assert "78 more cases, none worse" in capsys.readouterr().out


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "errors.png"
    words = ["validate", "--suite", "collectives", "--suite", "noc-latency", "--plot", str(target)]
    assert main([*words, "--quiet"]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_no_picture_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validate_plot, "find_spec", lambda name: None)
    target = tmp_path / "errors.png"
    assert main(["validate", "--suite", "collectives", "--plot", str(target)]) == 2
    assert "pip install 'wafer-emu[plot]'" in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize(
    ("pattern", "pes", "size", "cycles"),
    [
        ("broadcast", 512, 4, 517),
        ("chain_reduce", 512, 16384, 7162),
        ("star_reduce", 512, 16, 2049),
    ],
)
def test_a_collective_on_the_command_line(
    pattern: str, pes: int, size: int, cycles: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["collective", "--pattern", pattern, "--pes", str(pes), "--bytes", str(size)]
    assert main([*words, "--wafer", "wse-2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["cycles"] == cycles
    parts = ("serialisation_cycles", "distance_cycles", "depth_cycles")
    assert sum(result[part] for part in parts) == cycles


def test_a_collective_crosses_dies_at_their_links_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["collective", "--pattern", "broadcast", "--bytes", "4096", "--wafer", "wsc-54"]
    results = []
    for pes in ("16", "17"):
        assert main([*words, "--pes", pes, "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out)["result"])
    inside, across = results
    assert across["wavelets"] == -(-4096 * 2 // 125)  # 2 TB/s, 16 cores, 2 GHz: 62.5 bytes a cycle
    assert inside["wavelets"] == 4096 // 256
    assert across["distance_cycles"] == 16 * 51


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pattern", "gossip", "--pes", "4"], "choose one of broadcast"),
        (["--pattern", "broadcast", "--pes", "5000"], "a row of wse-2 has 994"),
        (["--pattern", "broadcast", "--pes", "0"], "not a whole number"),
    ],
)
def test_a_wrong_collective_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collective", *words, "--bytes", "4", "--wafer", "wse-2"]) == 2
    assert said in capsys.readouterr().err
