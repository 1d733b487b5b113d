"""The part of a report that tells how stages and chunks were chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from wafer_emu.quantities import count, rate, seconds
from wafer_emu.wafer import Wafer

__all__ = ["search_report"]


def search_report(
    search: Mapping[str, Any] | None, wafer: Wafer, offer: Mapping[str, Any] | None = None
) -> RenderableType:
    """What a search chose, why, and what a pipeline would buy; nothing without a search."""
    if search is None:
        return Group()
    chosen, tried = search["chosen"], search["tried"]
    ran = sorted((one for one in tried if "error" not in one), key=lambda one: one["cycles"])
    out, left = (sum(search[each].values()) for each in ("ruled_out", "left"))
    least = "latency" if search["objective"] == "latency" else "time per request"
    lines = [
        f"For least {least} {_plan(chosen)} on {count(chosen['cores_used'])} of "
        f"{count(wafer.cores)} cores was chosen.",
        f"{_these(len(ran), 'plan')} ran, {count(len(tried) - len(ran))} did not fit, "
        f"{count(out)} cannot be better (proven by a bound)"
        + (
            ": those are all there are."
            if search["complete"]
            else f"; {count(left)} were left after {search['seconds']:g} s (--search-seconds)."
        ),
    ]
    if chosen["policy"] != search["asked_policy"]:
        lines.append(_asked(search, ran, wafer))
    if offer is not None:
        lines.append(_offered(offer))
    texts = [Padding(Text(line), (0, 0, 0, 2)) for line in lines]
    title = Padding(Text("How stages and chunks were chosen", "bold"), (1, 0, 0, 0))
    return Group(title, *texts, Padding(_best_by_policy(search, ran, wafer), (0, 0, 0, 2)))


def _best_by_policy(
    search: Mapping[str, Any], ran: Sequence[Mapping[str, Any]], wafer: Wafer
) -> Table:
    """The best plan of every policy that ran, the fastest first; then those proven slower."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("best of each", "stages", "chunks", "takes", "ratio", "cores"):
        table.add_column(heading, justify="left" if heading == "best of each" else "right")
    best: dict[str, Mapping[str, Any]] = {}
    for one in ran:
        best.setdefault(one["policy"], one)
    for name, one in best.items():
        table.add_row(
            name,
            count(one["stages"]),
            count(one["chunks"]) if one["chunks"] else "whole",
            seconds(one["cycles"] / wafer.core.clock_hz),
            f"{one['cycles'] / ran[0]['cycles']:.3f}x",
            count(one["cores_used"]),
        )
    for name in search["ruled_out"]:
        if name not in best and name not in search["left"]:
            table.add_row(name, "any", "any", "slower", "", "")
    return table


def _these(number: int, what: str) -> str:
    return f"{count(number)} {what}{'s' * (number != 1)}"


def _asked(search: Mapping[str, Any], ran: Sequence[Mapping[str, Any]], wafer: Wafer) -> str:
    """What became of the policy that was asked for, where another was chosen."""
    name = search["asked_policy"]
    own = [one for one in ran if one["policy"] == name]
    if own:
        return f"{name} was asked for; the best of it that ran: {_timed(own[0], wafer)}."
    if name in search["ruled_out"] or name in search["left"]:
        return f"{name} was asked for; no plan of it ran and fits."
    return f"{name} was asked for, but no plan of it fits."


def _plan(one: Mapping[str, Any]) -> str:
    chunks = f" x {_these(one['chunks'], 'chunk')}" if one["chunks"] else ""
    return f"{one['policy']} {_these(one['stages'], 'stage')}{chunks}"


def _timed(one: Mapping[str, Any], wafer: Wafer) -> str:
    return f"{_plan(one)} {seconds(one['cycles'] / wafer.core.clock_hz)}"


def _offered(offer: Mapping[str, Any]) -> str:
    whole, pipeline = offer["one_stage"], offer["pipeline"]
    traffic = pipeline["noc_byte_hops"] / whole["noc_byte_hops"]
    return (
        f"One stage is fastest. {_plan(pipeline)} would take "
        f"{pipeline['makespan_cycles'] / whole['makespan_cycles']:.2f}x as long; requests back to "
        f"back {rate(pipeline['stream_requests_per_second'], 'requests/s')} instead of "
        f"{rate(whole['stream_requests_per_second'], 'requests/s')}; room for the KV of at most "
        f"{count(pipeline['most_tokens'])} instead of {count(whole['most_tokens'])} tokens; "
        f"{traffic:.2f}x the traffic on the mesh."
    )
