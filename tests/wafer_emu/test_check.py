"""The check of plans on real numbers: what passes, what fails, what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.wafer_emu.numeric_cases import (
    CONFIGS,
    SMALL,
    TINY,
    expected,
    model_of,
    prompt,
    weights_of,
)
from wafer_emu.__main__ import main
from wafer_emu.check import TOLERANCE, Question, check, compare_values
from wafer_emu.options import Options
from wafer_kernels.errors import UsageError

KEYS = {
    "policy",
    "max_absolute_error",
    "max_relative_error",
    "argmax_equal",
    "reallocated_bytes",
    "passed",
}
TOKENS = 40


def rows_of(
    policies: list[str], options: Options | None = None, **asked: Any
) -> list[dict[str, Any]]:
    model = model_of("llama-gqa")
    question = Question(prompt(model, TOKENS), **asked)
    answers = check(TINY, model, weights_of(model), question, policies, options or Options())
    return list(answers)


def test_policies_that_can_move_kv_do() -> None:
    rows = rows_of(["uniform", "mbkr", "mocap", "layerwise"])
    assert all(set(row) >= KEYS and row["passed"] for row in rows)
    assert [row["reallocated_bytes"] > 0 for row in rows] == [False, True, True, False]


def test_it_fails_if_nothing_moved() -> None:
    (row,) = rows_of(["mocap"], Options(policy={"trigger": "overflow"}))
    assert row["max_relative_error"] <= TOLERANCE["float32"]
    assert not row["passed"]


def test_a_policy_that_does_not_fit_keeps_its_row() -> None:
    small = TINY.replace({"core.sram_bytes": 12_000})
    model = model_of("llama-gqa")
    question = Question(prompt(model, TOKENS))
    (row,) = check(small, model, weights_of(model), question, ["gpipe"], Options(stages=1))
    assert row["error"]["kind"] == "CapacityError"
    assert not row["passed"]


def test_a_reused_prefix_is_compared_on_the_suffix() -> None:
    assert all(row["passed"] for row in rows_of(["uniform", "mocap"], prefix_tokens=17))


def test_scores_and_embeddings_are_those_of_the_dense_reference() -> None:
    model = model_of("llama-gqa")
    wanted = expected(model, TOKENS)
    shares = np.exp(wanted.logits[-1].astype(np.float64))
    shares /= shares.sum()
    for pool, embedding in (("last", wanted.hidden[-1]), ("mean", wanted.hidden.mean(axis=0))):
        (row,) = rows_of(["lbcp"], score=(3, 9), pool=pool)
        assert row["scores"] == pytest.approx({"3": shares[3], "9": shares[9]}, rel=1e-4)
        np.testing.assert_allclose(row["embedding"], embedding, atol=1e-4)
    with pytest.raises(UsageError, match="0 to 69"):
        rows_of(["lbcp"], score=(70,))


def test_errors_by_hand() -> None:
    wanted = np.array([[1.0, -4.0, 2.0], [0.5, 0.5, 0.0]], np.float32)
    found = wanted + np.array([[0.0, 0.02, 0.0], [0.0, 0.01, 0.0]], np.float32)
    assert compare_values(found, wanted, 1e-3) == {
        "max_absolute_error": pytest.approx(0.02, rel=1e-4),
        "max_relative_error": pytest.approx(0.005, rel=1e-4),
        "argmax_equal": True,  # the tie of the second token does not count
    }
    found[0, 0] = 3
    assert not compare_values(found, wanted, 1e-3)["argmax_equal"]
    found[0, 0] = np.nan
    assert compare_values(found, wanted, 1e-3)["max_relative_error"] == np.inf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {**SMALL, **CONFIGS["qwen2"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def asked(folder: Path, *words: str) -> list[str]:
    return ["check", "--model", str(folder), "--wafer", "tiny-4x4", "--tokens", "33", *words]


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = asked(folder, "--policies", "gpipe,mocap", "--score", "1,2", "--pool", "mean")
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["result"]["rows"]
    assert [row["policy"] for row in rows] == ["gpipe", "mocap"]
    assert all(set(row) >= KEYS for row in rows)
    assert len(rows[0]["embedding"]) == SMALL["hidden_size"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "passed" in out
    assert "1: 0.0" in out
    assert "embedding of 24 values" in out


def test_command_fails_with_a_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = asked(folder, "--policies", "uniform,mocap", "--set", "policy.trigger='overflow'")
    assert main([*words, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["error"]["kind"] == "KernelError"
    assert [row["passed"] for row in document["result"]["rows"]] == [True, False]
    assert main(words) == 1
    assert "mocap: no KV moved" in capsys.readouterr().err


def test_command_reads_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of a folder give another answer than drawn ones, and both pass."""
    safetensors = pytest.importorskip("safetensors.numpy")
    words = asked(folder, "--policies", "lbcp", "--score", "5", "--json")
    scores = []
    for _ in range(2):
        assert main(words) == 0
        row = json.loads(capsys.readouterr().out)["result"]["rows"][0]
        scores.append(row["scores"]["5"])
        model = model_of("qwen2")
        safetensors.save_file(weights_of(model), folder / "model.safetensors")
    assert scores[0] != scores[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policies", "mocap", "--prefix-tokens", "33"], "leaves nothing"),
        (["--policies", "mokap"], "mocap"),
        (["--policies", "mocap", "--score", "1,x"], "token ids"),
        (["--policies", "mocap", "--set", 'model.dtype="int8"'], "int8"),
    ],
)
def test_wrong_command_lines(
    folder: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked(folder, *words)) == 2
    out, err = capsys.readouterr()
    assert not out
    assert said in err
