"""Figures of the reproduction: real pictures, with something on labelled axes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools import mocap_figures as figures
from tools.mocap_links import HIDDEN, KEPT, MOVED, SERIAL

WHO: dict[str, Any] = {"model": "m", "N": 8, "M": 8}
ROWS: dict[str, list[dict[str, Any]]] = {
    "claims": [
        {**WHO, "tokens": 1024, "throughput ratio": 4.1, "ideal": 4.27},
        {**WHO, "tokens": 4096, "binds": "stage 0: 1 B short on a core"},
    ],
    "ablation": [
        {**WHO, "tokens": 1024, "gpipe [s]": None, "uniform [s]": 2.0, "mocap [s]": 1.0},
        {**WHO, "tokens": 2048, "gpipe [s]": 8.0, "uniform [s]": 3.0, "mocap [s]": 2.0},
    ],
    "coupling": [
        {
            **WHO,
            "tokens": 1024,
            "first half of LBCP's chunks [%]": 55.0,
            "pairs, uniform cuts": 1.333,
            "pairs, LBCP cuts": 1.29,
        }
    ],
    "bounds": [{"N": 8, "M": 8, "pairs, stream": 1.33, "pairs, equal times": 1.2}],
    "ledger": [
        {**WHO, "policy": "uniform", "longest": 100},
        {**WHO, "policy": "mocap", "longest": 0},
    ],
    "bandwidth": [
        {"model": "m", "layout": "N = 8, M = 8", "tokens": 9, "die link [GB/s]": rate,
         HIDDEN: 0.0, SERIAL: 9 / rate, MOVED: 2.0, KEPT: kept}
        for rate, kept in ((1, None), (10, 1.0))
    ],
}  # fmt: skip


@pytest.mark.parametrize("section", figures.PANELS)
def test_a_picture_of_every_section(section: str, tmp_path: Path) -> None:
    path = figures.draw(section, ROWS[section], tmp_path)
    assert path == tmp_path / f"{section}.png"
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 300 < height
    assert len(data) < 100_000


@pytest.mark.parametrize("section", figures.PANELS)
def test_axes_have_units_and_something_on_them(section: str) -> None:
    axes: Axes = Figure().add_subplot()
    panel, needed = figures.PANELS[section]
    panel(axes, [row for row in ROWS[section] if row.get(needed) is not None])
    assert axes.has_data()
    assert axes.get_xlabel()
    assert axes.get_ylabel().endswith("]")
    low, high = axes.get_ylim()
    assert low < high


def test_panels_are_one_a_wafer_and_model() -> None:
    rows = [{**WHO, "wafer": w, "model": m} for w in "ab" for m in "xy"]
    assert list(figures._panels("claims", rows)) == ["a, x", "a, y", "b, x", "b, y"]


def test_what_has_no_rows_has_no_picture(tmp_path: Path) -> None:
    assert figures.draw("claims", [{"binds": "memory"}], tmp_path) is None
    assert figures.draw("crossover", [{"model": "m"}], tmp_path) is None
    assert not list(tmp_path.iterdir())
