"""Figures of the reproduction: one picture a section, one panel a model (and wafer)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.mocap_links import HIDDEN, KEPT, MOVED, PRICE_PERCENT, SERIAL
from tools.tables import Row
from wafer_kernels.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "require_matplotlib"]

PANELS_PER_ROW = 3
PANEL_INCHES = (4.6, 3.6)
MARKS = "osd^vP"
LEAST_PERCENT = 1e-3  # prices below are drawn there: a logarithmic axis has no 0


def require_matplotlib() -> None:
    """UsageError, before any work, if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise UsageError("--figures needs matplotlib: pip install 'wafer-emu[plot]'")


def draw(section: str, rows: Sequence[Row], folder: Path) -> Path | None:
    """Draw a section's rows into ``folder``; None if it has no picture, or no row to show."""
    if section not in PANELS:
        return None
    panel, needed = PANELS[section]
    rows = [row for row in rows if row.get(needed) is not None]
    if not rows:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(section, rows)
    across = min(PANELS_PER_ROW, len(panels))
    down = -(-len(panels) // across)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, some) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, place + 1)
        axes.set_title(title, fontsize="small")
        panel(axes, some)
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize="x-small", ncols=2 if len(axes.containers) > 4 else 1)
    path = folder / f"{section}.png"
    figure.savefig(path, dpi=100)
    return path


def _panels(section: str, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each panel, by its title."""
    parts = ("wafer", "model", "layout") if section == "bandwidth" else ("wafer", "model")
    panels: dict[str, list[Row]] = {}
    for row in rows:
        title = ", ".join(str(row[part]) for part in parts if part in row)
        if section == "bandwidth":
            title += f", {row['tokens']:,} tokens"
        panels.setdefault(title, []).append(row)
    return panels


def _layouts(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """(name, mark, rows) of each (stages, chunks)."""
    layouts = list(dict.fromkeys((row["N"], row["M"]) for row in rows))
    for (stages, chunks), mark in zip(layouts, MARKS, strict=False):
        some = [row for row in rows if (row["N"], row["M"]) == (stages, chunks)]
        yield f"N = {stages}, M = {chunks}", mark, some


def _by_tokens(axes: Axes, rows: Sequence[Row]) -> None:
    """Prompt lengths along x, as powers of two are read."""
    ticks = sorted({row["tokens"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks], fontsize="x-small")
    axes.set_xlabel("prompt [tokens]")


def _claims(axes: Axes, rows: Sequence[Row]) -> None:
    for name, mark, some in _layouts(rows):
        tokens = [row["tokens"] for row in some]
        line = axes.plot(tokens, [row["throughput ratio"] for row in some], mark, label=name)[0]
        axes.axhline(some[0]["ideal"], color=line.get_color(), linewidth=0.8, linestyle="--")
    axes.plot([], [], color="grey", linewidth=0.8, linestyle="--", label="ideal N M / (N + M - 1)")
    _by_tokens(axes, rows)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("throughput, mocap over gpipe [x]")


def _ablation(axes: Axes, rows: Sequence[Row]) -> None:
    policies = [head for head in rows[0] if head.endswith(" [s]")]
    labels = [f"{row['tokens'] // 1024}k\n{row['N']}, {row['M']}" for row in rows]
    latencies = {head.removesuffix(" [s]"): [row.get(head) for row in rows] for head in policies}
    _bars(axes, labels, latencies)
    axes.set_yscale("log")
    axes.set_xlabel("prompt [tokens]; stages, chunks")
    axes.set_ylabel("latency [s]")


def _bars(axes: Axes, labels: Sequence[str], heights: dict[str, list[Any]]) -> None:
    """Bars side by side; what is absent has none."""
    width = 0.8 / len(heights)
    for place, (name, values) in enumerate(heights.items()):
        left = [k + (place - (len(heights) - 1) / 2) * width for k in range(len(values))]
        axes.bar(left, [value or 0 for value in values], width, label=name)
    axes.set_xticks(range(len(labels)), labels, fontsize="xx-small")


def _coupling(axes: Axes, rows: Sequence[Row]) -> None:
    head = "first half of LBCP's chunks [%]"
    ends = [50.0, max(55.0, *(row[head] for row in rows))]
    steps = [ends[0] + (ends[1] - ends[0]) * k / 50 for k in range(51)]
    axes.plot(
        steps, [2 / (1 + f / 100) for f in steps], "grey", linewidth=0.8, label="2 / (1 + f), M = N"
    )
    for name, mark, some in _layouts(rows):
        shares = [row[head] for row in some]
        axes.plot(shares, [row["pairs, LBCP cuts"] for row in some], mark, label=f"LBCP, {name}")
        line = axes.lines[-1]
        even = some[0]["pairs, uniform cuts"]
        axes.plot([50], [even], mark, color=line.get_color(), fillstyle="none")
        for row, share in zip(some, shares, strict=True):
            where = (share, row["pairs, LBCP cuts"])
            axes.annotate(f"{row['tokens'] // 1024}k", where, (3, 3), textcoords="offset points",
                          fontsize="xx-small")  # fmt: skip
    axes.plot([], [], "o", color="grey", fillstyle="none", label="uniform cuts")
    axes.set_xlabel("f: tokens in the first half of the chunks [%]")
    axes.set_ylabel("longest prompt with pairs, over none [x]")


def _bounds(axes: Axes, rows: Sequence[Row]) -> None:
    kinds = [head for head in rows[0] if head.endswith((", stream", "times"))]
    labels = [f"N = {row['N']}\nM = {row['M']}" for row in rows]
    _bars(axes, labels, {kind: [row[kind] for row in rows] for kind in kinds})
    axes.set_ylim(bottom=1)
    axes.set_xlabel("stages, chunks")
    axes.set_ylabel("longest prompt over no moves [x]")


def _ledger(axes: Axes, rows: Sequence[Row]) -> None:
    layouts = list(_layouts(rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    found = {(name, row["policy"]): row["longest"] for name, _, some in layouts for row in some}
    labels = [name.replace(", ", "\n") for name, _, _ in layouts]
    _bars(axes, labels, {p: [found.get((name, p)) for name, _, _ in layouts] for p in policies})
    axes.set_ylim(top=1.5 * max(row["longest"] for row in rows) or 1)  # room for the legend
    axes.set_xlabel("stages, chunks")
    axes.set_ylabel("longest prompt [tokens]")


def _bandwidth(axes: Axes, rows: Sequence[Row]) -> None:
    rates = [row["die link [GB/s]"] for row in rows]
    for head, mark in ((HIDDEN, "o-"), (SERIAL, "s--")):
        prices = [max(LEAST_PERCENT, row[head]) for row in rows]
        axes.loglog(rates, prices, mark, label=head.removesuffix(" [%]"))
    dearer = [
        max(LEAST_PERCENT, 100 * (row[MOVED] / row[KEPT] - 1)) if row[KEPT] else None
        for row in rows
    ]
    if any(dearer):
        axes.plot(rates, [float("nan") if each is None else each for each in dearer], "^:",
                  label="mbkr over no moves, KV in any memory")  # fmt: skip
    axes.axhline(PRICE_PERCENT, color="grey", linewidth=0.8, label=f"{PRICE_PERCENT:g} %")
    axes.set_xlabel("bandwidth of a link between dies [GB/s]")
    axes.set_ylabel("price in latency [%]")


# What draws a section, and the head without which a row has nothing to show.
PANELS: dict[str, tuple[Callable[[Axes, Sequence[Row]], None], str]] = {
    "claims": (_claims, "throughput ratio"),
    "ablation": (_ablation, "mocap [s]"),
    "coupling": (_coupling, "pairs, LBCP cuts"),
    "bounds": (_bounds, "N"),
    "ledger": (_ledger, "longest"),
    "bandwidth": (_bandwidth, HIDDEN),
}
