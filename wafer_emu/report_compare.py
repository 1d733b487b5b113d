"""Reports that set policies side by side: the same work, and the longest prompt that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from wafer_emu.conditions import caveats, conditions, work_of
from wafer_emu.quantities import count, multiple, percent, rate, seconds, size
from wafer_emu.report import condition_grid, figures_table, heading, notes
from wafer_emu.wafer import Wafer

__all__ = ["compare_report", "max_length_report", "policy_table", "refusals"]

Row = Mapping[str, Any]
LONG = 24  # characters of a condition that needs a line of its own
TIERS = {"sram": "SRAM", "dram": "die DRAM", "budget": "the KV budget"}


def compare_report(
    rows: Sequence[Row],
    wafer: Wafer,
    whole: Row | None = None,
    longest: Mapping[str, int] | None = None,
) -> RenderableType:
    """Report of the same work under several policies, 80 columns wide or more.

    Parameters
    ----------
    rows
        Result of every policy, or its error, with the keys of the contract.
    wafer
        The wafer they ran on.
    whole
        The same work on the whole wafer as one stage, if it fits there.
    longest
        The longest prompt that fits, by policy [tokens], if it is known.
    """
    ran = [row for row in rows if "error" not in row]
    settings = ran[0]["settings"]
    pipelines = [row for row in ran if row["settings"]["stages"] > 1]
    sentences = caveats(wafer, ran)
    if whole is not None and pipelines:
        sentences.append(_against_whole_wafer(pipelines, whole))
    parts = [
        heading(f"{settings['model']} on {wafer.name}: {work_of(settings)}"),
        policy_table(rows, longest),
        refusals(rows),
        notes(sentences),
        heading("Under which conditions"),
        *_shared_and_own(ran),
    ]
    return Group(*parts)


def max_length_report(rows: Sequence[Row]) -> RenderableType:
    """Report of the longest prompt that fits, per policy."""
    table = figures_table(
        ["policy", "longest prompt", f"over {rows[0]['policy']}", "what limits it"],
        [
            (
                row["policy"],
                f"{count(row['max_tokens'])} tokens" if row["max_tokens"] else "nothing fits",
                multiple(row["ratio"]),
                _limit(row["limiting"] or {}),
            )
            for row in rows
        ],
        words={"what limits it"},
    )
    return Group(heading("The longest prompt that fits"), table)


def policy_table(rows: Sequence[Row], longest: Mapping[str, int] | None = None) -> RenderableType:
    """One line a policy; with ``longest``, the longest prompt [tokens] by policy beside it."""
    headings = ["policy", "latency", "ratio", "req/s", "ratio", "bubble", "core peak", "KV moved"]
    lines = []
    for row in rows:
        if "error" in row:
            line = [row["policy"], "refused", *["-"] * 6]
        else:
            line = [
                row["policy"],
                seconds(row["makespan_seconds"]),
                multiple(row["latency_ratio"]),
                rate(row["requests_per_second"], ""),
                multiple(row["throughput_ratio"]),
                percent(row["bubble_fraction"]),
                size(row["sram_peak_bytes_per_core"]),
                size(row["reallocated_bytes"]),
            ]
        if longest is not None:
            line.append(count(longest.get(row["policy"])))
        lines.append(line)
    return figures_table([*headings, *(["longest"] if longest is not None else [])], lines)


def refusals(rows: Sequence[Row]) -> RenderableType:
    """Who refused the work, and why."""
    return Group(
        *(
            Padding(
                Text.assemble((row["policy"], "bold red"), f" refuses: {row['error']['message']}"),
                (0, 0, 0, 2),
            )
            for row in rows
            if "error" in row
        )
    )


def _against_whole_wafer(ran: Sequence[Row], whole: Row) -> str:
    """How the best pipeline stands against the whole wafer as one stage."""
    best = min(ran, key=lambda row: row["makespan_cycles"])
    faster = whole["makespan_cycles"] < best["makespan_cycles"]
    return (
        f"The whole wafer as one stage, layer by layer ({whole['policy']}), takes "
        f"{seconds(whole['makespan_seconds'])}: {'faster' if faster else 'no faster'} than the "
        f"fastest pipeline here ({best['policy']}, {seconds(best['makespan_seconds'])})."
    )


def _shared_and_own(ran: Sequence[Row]) -> list[RenderableType]:
    """Conditions that all rows share as a grid, the others as a table."""
    found = {row["policy"]: conditions(row) for row in ran}
    names = list(dict.fromkeys(name for one in found.values() for name in one))
    values = {name: [one.get(name, "-") for one in found.values()] for name in names}
    shared = {name: each[0] for name, each in values.items() if len(set(each)) == 1}
    own = [name for name in names if name not in shared]
    long = [name for name in own if max(map(len, values[name])) > LONG]
    own = [name for name in own if name not in long]
    parts = [condition_grid(shared)]
    if own:
        rows = [[policy, *(values[name][k] for name in own)] for k, policy in enumerate(found)]
        parts += [Text(), figures_table(["policy", *own], rows, words=own)]
    for name in long:
        kept = {policy: one[name] for policy, one in found.items() if name in one}
        parts += [Padding(Text(name, "dim"), (1, 0, 0, 0)), condition_grid(kept)]
    return parts


def _limit(limiting: Mapping[str, Any]) -> str:
    """Which stage refuses one token more, when, and how many bytes short."""
    if "stage" not in limiting:
        return str(limiting.get("limit") or limiting.get("message") or "")
    place = ", ".join(
        f"{name} {limiting[name]}" for name in ("stage", "core", "slot") if name in limiting
    )
    tier = TIERS[limiting.get("tier", "sram")]
    return f"{place}: {size(limiting['short_bytes'])} short in {tier}"
