"""Predicted against measured, suite by suite, with the identity line."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from wafer_emu.validate import Role, Suite
from wafer_kernels.errors import UsageError

__all__ = ["require_matplotlib", "save_plot"]

MARKS: dict[Role, str] = {"calibrated": "o", "predicted": "^", "exact": "x"}
PANELS_PER_ROW = 4
PANEL_INCHES = 3.4


def require_matplotlib() -> None:
    """UsageError, before any work, if the extra ``plot`` is not installed."""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: install it with pip install 'wafer-emu[plot]'")


def save_plot(suites: Sequence[Suite], path: Path) -> None:
    """Draw one panel a suite; both axes are logarithmic and in the suite's unit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(PANELS_PER_ROW, len(suites))
    down = -(-len(suites) // across)
    figure = Figure(figsize=(PANEL_INCHES * across, PANEL_INCHES * down), layout="constrained")
    FigureCanvasAgg(figure)
    for index, suite in enumerate(suites):
        axes = figure.add_subplot(down, across, index + 1)
        for role, mark in MARKS.items():
            cases = [case for case in suite.cases if case.role == role]
            axes.loglog(
                [case.reference for case in cases],
                [case.emulated for case in cases],
                mark,
                label=role if cases else None,
                fillstyle="none",
            )
        values = [value for case in suite.cases for value in (case.reference, case.emulated)]
        ends = [0.8 * min(values), 1.25 * max(values)]
        axes.plot(ends, ends, color="grey", linewidth=0.8, label="identity")
        error = suite.max_absolute_relative_error
        axes.set(
            title=f"{suite.name}: at most {100 * error:.2g} %",
            xlabel=f"published [{suite.unit}]",
            ylabel=f"emulated [{suite.unit}]",
        )
        axes.title.set_fontsize("small")
        axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=150)
