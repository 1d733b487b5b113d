"""The command line: what it accepts, refuses, prints and returns, without emulating anything."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.wafer_emu.summaries import a_refusal, a_row, a_summary
from wafer_emu.__main__ import main
from wafer_emu.terminal import Ui
from wafer_kernels.errors import CapacityError

EMULATOR = import_module("wafer_emu.emulation")  # its name in the package is also a function's
JOB = ["--wafer", "wse-2", "--model", "llama-3-8b"]
Capture = pytest.CaptureFixture[str]


def parsed(capsys: Capture, *words: str, code: int = 0) -> dict[str, Any]:
    """Document that a command line prints."""
    assert main([*words, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    assert found["schema_version"] == 1
    return found


def refused(capsys: Capture, *words: str, code: int = 2) -> str:
    """Sentence of a refused command line, the same in both forms."""
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    error = parsed(capsys, *words, code=code)["error"]
    assert err.removeprefix("error: ").strip() == error["message"]
    return str(error["message"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `run` asks of the emulator, which answers without work."""
    seen: dict[str, Any] = {}

    def run(wafer: Any, model: Any, workload: Any, policy: str, **rest: Any) -> SimpleNamespace:
        seen.update(wafer=wafer, model=model, workload=workload, policy=policy, **rest)
        return SimpleNamespace(summary=a_summary(policy))

    monkeypatch.setattr(EMULATOR, "emulate", run)
    monkeypatch.setattr("wafer_emu.whole_wafer.emulate", run)
    return seen


def test_run_hands_every_option_over(asked: dict[str, Any], capsys: Capture) -> None:
    words = [
        *("--tokens", "32_768", "--prefix-tokens", "4096", "--requests", "2", "--policy", "mbkr"),
        *("--stages", "8", "--region", "375x248", "--chunks", "12", "--layers", "16"),
        *("--weights-tier", "sram", "--kv-tier", "sram", "--weights-dtype", "int8"),
        *("--activations-tier", "dram"),
        *("--kv-dtype", "float16", "--kv-budget", "1_000_000", "--embedding", "first-stage"),
        *("--placement", "folded-ring", "--no-causal-skip", "--seed", "7", "--frames", "9"),
        "--no-contention",
        *("--set", "wafer.core.sram_bytes=65536", "--set", "model.vocab_size=1000"),
        *("--set", "policy.partner=mirror", "--set", "policy.group_size=2"),
    ]
    assert parsed(capsys, "run", *JOB, *words)["result"]["policy"] == "mbkr"
    options = asked["options"].to_dict()
    assert options == {
        "stages": 8,
        "region": (375, 248),
        "chunks": 12,
        "chunk_tokens": None,
        "chunk_vector": None,
        "layers": 16,
        "weights_tier": "sram",
        "kv_tier": "sram",
        "activations_tier": "dram",
        "weights_dtype": "int8",
        "kv_dtype": "float16",
        "kv_budget": 1_000_000,
        "embedding": "first-stage",
        "placement": "folded-ring",
        "causal_skip": False,
        "contention": False,
        "objective": "latency",
        "search_seconds": 20.0,
        "seed": 7,
        "policy": {"partner": "mirror", "group_size": 2},
    }
    assert asked["wafer"].core.sram_bytes == 65536
    assert asked["model"].vocab_size == 1000
    assert [one.prefix_tokens for one in asked["workload"].requests] == [4096, 4096]
    assert asked["frames"] == 9
    assert asked["record"] is None


def test_run_without_options_has_the_defaults_of_the_emulator(
    asked: dict[str, Any], capsys: Capture
) -> None:
    parsed(capsys, "run", *JOB, "--tokens", "100")
    assert asked["options"] == type(asked["options"])()
    assert (asked["policy"], asked["frames"]) == ("mocap", 64)


def test_a_workload_file_is_read(asked: dict[str, Any], capsys: Capture, tmp_path: Path) -> None:
    trace = tmp_path / "a trace.csv"
    trace.write_text("tokens\n100\n300\n")
    parsed(capsys, "run", *JOB, "--workload", str(trace))
    assert [one.tokens for one in asked["workload"].requests] == [100, 300]


def test_the_report_goes_to_stdout_and_the_warning_to_stderr(
    asked: dict[str, Any], capsys: Capture
) -> None:
    assert main(["run", *JOB, "--tokens", "32768"]) == 0
    out, err = capsys.readouterr()
    assert "llama-3-8b on wse-2" in out
    assert err.count("8,192 positions") == 1
    assert err.startswith("warning: ")
    assert main(["run", *JOB, "--tokens", "32768", "--quiet"]) == 0
    assert not capsys.readouterr().err
    assert main(["run", *JOB, "--tokens", "8192"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["rnu"], ["rnu", 'Did you mean "run"']),
        ([], ["which command?", "demo", "max-length"]),
        (["show"], ["which command?", "wafers"]),
        (["show", "wafres"], ["wafres", "wafers"]),
        (["run", "--tokens", "8"], ["run needs --wafer"]),
        (["run", *JOB], ["--tokens", "--workload"]),
        (["run", *JOB, "--tokens", "8", "--workload", "a.csv"], ["not both"]),
        (["run", *JOB, "--workload", "a.csv", "--requests", "2"], ["--requests", "--tokens"]),
        (["run", *JOB, "--tokens", "8", "--polcy", "mocap"], ["--polcy", "--policy"]),
        (["run", *JOB, "--tokens", "8", "--policy", "mocp"], ["mocp", "mocap"]),
        (["run", *JOB, "--tokens", "8", "surplus"], ["surplus"]),
        (["run", *JOB, "--tokens", "8", "--tokens", "9"], ["--tokens", "multiple"]),
        (["run", *JOB, "--tokens"], ["--tokens"]),
        (["run", *JOB, "--tokens", "8", "--stages", "-1"], ["--stages", "-1"]),
        (["run", *JOB, "--tokens", "8", "--kv-tier", "flash"], ["flash", "sram", "dram"]),
        (["run", *JOB, "--tokens", "8", "--region", "4"], ["'4'", "ROWSxCOLUMNS"]),
        (["run", *JOB, "--tokens", "8", "--region", "0x4"], ["0x4"]),
        (["run", *JOB, "--tokens", "8", "--chunks", "2", "--chunk-tokens", "4"], ["give one"]),
        (["run", *JOB, "--tokens", "8", "--prefix-tokens", "8"], ["prefix_tokens"]),
        (["run", *JOB, "--tokens", "8", "--set", "core=1"], ["--set core=1", "wafer.PATH=VALUE"]),
        (["run", *JOB, "--tokens", "8", "--set", "wafer.core.srm_bytes=1"], ["sram_bytes"]),
        (["run", "--wafer", "wse-22", "--model", "llama-3-8b", "--tokens", "8"], ["wse-2"]),
        (["run", "--wafer", "wse-2", "--model", "lama-3-8b", "--tokens", "8"], ["llama-3-8b"]),
        (["compare", *JOB, "--tokens", "8", "--policies", "gpipe,,mocap"], ["a,b,c"]),
        (["compare", *JOB, "--tokens", "8", "--policies", "gpipe,gpipe"], ["different"]),
        (["compare", *JOB, "--tokens", "8", "--policies", "gpipe,mcap"], ["mcap", "mocap"]),
        (["compare", *JOB, "--tokens", "8"], ["--policies"]),
        (["max-length", *JOB, "--policies", "nobody"], ["nobody"]),
        (["report", "nowhere.h5"], ["nowhere.h5"]),
        (["tile", "-m", "8", "-n", "8", "-k", "8"], ["--array", "--wafer"]),
        (["tile", "-m", "0", "-n", "8", "-k", "8", "--array", "4x4"], ["-m", "'0'"]),
        (["gemm", "-m", "8", "-n", "8", "-k", "8", "--wafer", "tiny-4x4", "--grid", "5x4"],
         ["5x4", "tiny-4x4", "4x4"]),
        (["gemm", "-m", "8", "-n", "8", "-k", "8", "--wafer", "tiny-4x4", "--grid", "4x4",
          "--algorithm", "magic"], ["magic", "meshgemm"]),
        (["show", "wafer", "wse-9"], ["wse-9"]),
        (["show", "model", "no-such-model"], ["no-such-model"]),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence(capsys: Capture, words: list[str], parts: list[str]) -> None:
    sentence = refused(capsys, *words)
    for part in parts:
        assert part in sentence


@pytest.mark.parametrize(
    "written", ["0", "-5", "1.5", "1e3", "", " 8", "8 ", "0x10", "1__0", "_1", "nan", "٣",
                "16777217", "9" * 5000],
)  # fmt: skip
def test_a_count_is_digits_within_a_limit(capsys: Capture, written: str) -> None:
    sentence = refused(capsys, "run", *JOB, f"--tokens={written}")
    assert "--tokens" in sentence
    assert written == "" or "whole number from 1 to 16,777,216" in sentence


def test_a_count_at_its_limit_is_accepted(asked: dict[str, Any], capsys: Capture) -> None:
    parsed(capsys, "run", *JOB, "--tokens", "16_777_216")
    assert asked["workload"].requests[0].tokens == 16_777_216


@pytest.mark.parametrize("name", ["missing/run.h5", "."])
def test_an_unwritable_file_is_refused_before_the_work(
    asked: dict[str, Any], capsys: Capture, tmp_path: Path, name: str
) -> None:
    for command in (["run"], ["demo"]):
        words = [*command, *(JOB if command == ["run"] else [])]
        words += ["--tokens", "8"] if command == ["run"] else []
        target = tmp_path / name if command == ["run"] else Path("/dev/null/folder")
        sentence = refused(capsys, *words, "-o", str(target))
        assert str(target) in sentence
    assert not asked
    assert not list(tmp_path.iterdir())


def rows_of(rows: Sequence[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let `compare` find these rows; what it was asked."""
    seen: dict[str, Any] = {}

    def compare(*subject: Any, **rest: Any) -> list[dict[str, Any]]:
        seen.update(policies=subject[3], **rest)
        return list(rows)

    monkeypatch.setattr(EMULATOR, "compare", compare)
    return seen


@pytest.mark.usefixtures("asked")
def test_compare_succeeds_if_one_policy_ran(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [a_row("gpipe", 1.0), a_refusal("terapipe")]
    seen = rows_of(rows, monkeypatch)
    words = ["compare", *JOB, "--tokens", "8", "--policies", "gpipe, terapipe"]
    found = parsed(capsys, *words, "-o", str(tmp_path))["result"]
    assert found["rows"] == rows
    assert found["whole_wafer"]["policy"] == "layerwise"
    assert seen["policies"] == ("gpipe", "terapipe")
    assert seen["record"]("terapipe") == tmp_path / "terapipe.h5"
    assert main(words) == 0
    assert "terapipe refuses" in capsys.readouterr().out


def test_compare_fails_if_none_ran(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [a_refusal("gpipe"), a_refusal("terapipe")]
    rows_of(rows, monkeypatch)
    words = ["compare", *JOB, "--tokens", "8", "--policies", "gpipe,terapipe"]
    found = parsed(capsys, *words, code=1)
    assert found["result"] == {"rows": rows}
    assert found["error"]["kind"] == "CapacityError"
    assert "gpipe: stage 7 does not fit" in refused(capsys, *words, code=1)


@pytest.mark.usefixtures("asked")
def test_demo_compares_then_takes_a_prompt_between_terapipe_and_mocap(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    longest = {"terapipe": 50_000, "mocap": 60_000}
    asked_for: list[tuple[int, tuple[str, ...], bool]] = []

    def compare(*subject: Any, record: Any = None, **_: Any) -> list[dict[str, Any]]:
        tokens = subject[2].requests[0].tokens
        asked_for.append((tokens, tuple(subject[3]), record is not None))
        fits = [name for name in subject[3] if tokens <= longest.get(name, tokens)]
        return [a_row(name, 1.0) if name in fits else a_refusal(name) for name in subject[3]]

    def max_length(*subject: Any, **_: Any) -> list[dict[str, Any]]:
        limit = {"stage": 1, "tier": "sram", "short_bytes": 4}
        common = {"ratio": 1.0, "limiting": limit}
        return [{"policy": k, "max_tokens": longest.get(k, 9), **common} for k in subject[2]]

    monkeypatch.setattr(EMULATOR, "compare", compare)
    monkeypatch.setattr(EMULATOR, "max_length", max_length)
    folder = tmp_path / "new" / "runs"
    found = parsed(capsys, "demo", "-o", str(folder))["result"]
    policies = ("gpipe", "uniform", "terapipe", "lbcp", "mbkr", "mocap")
    tokens = 55_000 // 1024 * 1024
    # The two run beside each other, so that either may begin.
    assert sorted(asked_for) == [
        (32_768, policies, True), (tokens, ("terapipe", "mbkr", "mocap"), False)
    ]  # fmt: skip
    assert found["long_prompt"]["tokens"] == tokens
    assert found["files"] == {name: str(folder / f"{name}.h5") for name in policies}
    assert main(["demo", "-o", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "A prompt that terapipe cannot hold: 54,272 tokens" in text
    assert "terapipe refuses" in text
    longest["mocap"] = 50_000
    assert parsed(capsys, "demo", "-o", str(folder))["result"]["long_prompt"]["tokens"] is None
    assert main(["demo", "-o", str(folder)]) == 0
    assert "No prompt fits under mocap" in capsys.readouterr().out


def test_max_length_says_which_options_it_does_not_use(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"policy": "mocap", "max_tokens": 9, "ratio": 1.0, "limiting": {"message": "full"}}]
    monkeypatch.setattr(EMULATOR, "max_length", lambda *_, **__: rows)
    words = ["max-length", *JOB, "--policies", "mocap"]
    assert parsed(capsys, *words)["result"] == {"rows": rows}
    assert main([*words, "--tokens", "96"]) == 0
    out, err = capsys.readouterr()
    assert "9 tokens" in out
    assert "--prefix-tokens" in err


@pytest.mark.parametrize(
    ("raised", "code", "kind", "words"),
    [
        (KeyboardInterrupt(), 130, "KeyboardInterrupt", "interrupted"),
        (CapacityError("full", core=[1, 2]), 1, "CapacityError", "full"),
        (PermissionError(13, "Permission denied", "x.h5"), 2, "FileError", "x.h5: Permission"),
        (MemoryError(), 1, "MemoryError", "memory of this computer"),
    ],
)
def test_failures_of_the_work(
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    code: int,
    kind: str,
    words: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(EMULATOR, "emulate", fail)
    job = ["run", *JOB, "--tokens", "8"]
    assert words in refused(capsys, *job, code=code)
    found = parsed(capsys, *job, code=code)
    assert (found["command"], found["error"]["kind"]) == ("run", kind)
    assert found["error"].get("core") == ([1, 2] if kind == "CapacityError" else None)


def test_a_fault_of_ours_keeps_its_trace_and_still_makes_a_document(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EMULATOR, "emulate", lambda *_, **__: 1 // 0)
    assert main(["run", *JOB, "--tokens", "8", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["kind"] == "ZeroDivisionError"
    assert "Traceback" in err
    with pytest.raises(ZeroDivisionError):
        main(["run", *JOB, "--tokens", "8"])


def test_the_command_of_a_document_is_null_without_one(capsys: Capture) -> None:
    for words in ([], ["rnu"], ["--tokens", "8"]):
        found = parsed(capsys, *words, code=2)
        assert found["command"] is None
        assert found["error"]["kind"] == "UsageError"
    assert parsed(capsys, "show", code=2)["command"] == "show"


def test_tile_agrees_with_the_closed_form(capsys: Capture) -> None:
    words = ["tile", "-m", "8", "-n", "8", "-k", "8", "--array", "4x4", "--dataflow", "os"]
    found = parsed(capsys, *words)["result"]
    assert found["cycles"] == 2 * 2 * (8 + 4 + 4 - 2)
    assert found["macs"] == 512
    assert found["utilization"] == 512 / (16 * found["cycles"])
    assert main(words) == 0
    assert "57.1 %" in capsys.readouterr().out


def test_gemm_takes_the_wafers_core_and_links(capsys: Capture) -> None:
    words = ["gemm", "-m", "64", "-n", "64", "-k", "64", "--wafer", "tiny-4x4", "--grid", "4x4"]
    found = parsed(capsys, *words)["result"]
    assert found["macs"] == 64**3
    assert found["steps"] == 4
    assert found["cycles"] >= found["busiest_core_cycles"] > 0
    assert found["utilization"] == found["macs"] / (16 * 64 * found["cycles"])
    aligned = parsed(capsys, *words, "--align-a")["result"]
    assert aligned["cycles"] == found["cycles"] + aligned["alignment_cycles"]


def test_a_grid_over_the_edge_of_a_die_is_slower(capsys: Capture) -> None:
    words = ["gemm", "-m", "64", "-n", "64", "-k", "64", "--wafer", "wsc-54", "--grid"]
    inside = parsed(capsys, *words, "16x16")["result"]
    across = parsed(capsys, *words, "16x17")["result"]
    assert across["longest_stall_cycles"] > inside["longest_stall_cycles"]
    assert across["cycles"] > inside["cycles"]


def test_show_lists_everything_that_is_shipped(capsys: Capture) -> None:
    import mocap
    from wafer_emu.model import Model
    from wafer_emu.wafer import Wafer

    for what, names in (
        ("wafers", Wafer.presets()),
        ("models", Model.presets()),
        ("policies", mocap.names()),
    ):
        rows = parsed(capsys, "show", what)["result"][what]
        assert [row["name"] for row in rows] == names
        assert main(["show", what]) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in names)
        assert max(map(len, out.splitlines())) <= 80


def test_show_gives_the_provenance_of_every_value(capsys: Capture) -> None:
    from wafer_emu.wafer import Wafer

    values = parsed(capsys, "show", "wafer", "wse-2")["result"]["values"]
    assert [one["path"] for one in values] == Wafer.preset("wse-2").paths()
    grades = {"published", "derived", "assumed", "calibrated"}
    assert {one["grade"] for one in values} <= grades
    assert all(one["source"] for one in values)
    assert main(["show", "wafer", "wse-2"]) == 0
    assert "49,152" in capsys.readouterr().out


def test_show_model_adds_up_the_kv_and_tells_stated_from_implied(capsys: Capture) -> None:
    found = parsed(capsys, "show", "model", "llama-3-8b")["result"]
    assert found["kv_arithmetic"] == [
        "2 (key, value) x kv_heads 8 x head_dim 128 = 2,048 elements a layer",
        "2,048 x 2 B (bfloat16) = 4,096 B a layer",
        "4,096 B x 32 layers = 131,072 B a token",
        "131,072 B x 32,768 tokens = 4,294,967,296 B (4.000 GiB)",
    ]
    grades = {one["path"]: one["grade"] for one in found["values"]}
    assert grades["hidden_size"] == grades["kv_heads"] == grades["rope.theta"] == "published"
    assert grades["head_dim"] == grades["qk_norm"] == "derived"
    assert main(["show", "model", "deepseek-v3"]) == 0
    assert "kv_lora_rank 512 + qk_rope_head_dim 64 = 576" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["demo", "-h"], ["--version"]])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    script = (
        "import sys; from wafer_emu.__main__ import main; code = main(sys.argv[1:]); "
        "heavy = {'numpy', 'numba', 'xarray', 'h5py'} & set(sys.modules); "
        "sys.exit(code or repr(heavy) if heavy or code else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_help_promises_only_what_is_there(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("demo", "run", "compare", "max-length", "tile", "gemm", "show", "report"):
        assert command in text
        assert main([command, "--help"]) == 0
        assert "--empty" not in capsys.readouterr().out


def test_a_reader_that_stops_early_gets_no_trace() -> None:
    pipe = f"{sys.executable} -m wafer_emu show model deepseek-v3 --json | head -1"
    done = subprocess.run(pipe, shell=True, capture_output=True, text=True)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_full_disk_under_stdout_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "wafer_emu", "show", "wafers"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: the result cannot be written")
    assert "Traceback" not in done.stderr


def test_progress_off_a_terminal_is_a_line_now_and_then(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Ui() as ui, Ui(quiet=True) as quiet:
        for now in (1.0, 11.0, 12.0, 25.0):
            ui.progress("mocap: run", now / 100)
            quiet.progress("mocap: run", now / 100)
    assert capsys.readouterr().err == "[11 s] mocap: run 11 %\n[25 s] mocap: run 25 %\n"


def test_progress_on_a_terminal_is_a_bar(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with Ui() as ui:
        ui.progress("mocap: run", 0.5)
        ui.warn("careful")
    err = capsys.readouterr().err
    assert "mocap: run" in err
    assert "warning: careful" in err
