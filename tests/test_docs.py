"""The Python that the documents show runs as it stands, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHOWN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "document", [each for each in SHOWN if blocks(each)], ids=lambda each: each.name
)
def test_shown_python_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": document.stem}
    for block in blocks(document):
        exec(compile(block, document.name, "exec"), names)


def test_a_policy_takes_twenty_lines() -> None:
    (shown,) = [each for each in blocks(ROOT / "docs/policies.md") if "class " in each]
    lines = shown[shown.index("class ") :].splitlines()
    assert len([line for line in lines if line.strip()]) <= 20
