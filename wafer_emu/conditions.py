"""What must stand beside a figure: the conditions of a run, and the caveats of what it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wafer_emu.quantities import size
from wafer_emu.wafer import Wafer

__all__ = ["caveats", "conditions", "work_of"]

# What these do beyond the abstract of the MOCAP paper is not public.
RECONSTRUCTED = ("lbcp", "mbkr", "mocap")
ATTENTION = {"ring": "ring of key tiles", "products": "products by key blocks"}
KV_FREED = {"request": "as the request leaves a stage", "layer": "layer by layer"}


def work_of(settings: Mapping[str, Any]) -> str:
    """What was computed, in words."""
    requests, tokens, prefix = settings["requests"], settings["tokens"], settings["prefix_tokens"]
    if settings["workload"] != f"{requests} x {tokens} tokens":
        return f"{requests:,} requests of {settings['workload']}"
    prompts = f"{tokens:,} tokens" if requests == 1 else f"{requests:,} x {tokens:,} tokens"
    return f"{prompts}, {prefix:,} of them resident" if prefix else prompts


def conditions(summary: Mapping[str, Any]) -> dict[str, str]:
    """Conditions of a run, by name."""
    settings = summary["settings"]
    placed, whole = settings["layers_emulated"], settings["layers"]
    tile, budget = settings["gpipe_tile_tokens"], settings["kv_budget_bytes"]
    kv_place = f"a budget of {size(budget)} a stage" if budget else settings["kv_tier"].upper()
    found = {
        "requests in flight": f"{settings['requests_in_flight']:,}",
        "stages": f"{settings['stages']} of {settings['region']} cores",
        "chunks": f"{len(summary['chunk_tokens'][0])}",
        "cores used": f"{settings['cores_used']:,} of {settings['cores']:,}",
        "gpipe's tile": "-" if tile is None else f"{tile:,} tokens",
        "attention": ATTENTION[settings["attention"]],
        "causal skip": "on" if settings["causal_skip"] else "off: masked half charged",
        "links": "shared by flows" if settings["contention"] else "each flow alone",
        "rounding": f"pages of {settings['page_tokens']} tokens",
        "weights": f"{settings['weights_dtype']} in {settings['weights_tier'].upper()}",
        "KV": f"{settings['kv_dtype']} in {kv_place}",
        "activations": f"waiting in {settings['activations_tier'].upper()}",
        "KV room a stage": _range(summary["kv_capacity_bytes_per_stage"]),
        "KV freed": KV_FREED[settings["kv_freed"]],
        "embedding": f"from {settings['embedding']}",
        "placement": settings["placement"],
        "layers": f"{whole}" if placed == whole else f"{placed} emulated, scaled to {whole}",
    }
    options = sorted(settings["policy_options"].items())
    if chosen := [f"{name}={value}" for name, value in options if value is not None]:
        found["policy options"] = ", ".join(chosen)
    if settings["unused"]:
        found["not used"] = ", ".join(settings["unused"])
    return found


def caveats(wafer: Wafer, summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences without which the figures would promise too much."""
    found = []
    settings = [summary["settings"] for summary in summaries]
    names = [summary["policy"] for summary in summaries if summary["policy"] in RECONSTRUCTED]
    if wafer.dies > 1:
        found.append(f"{wafer.name} is simulated, never validated: no silicon of it was measured.")
    if names:
        found.append(
            f"{', '.join(names)}: reconstructed, since only the abstract of the MOCAP paper (arXiv "
            "2606.22968) is public; what it leaves open stands under policy options."
        )
    if any(each["kv_budget_bytes"] is not None for each in settings):
        found.append(
            "A KV budget replaces the memory ledger: weights and activations count nothing."
        )
    if any(each["beyond_model_positions"] for each in settings):
        found.append("The prompt is longer than the positions that the model was made for.")
    return found


def _range(sizes: Sequence[int]) -> str:
    least, most = size(min(sizes)), size(max(sizes))
    return least if least == most else f"{least} to {most}"
