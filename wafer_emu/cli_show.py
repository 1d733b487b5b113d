"""Commands that show what is shipped: wafers, models, policies, and where each value comes from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from wafer_emu import quantities
from wafer_emu.cli_options import Output
from wafer_emu.terminal import Answer, Ui

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wafer_emu.model import Model
    from wafer_emu.wafer import Wafer

__all__ = ["show"]

Terminal = Annotated[Ui, Parameter(parse=False)]
GRADES = {"published": "green", "derived": "cyan", "calibrated": "magenta", "assumed": "yellow"}

show = App(name="show", help="Show wafers, models and policies, and where each value comes from.")


@show.command
def wafers(output: Output | None = None, *, ui: Terminal) -> Answer:
    """List the wafers."""
    from wafer_emu.wafer import Wafer

    rows = [_wafer_row(Wafer.preset(name)) for name in Wafer.presets()]
    shown = [
        (
            row["name"],
            f"{row['dies']:,}",
            f"{row['core_rows']}x{row['core_columns']}",
            quantities.size(row["sram_bytes_per_core"]),
            quantities.size(row["sram_bytes"]),
            quantities.size(row["dram_bytes"] or None),
            quantities.rate(row["peak_macs_per_second"] / 1e12, ""),
        )
        for row in rows
    ]
    headings = ("wafer", "dies", "cores", "SRAM/core", "SRAM", "DRAM", "TMAC/s")
    return Answer({"wafers": rows}, lambda: _listing(headings, shown))


@show.command
def models(output: Output | None = None, *, ui: Terminal) -> Answer:
    """List the models."""
    from wafer_emu.model import Model

    rows = [_model_row(Model.preset(name)) for name in Model.presets()]
    shown = [
        (
            row["name"],
            row["model_type"],
            f"{row['layers']}",
            f"{row['hidden_size']:,}",
            f"{row['heads']}/{row['kv_heads']}",
            f"{row['parameters'] / 1e9:,.1f} G",
            quantities.size(row["kv_bytes_per_token"]),
            quantities.count(row["max_positions"]),
        )
        for row in rows
    ]
    headings = ("model", "type", "layers", "hidden", "heads/kv", "weights", "KV/token", "positions")
    return Answer({"models": rows}, lambda: _listing(headings, shown))


@show.command
def policies(output: Output | None = None, *, ui: Terminal) -> Answer:
    """List the policies with their options."""
    import mocap.policy

    rows: list[dict[str, Any]] = []
    for name in mocap.policy.names():
        policy = mocap.policy.get(name)
        rows.append(
            {
                "name": name,
                "summary": policy.summary,
                "stage_count": policy.stage_count,
                "kv_lifetime": policy.kv_lifetime,
                "uses": sorted(policy.uses),
                "options": policy.options(),
            }
        )
    shown = [
        (
            row["name"],
            row["summary"],
            ", ".join(
                f"{option}={'none' if value is None else value}"
                for option, value in row["options"].items()
            ),
        )
        for row in rows
    ]
    headings = ("policy", "what it does", "--set policy.NAME=VALUE")
    return Answer({"policies": rows}, lambda: _listing(headings, shown, headings))


@show.command
def wafer(name: str, /, output: Output | None = None, *, ui: Terminal) -> Answer:
    """Show every value of a wafer and where it comes from.

    Parameters
    ----------
    name
        Name of a preset, or FILE.toml.
    """
    from wafer_emu.wafer import Wafer

    chosen = Wafer.load(name)
    plain = chosen.to_dict()
    values = []
    for path in chosen.paths():
        grade, _, source = chosen.provenance_of(path).partition(": ")
        value = _at(plain, path)
        values.append({"path": path, "value": value, "grade": grade, "source": source})
    title = f"{chosen.name}: {chosen.title}"
    result = {**_wafer_row(chosen), "values": values}
    return Answer(result, lambda: _sheet(title, values))


@show.command
def model(name: str, /, output: Output | None = None, *, ui: Terminal) -> Answer:
    """Show every value of a model, where it comes from, and how its KV adds up.

    Parameters
    ----------
    name
        Name of a preset, a Hugging Face config.json, or its folder.
    """
    from wafer_emu.model import Model
    from wafer_emu.model_sheet import kv_arithmetic, model_values

    chosen = Model.load(name)
    values, arithmetic = model_values(name, chosen), kv_arithmetic(chosen)
    result = {**_model_row(chosen), "values": values, "kv_arithmetic": arithmetic}
    title = f"{chosen.name}: {chosen.model_type}, {chosen.parameters:,} parameters"
    return Answer(result, lambda: _sheet(title, values, arithmetic))


def _wafer_row(wafer: Wafer) -> dict[str, Any]:
    return {
        "name": wafer.name,
        "title": wafer.title,
        "dies": wafer.dies,
        "core_rows": wafer.core_rows,
        "core_columns": wafer.core_columns,
        "cores": wafer.cores,
        "sram_bytes_per_core": wafer.core.sram_bytes,
        "sram_bytes": wafer.sram_capacity_bytes,
        "dram_bytes": wafer.dram_capacity_bytes,
        "peak_macs_per_second": wafer.peak_macs_per_second,
    }


def _model_row(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "model_type": model.model_type,
        "layers": model.layers,
        "hidden_size": model.hidden_size,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "parameters": model.parameters,
        "kv_bytes_per_token": model.kv_bytes_per_token(),
        "max_positions": model.max_positions,
    }


def _at(table: Any, path: str) -> object:
    for name in path.split("."):
        table = table[name]
    return table


def _listing(
    headings: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = ()
) -> RenderableType:
    from rich.padding import Padding

    from wafer_emu.report import figures_table

    return Padding(figures_table(headings, rows, words), (1, 0, 0, 0))


def _sheet(
    title: str, values: Sequence[Mapping[str, Any]], closing: Sequence[str] = ()
) -> RenderableType:
    """Values grouped by what they come from: name and value, then grade and source."""
    from itertools import groupby

    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(title, "bold")]
    for (grade, source), alike in groupby(values, key=lambda one: (one["grade"], one["source"])):
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=34)
        table.add_column(overflow="fold")
        for one in alike:
            value = one["value"]
            exact = isinstance(value, int) and not isinstance(value, bool)
            table.add_row(one["path"], f"{value:,}" if exact else str(value))
        parts += [Text(), table]
        parts.append(
            Padding(Text.assemble((grade, GRADES[grade]), f": {source}", style="dim"), (0, 0, 0, 4))
        )
    if closing:
        parts += [Text("\nKV of a token", "bold"), Text("\n".join(f"  {line}" for line in closing))]
    return Group(*parts)
