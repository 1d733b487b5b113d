"""The command that holds the emulator against what others measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from wafer_emu.cli_options import Output
from wafer_emu.cli_values import Name, require_writable
from wafer_emu.quantities import percent
from wafer_emu.terminal import Answer, Ui

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from wafer_emu.validate import Suite

__all__ = ["validate"]

SHOWN = 12  # cases of a suite that the report lists; of more, the worst


def validate(
    output: Output | None = None,
    *,
    suite: Annotated[tuple[Name, ...], Parameter(negative=(), metavar="NAME")] = (),
    plot: Annotated[Path | None, Parameter(metavar="FILE.png")] = None,
    ui: Annotated[Ui, Parameter(parse=False)],
) -> Answer:
    """Hold the emulator against published measurements and oracles, row by row.

    Parameters
    ----------
    suite
        systolic, collectives, noc-latency, waferllm-prefill, wse3-chunked-prefill,
        pipeline-identity or sram-footprint. Repeatable. Default: all.
    plot
        Draw emulated against published values in this picture.
    """
    from wafer_emu.validate import SUITES
    from wafer_emu.validate import validate as emulate_suites

    if plot is not None:
        from wafer_emu.validate_plot import require_matplotlib

        require_matplotlib()
        require_writable(plot)
    suites = list(emulate_suites(suite or SUITES, ui.progress))
    if plot is not None:
        from wafer_emu.validate_plot import save_plot

        save_plot(suites, plot)
    return Answer({"suites": [each.to_dict() for each in suites]}, lambda: _report(suites))


def _report(suites: Sequence[Suite]) -> RenderableType:
    """One table a suite, and a line with its errors."""
    from rich.console import Group
    from rich.text import Text

    from wafer_emu.report import heading, notes

    parts: list[RenderableType] = []
    for suite in suites:
        worst = sorted(suite.cases, key=lambda case: -abs(case.relative_error))
        shown = [case for case in suite.cases if case in worst[:SHOWN]]
        rows = [
            (
                case.case,
                f"{case.reference:,.6g}",
                f"{case.emulated:,.6g}",
                f"{100 * case.relative_error:+.3f} %",
                case.role,
            )
            for case in shown
        ]
        left_out = len(suite.cases) - len(shown)
        more = f"; {left_out} more cases, none worse" if left_out else ""
        parts += [
            heading(f"{suite.name} [{suite.unit}]"),
            Text(f"against {suite.source}", "dim"),
            _table(rows),
            Text(
                f"mean {percent(suite.mean_absolute_relative_error)}, largest "
                f"{percent(suite.max_absolute_relative_error)}{more}"
            ),
            notes(suite.notes),
        ]
    return Group(*parts)


def _table(rows: Sequence[Sequence[str]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("case", overflow="fold")
    for title in ("published", "emulated", "error"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("role", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
