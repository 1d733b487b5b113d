"""The part of a report that tells how stages and chunks were chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from wafer_emu.quantities import count, rate, seconds
from wafer_emu.wafer import Wafer

__all__ = ["search_report"]

BEST = 5  # plans that are listed


def search_report(
    search: Mapping[str, Any] | None, wafer: Wafer, offer: Mapping[str, Any] | None = None
) -> RenderableType:
    """What a search chose, what came next, and what a pipeline would buy; nothing without one."""
    if search is None:
        return Group()
    chosen, tried = search["chosen"], search["tried"]
    ran = sorted((one for one in tried if "error" not in one), key=lambda one: one["cycles"])
    bounds = "all there are" if search["complete"] else f"within {search['seconds']:g} s"
    lines = [
        f"For least {'latency' if search['objective'] == 'latency' else 'time per request'} "
        f"{_plan(chosen)} on {count(chosen['cores_used'])} cores was chosen, of {len(tried)} plans "
        f"tried ({bounds}), {len(tried) - len(ran)} of which do not fit.",
    ]
    if chosen["policy"] != search["asked_policy"]:
        asked = [one for one in ran if one["policy"] == search["asked_policy"]]
        lines.append(
            f"{search['asked_policy']} was asked for; its best: {_timed(asked[0], wafer)}."
            if asked
            else f"{search['asked_policy']} was asked for, but no plan of it fits."
        )
    lines.append("Best: " + "; ".join(_timed(one, wafer) for one in ran[:BEST]) + ".")
    if offer is not None:
        lines.append(_offered(offer))
    texts = [Padding(Text(line), (0, 0, 0, 2)) for line in lines]
    return Group(Padding(Text("How stages and chunks were chosen", "bold"), (1, 0, 0, 0)), *texts)


def _plan(one: Mapping[str, Any]) -> str:
    chunks = f" x {one['chunks']} chunks" if one["chunks"] else ""
    return f"{one['policy']} {one['stages']} stage{'s' * (one['stages'] > 1)}{chunks}"


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
