"""The public contract, kept by real emulations of a small model on a small wafer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xarray as xr

from tests.small_model import CONFIG
from wafer_emu.__main__ import main

Capture = pytest.CaptureFixture[str]
POLICIES = "gpipe,uniform,terapipe,lbcp,mbkr,mocap"
KINDS = {
    "policy": str,
    "makespan_cycles": int,
    "makespan_seconds": float,
    "time_to_first_token_seconds": dict,
    "requests_per_second": float,
    "tokens_per_second": float,
    "bubble_fraction": float,
    "stage_busy_fraction": list,
    "chunk_tokens": list,
    "chunk_cycles": list,
    "sram_peak_bytes_per_core": int,
    "sram_capacity_bytes_per_core": int,
    "kv_peak_bytes_per_stage": list,
    "kv_capacity_bytes_per_stage": list,
    "reallocated_bytes": int,
    "remote_read_bytes": int,
    "noc_byte_hops": int,
    "links": dict,
    "stall_cycles": dict,
    "energy_joules": dict,
    "macs": int,
    "settings": dict,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `config.json` of four small layers."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def job(config: Path) -> list[str]:
    return ["--wafer", "tiny-4x4", "--model", str(config), "--tokens", "96", "--stages", "4"]


def result(capsys: Capture, *words: str, code: int = 0) -> dict[str, Any]:
    """Result, or error, of a command line."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert main([*words, "--json"]) == code
    made = json.loads(capsys.readouterr().out, parse_constant=no_constant)
    assert made["command"] == words[0]
    found = made["error" if code else "result"]
    assert isinstance(found, dict)
    return found


def assert_kinds(found: dict[str, Any]) -> None:
    """All keys of a run are there, and of their kind."""
    wrong = {
        name: found.get(name) for name, kind in KINDS.items() if type(found.get(name)) is not kind
    }
    assert not wrong
    assert set(found["time_to_first_token_seconds"]) == {"mean", "p50", "p95", "p99", "max"}


def test_run(capsys: Capture, job: list[str]) -> None:
    found = result(capsys, "run", *job, "--chunks", "3", "--policy", "uniform")
    assert_kinds(found)
    assert found["chunk_tokens"] == [[32, 32, 32]]
    assert [len(found["chunk_cycles"]), len(found["chunk_cycles"][0])] == [4, 3]
    assert found["makespan_seconds"] == found["makespan_cycles"] / found["settings"]["clock_hz"]
    assert found["sram_peak_bytes_per_core"] <= found["sram_capacity_bytes_per_core"]
    assert all(check["holds"] for check in found["invariants"])
    assert found["settings"]["beyond_model_positions"] is False


def test_chunks_sum_to_what_is_computed(capsys: Capture, job: list[str]) -> None:
    for policy in POLICIES.split(","):
        words = ["run", *job, "--policy", policy, "--prefix-tokens", "32", "--requests", "2"]
        found = result(capsys, *words)
        assert [sum(chunks) for chunks in found["chunk_tokens"]] == [64, 64]


def test_chunks_given_one_by_one(capsys: Capture, job: list[str]) -> None:
    words = ["--policies", "uniform,mbkr,lbcp", "--chunk-vector", "48,31,17"]
    rows = result(capsys, "compare", *job, *words)["rows"]
    assert [row["chunk_tokens"] for row in rows[:2]] == [[[48, 31, 17]]] * 2
    assert len(rows[2]["chunk_tokens"][0]) == 3
    assert [row["settings"]["unused"] for row in rows] == [[], [], ["chunk_vector"]]
    for wrong in (["--chunk-vector", "48,31,16"], ["--chunk-vector", "96", "--chunks", "1"]):
        assert main(["run", *job, "--policy", "uniform", *wrong]) == 2
    assert main(["max-length", *job, "--policies", "uniform", "--chunk-vector", "96"]) == 2


def test_compare(capsys: Capture, job: list[str]) -> None:
    rows = result(capsys, "compare", *job, "--policies", POLICIES)["rows"]
    assert [row["policy"] for row in rows] == POLICIES.split(",")
    for row in rows:
        assert_kinds(row)
        assert row["latency_ratio"] == row["makespan_cycles"] / rows[0]["makespan_cycles"]
    assert rows[0]["latency_ratio"] == rows[0]["throughput_ratio"] == 1
    assert main(["compare", *job, "--policies", "gpipe,mocap"]) == 0
    assert "mocap" in capsys.readouterr().out


def test_an_option_that_a_policy_does_not_use_is_listed(capsys: Capture, job: list[str]) -> None:
    words = ["--policies", "gpipe,mbkr", "--chunks", "2", "--set", "policy.partner=mirror"]
    rows = result(capsys, "compare", *job, *words)["rows"]
    assert rows[0]["settings"]["unused"] == ["chunks", "policy.partner"]
    assert rows[1]["settings"]["unused"] == []
    assert rows[1]["settings"]["policy_options"]["partner"] == "mirror"


def test_max_length(capsys: Capture, job: list[str]) -> None:
    words = ["--policies", "uniform,mbkr", "--kv-budget", "65536"]
    rows = result(capsys, "max-length", *job, *words)["rows"]
    assert [row["policy"] for row in rows] == ["uniform", "mbkr"]
    assert rows[0]["max_tokens"] > 0
    assert rows[1]["ratio"] == rows[1]["max_tokens"] / rows[0]["max_tokens"]
    assert all(row["limiting"] for row in rows)


def test_a_kept_run_is_reported_as_it_was(capsys: Capture, job: list[str], tmp_path: Path) -> None:
    file = tmp_path / "a run.h5"
    found = result(capsys, "run", *job, "-o", str(file), "--frames", "5")
    assert [one.name for one in tmp_path.iterdir()] == ["a run.h5"]
    assert result(capsys, "report", str(file)) == found
    assert main(["report", str(file)]) == 0
    again = capsys.readouterr().out
    assert main(["run", *job]) == 0
    assert capsys.readouterr().out == again
    with xr.open_datatree(file) as tree:
        assert tree["state"]["sram_bytes"].attrs["units"] == "byte"
        assert tree["tasks"].sizes["task"] == 4 * len(found["chunk_tokens"][0])


def test_compare_keeps_one_file_a_policy(capsys: Capture, job: list[str], tmp_path: Path) -> None:
    result(capsys, "compare", *job, "--policies", "uniform,mocap", "-o", str(tmp_path))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["mocap.h5", "uniform.h5"]


def test_a_truncated_run_file_is_refused(capsys: Capture, job: list[str], tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.h5", tmp_path / "broken.h5"
    result(capsys, "run", *job, "-o", str(whole), "--frames", "3")
    content = whole.read_bytes()
    broken.write_bytes(content[: len(content) // 3])
    assert "broken.h5" in result(capsys, "report", str(broken), code=2)["message"]


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (["--stages", "9"], 2, "UsageError"),
        (["--region", "3x3", "--stages", "2"], 2, "UsageError"),
        (["--kv-tier", "dram"], 2, "ConfigError"),
        (["--activations-tier", "dram"], 2, "ConfigError"),
        (["--set", "policy.partner=nobody"], 2, "ConfigError"),
        (["--set", "policy.partnr=mirror"], 2, "ConfigError"),
        (["--set", "wafer.core.sram_bytes=20000"], 1, "CapacityError"),
        (["--kv-budget", "100"], 1, "CapacityError"),
    ],
)
def test_what_cannot_run_says_so(
    capsys: Capture, config: Path, words: list[str], code: int, kind: str
) -> None:
    base = ["run", "--wafer", "tiny-4x4", "--model", str(config), "--tokens", "96"]
    error = result(capsys, *base, *words, code=code)
    assert error["kind"] == kind
    assert main([*base, *words]) == code
    out, err = capsys.readouterr()
    assert not out
    assert err.strip() == f"error: {error['message']}"


def test_a_model_that_is_too_large_names_core_need_and_remedy(capsys: Capture) -> None:
    words = ["run", "--wafer", "tiny-4x4", "--model", "llama-3-8b", "--tokens", "64"]
    error = result(capsys, *words, code=1)
    assert error["kind"] == "CapacityError"
    assert error["short_bytes"] == error["need_bytes"] - error["capacity_bytes"] > 0
    assert sum(error["items"].values()) == error["need_bytes"]
    assert "what would help" in error["message"]
    assert f"{error['short_bytes']:,} B too many" in error["message"]


def test_the_reference_does_not_fit_but_another_does(capsys: Capture, job: list[str]) -> None:
    limits = ["--policies", "uniform,mbkr", "--chunks", "4", "--kv-budget", "65536"]
    rows = result(capsys, "max-length", *job, *limits)["rows"]
    longer = str(rows[1]["max_tokens"])
    assert int(longer) > rows[0]["max_tokens"]
    at = job.index("--tokens") + 1
    rows = result(capsys, "compare", *job[:at], longer, *job[at + 1 :], *limits)["rows"]
    assert rows[0]["error"]["kind"] == "CapacityError"
    assert rows[1]["reallocated_bytes"] > 0
    assert all(row["latency_ratio"] is row["throughput_ratio"] is None for row in rows)
