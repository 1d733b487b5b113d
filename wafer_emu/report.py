"""The report of one run: what it took, where it ran, what filled and what stalled it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from wafer_emu.conditions import caveats, conditions, work_of
from wafer_emu.placement import Region
from wafer_emu.quantities import joules, percent, rate, runs, seconds, size
from wafer_emu.report_search import search_report
from wafer_emu.wafer import Wafer
from wafer_emu.wafer_picture import wafer_picture

__all__ = ["condition_grid", "figures_table", "heading", "notes", "run_report", "stage_picture"]

WIDTH = 78
SHORT = 19  # characters of a value that leaves room for a second one beside it


def run_report(
    summary: Mapping[str, Any], wafer: Wafer, offer: Mapping[str, Any] | None = None
) -> RenderableType:
    """Report of one run, 80 columns wide or more.

    Parameters
    ----------
    summary
        Result of the run, with the keys of the contract.
    wafer
        The wafer it ran on.
    offer
        What a pipeline would buy instead, where a search chose one stage.
    """
    settings = summary["settings"]
    title = f"{settings['model']} on {wafer.name}: {work_of(settings)}, {summary['policy']}"
    return Group(
        heading(title),
        _headline(summary, wafer),
        notes(caveats(wafer, [summary])),
        search_report(settings.get("search"), wafer, offer),
        heading("The wafer, stage by stage"),
        stage_picture(summary, wafer),
        Text(),
        _stages(summary),
        Text(),
        Columns([_stalls(summary), _energy(summary)], padding=(0, 4)),
        heading("Under which conditions"),
        condition_grid(conditions(summary)),
        heading("Checked at the end of the run"),
        _invariants(summary["invariants"]),
    )


def heading(words: str) -> RenderableType:
    """Bold line with room above it."""
    return Padding(Text(words, "bold"), (1, 0, 0, 0))


def notes(sentences: Iterable[str]) -> RenderableType:
    """Sentences that must be read along with the figures."""
    return Group(*(Padding(Text(f"! {line}", "yellow"), (0, 0, 0, 2)) for line in sentences))


def figures_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = ()
) -> Table:
    """Table of figures, with a name in the first column; columns named in ``words`` hold text."""
    gap = 0 if len(headings) > 7 else 1
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    table.add_column(headings[0], style="bold", no_wrap=True)
    for title in headings[1:]:
        if title in words:
            table.add_column(title, overflow="fold")
        else:
            table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def condition_grid(pairs: Mapping[str, str]) -> RenderableType:
    """Names and values: short ones two pairs a line, long ones on lines of their own."""
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for style in ("dim", None, "dim", None):
        grid.add_column(style=style, no_wrap=True)
    short = [pair for pair in pairs.items() if len(pair[1]) <= SHORT]
    for left, right in zip_longest(short[::2], short[1::2], fillvalue=("", "")):
        grid.add_row(*left, *right)
    lines = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column()
    for name, value in pairs.items():
        if len(value) > SHORT:
            lines.add_row(name, value)
    return Padding(Group(grid, lines), (0, 0, 0, 2))


def stage_picture(summary: Mapping[str, Any], wafer: Wafer) -> RenderableType:
    """Drawing of the wafer with its regions, their layers, work and KV."""
    settings = summary["settings"]
    captions, first = [], 0
    per_stage = zip(
        settings["stage_layers"],
        summary["stage_busy_fraction"],
        summary["kv_peak_bytes_per_stage"],
        summary["kv_capacity_bytes_per_stage"],
        strict=True,
    )
    for stage, (layers, busy, kv, room) in enumerate(per_stage):
        last = first + layers - 1
        noun, held = ("layers", f"{first}-{last}") if layers > 1 else ("layer", f"{first}")
        filled = f"{100 * kv / room:.0f} %" if room else "-"
        captions.append(
            (
                (f"stage {stage}", f"{stage}"),
                (f"{noun} {held}", f"L{held}"),
                (f"busy {100 * busy:.0f} %", f"{100 * busy:.0f} %"),
                (f"KV {filled}", f"KV{filled.removesuffix(' %')}"),
            )
        )
        first += layers
    regions = [Region(*corners) for corners in settings["regions"]]
    picture = wafer_picture(wafer.core_rows, wafer.core_columns, regions, captions, WIDTH - 2)
    unused = settings["cores_unused"]
    legend = f"{wafer.core_rows}x{wafer.core_columns} cores; · {unused:,} unused"
    return Padding(Group(picture, Text(legend, "dim")), (0, 0, 0, 2))


def _headline(summary: Mapping[str, Any], wafer: Wafer) -> RenderableType:
    cycles, first = summary["makespan_cycles"], summary["time_to_first_token_seconds"]
    clock = f"{cycles:,} cycles at {wafer.core.clock_hz / 1e9:g} GHz"
    chunks = summary["chunk_tokens"][0]
    slowest = [max(times) for times in zip(*summary["chunk_cycles"], strict=True)]
    rows = [
        ("latency", seconds(summary["makespan_seconds"]), clock),
        (
            "throughput",
            rate(summary["tokens_per_second"], "tokens/s"),
            rate(summary["requests_per_second"], "requests/s"),
        ),
        ("bubble", percent(summary["bubble_fraction"]), "of all stages' time they do not work"),
        (
            "fullest core",
            size(summary["sram_peak_bytes_per_core"]),
            f"of its {size(summary['sram_capacity_bytes_per_core'])} of SRAM",
        ),
        ("KV moved", size(summary["reallocated_bytes"]),
         f"to other stages, {size(summary['remote_read_bytes'])} read back"),
        ("on the mesh", f"{summary['noc_byte_hops']:,}", "bytes times hops"),
        *_links(summary),
        ("work", f"{summary['macs']:,}", "multiply-accumulates"),
        ("chunks", f"{len(chunks)}", f"{runs(chunks)} tokens"),
        ("", "", f"{_spread(slowest, wafer)} on the slowest stage"),
    ]  # fmt: skip
    if summary["settings"]["requests_in_flight"] > 1:
        tail = (
            f"p50 {seconds(first['p50'])}, p95 {seconds(first['p95'])}, max {seconds(first['max'])}"
        )
        rows.insert(1, ("first token", seconds(first["mean"]), f"mean; {tail}"))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return Padding(table, (0, 0, 0, 2))


def _links(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Share of the time that the busiest link is in use, and of what waits as links are shared."""
    busiest = summary["links"]["busiest"]
    if busiest is None:
        return
    corners = [region[:2] for region in summary["settings"]["regions"]]
    ends = [
        f"{corners.index(end)}" if end in corners else f"the unused cell at {tuple(end)}"
        for end in (busiest["from"], busiest["to"])
    ]
    added = percent(summary["links"]["contention_cycles"] / summary["makespan_cycles"])
    text = f"in use, from stage {' to '.join(ends)}; sharing links costs {added}"
    yield "busiest link", percent(busiest["busy_fraction"]), text


def _spread(cycles: Sequence[int], wafer: Wafer) -> str:
    least, most = (seconds(each / wafer.core.clock_hz) for each in (min(cycles), max(cycles)))
    return least if least == most else f"{least} to {most}"


def _stages(summary: Mapping[str, Any]) -> Table:
    settings = summary["settings"]
    weights = settings["weight_bytes_per_stage"]
    rows = []
    for stage, layers in enumerate(settings["stage_layers"]):
        peak = summary["kv_peak_bytes_per_stage"][stage]
        room = summary["kv_capacity_bytes_per_stage"][stage]
        rows.append(
            (
                f"{stage}",
                f"{layers}",
                percent(summary["stage_busy_fraction"][stage]),
                size(weights[stage]),
                size(peak),
                size(room),
                percent(peak / room) if room else "-",
            )
        )
    return figures_table(
        ("stage", "layers", "busy", "weights", "KV peak", "KV room", "filled"), rows
    )


def _stalls(summary: Mapping[str, Any]) -> Table:
    stages = summary["settings"]["stages"]
    whole = summary["makespan_cycles"] * stages
    rows = [
        (cause.removesuffix("_cycles"), f"{cycles:,}", percent(cycles / whole))
        for cause, cycles in summary["stall_cycles"].items()
    ]
    return figures_table(["stall, by cause", "cycles", "share"], rows)


def _energy(summary: Mapping[str, Any]) -> Table:
    parts = summary["energy_joules"]
    whole = sum(parts.values())
    largest = sorted(parts.items(), key=lambda item: -item[1])
    rows = [(name, joules(part), percent(part / whole)) for name, part in largest if part]
    rows.append(("all", joules(whole), ""))
    return figures_table(["energy", "", "share"], rows)


def _invariants(checks: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for check in checks:
        mark = Text("✓", "green") if check["holds"] else Text("✗ broken", "bold red")
        table.add_row(mark, check["name"], check["detail"])
    return Padding(table, (0, 0, 0, 2))
