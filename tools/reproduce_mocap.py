"""The claims of the MOCAP paper (arXiv 2606.22968), measured on the emulator and taken apart.

python tools/reproduce_mocap.py [SECTION ...] [--wafer A,B] [--models A,B] [--tokens 16384,65536]
                                [--layouts 8x8,8x16] [--figures FOLDER] [--markdown | --json]

claims     latency and throughput of mocap over gpipe, beside the ideal N M / (N + M - 1); the same
           with masked tiles charged, with memory no matter, and with gpipe's tile L / M
ablation   what chunking alone, LBCP and MBKR each buy, and what the moves cost in latency
coupling   what pairs can hold of even chunks and of LBCP's, which are longest in front
bounds     longest prompts under a KV budget alone: pairs, mirror, groups, optimal; and pairs under
           chunks of equal time
ledger     longest prompts that the real memory ledger holds, static and dynamic gain apart
bandwidth  the price of the moves as the links between dies slow down
crossover  the bandwidth below which MBKR stops paying
overhead   LBCP that counts the moves against cuts that do not, on slow links
joint      stages and chunks chosen together, and every rival at its own best (minutes a case, so
           only if it is named)

docs/mocap.md says how to read them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import numpy as np

import mocap.policy
from mocap import reallocation
from mocap.mbkr import Reallocating
from tools.mocap_bench import AMPLE_BYTES, LAYOUTS, Bench, Layouts, moved_bytes, price
from tools.mocap_bounds import PARTNERS, bounds, coupling
from tools.mocap_figures import draw, require_matplotlib
from tools.mocap_joint import joint
from tools.mocap_links import GRAIN_TOKENS, bandwidth, crossover, overhead
from tools.processes import in_processes
from tools.tables import Row, binds, limit, show
from wafer_emu.emulation import max_length
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.plan import Plan
from wafer_emu.wafer import Wafer
from wafer_kernels.errors import CapacityError

STEPS = ("gpipe", "uniform", "lbcp", "mbkr", "mocap")
LEDGER_POLICIES = ("terapipe", "uniform", "lbcp", "mocap")


def ideal_ratio(stages: int, chunks: int) -> float:
    """Latency of whole requests over that of equal chunks, N M / (N + M - 1)."""
    return stages * chunks / (stages + chunks - 1)


def _ratio(bench: Bench, tokens: int, options: Options) -> float:
    """Latency of gpipe over that of mocap."""
    gpipe, mocap = (
        bench.seconds(bench.plan(policy, tokens, options)) for policy in ("gpipe", "mocap")
    )
    return gpipe / mocap


def _coarse_gpipe(bench: Bench, tokens: int, options: Options) -> float | None:
    """Latency of gpipe in tiles as long as mocap's mean chunk [s]; None if they do not fit."""
    assert isinstance(options.chunks, int)
    tile = {"tile_tokens": -(-tokens // options.chunks)}
    try:
        return bench.seconds(bench.plan("gpipe", tokens, replace(options, policy=tile)))
    except CapacityError:
        return None


def claims(bench: Bench, lengths: Sequence[int]) -> Iterator[Row]:
    """Mocap over gpipe for one request, causal skip on, and off beside it."""
    for tokens in lengths:
        for stages, chunks in bench.layouts:
            ideal = ideal_ratio(stages, chunks)
            row: Row = {"model": bench.model.name, "tokens": tokens, "N": stages, "M": chunks}
            options = Options(stages=stages, chunks=chunks)
            asked = "gpipe"
            try:
                whole = bench.plan(asked, tokens, options)
                asked = "mocap"
                cut = bench.plan(asked, tokens, options)
                masked = _ratio(bench, tokens, replace(options, causal_skip=False))
                roomy = _ratio(bench, tokens, replace(options, kv_budget=AMPLE_BYTES))
            except CapacityError as error:
                yield {**row, "binds": f"{asked}: {binds(error)}"}
                continue
            slow, fast = (bench.seconds(each) for each in (whole, cut))
            coarse = _coarse_gpipe(bench, tokens, options)
            yield {
                **row,
                "gpipe [s]": slow,
                "mocap [s]": fast,
                "lower latency [%]": 100 * (1 - fast / slow),
                "throughput ratio": slow / fast,
                "ideal": ideal,
                "share of ideal [%]": 100 * slow / fast / ideal,
                "skip off [%]": 100 * masked / ideal,
                "memory aside [%]": 100 * roomy / ideal,
                "gpipe's tile L/M [%]": None if coarse is None else 100 * coarse / fast / ideal,
                "tile gpipe": whole.deployment.tile_tokens,
                "tile mocap": cut.deployment.tile_tokens,
                "attention gpipe [kB]": whole.deployment.clocks[0].attention_bytes / 1e3,
                "attention mocap [kB]": cut.deployment.clocks[0].attention_bytes / 1e3,
                "tiers gpipe": _tiers(whole),
                "tiers mocap": _tiers(cut),
            }


def _tiers(plan: Plan) -> str:
    """Where weights, KV and activations live."""
    return " ".join(astuple(plan.deployment.tiers))


def ablation(bench: Bench, lengths: Sequence[int]) -> Iterator[Row]:
    """From gpipe to mocap, one idea at a time, KV in SRAM so that MBKR has work to do.

    ``balance`` moves KV whether or not it would fit, so that the price shows at every length.
    """
    for tokens in lengths:
        for stages, chunks in bench.layouts:
            row: Row = {"model": bench.model.name, "tokens": tokens, "N": stages, "M": chunks}
            options = Options(stages=stages, chunks=chunks, kv_tier="sram")
            plans: dict[str, Plan] = {}
            refused: dict[str, list[str]] = {}
            for policy in STEPS:
                try:
                    plans[policy] = bench.plan(policy, tokens, options)
                except CapacityError as error:
                    refused.setdefault(binds(error), []).append(policy)
            time = {policy: bench.seconds(plan) for policy, plan in plans.items()}
            row |= {f"{policy} [s]": time.get(policy) for policy in STEPS}
            for step, (before, after) in {
                "chunking [x]": ("gpipe", "uniform"),
                "then LBCP [x]": ("uniform", "lbcp"),
                "then MBKR [x]": ("lbcp", "mocap"),
            }.items():
                both = before in time and after in time
                row[step] = time[before] / time[after] if both else None
            if "mocap" in plans:
                row |= _moves("", plans["mocap"])
                eager = replace(options, policy={"trigger": "balance"})
                try:
                    row |= _moves("balance: ", bench.plan("mocap", tokens, eager))
                except CapacityError as error:
                    refused.setdefault(binds(error), []).append("balance")
            tiles = {policy: plan.deployment.tile_tokens for policy, plan in plans.items()}
            if len(set(tiles.values())) > 1:
                row["tiles"] = ", ".join(f"{policy} {tile}" for policy, tile in tiles.items())
            if refused:
                said = (f"{', '.join(policies)}: {why}" for why, policies in refused.items())
                row["binds"] = "; ".join(said)
            yield row


def _moves(prefix: str, plan: Plan) -> Row:
    """What a plan moves, and what that costs."""
    return {
        f"{prefix}KV moved [MB]": moved_bytes(plan) / 1e6,
        f"{prefix}price of moves [%]": 100 * (price(plan) - 1),
    }


def ledger(bench: Bench, lengths: Sequence[int]) -> Iterator[Row]:
    """Longest prompts in SRAM by the whole ledger, and what the moves of the longest cost.

    ``static``: what lending of permanent surplus would hold, as if all stages peaked at once.
    """
    for stages, chunks in bench.layouts:
        options = Options(stages=stages, chunks=chunks, kv_tier="sram", activations_tier="sram")
        policies = {name: mocap.policy.get(name) for name in LEDGER_POLICIES}
        policies |= {
            f"mbkr, {name}": mocap.policy.get("mbkr", partner)
            for name, partner in PARTNERS.items()
            if partner.get("group_size", 2) <= stages
        }
        found = max_length(
            bench.wafer,
            bench.model,
            list(policies.values()),
            options=options,
            grain_tokens=GRAIN_TOKENS,
        )
        for (name, policy), each in zip(policies.items(), found, strict=True):
            tokens, first = each["max_tokens"], found[0]["max_tokens"]
            row: Row = {"model": bench.model.name, "N": stages, "M": chunks, "policy": name}
            row |= {"longest": tokens, "over terapipe": tokens / first if first else None}
            if tokens and isinstance(policy, Reallocating):
                plan = bench.plan(policy, tokens, options)
                row["static"] = static = _static_tokens(plan)
                row["static gain"] = static / first if first else None
                row["dynamic gain"] = tokens / static
                row["price at longest [%]"] = 100 * (price(plan) - 1)
            yield {**row, "binds": limit(each["limiting"])}


def _static_tokens(plan: Plan) -> int:
    """Longest prompt that permanent lending alone would hold, with the room of this plan."""
    assert isinstance(plan.policy, Reallocating)
    stages = len(plan.deployment.stages)
    capacities = [int(each) for each in plan.tasks.capacity[:, plan.tokens.size - 1]]
    setting = plan.deployment.setting(capacities, [0] * stages)
    return reallocation.static_max_tokens(setting, plan.policy.groups(setting))


SECTIONS: dict[str, Callable[[Bench, Sequence[int]], Iterator[Row]]] = {
    "claims": claims,
    "ablation": ablation,
    "coupling": coupling,
    "bounds": lambda bench, lengths: bounds(),
    "ledger": ledger,
    "bandwidth": bandwidth,
    "crossover": crossover,
    "overhead": overhead,
    "joint": joint,
}
LONG = ("joint",)  # sections that are measured only if they are named


def summaries(rows: Sequence[Row], wafer: str) -> Iterator[str]:
    """A line for each wafer; rows that name none are of ``wafer``."""
    of_wafer: dict[str, list[Row]] = {}
    for row in rows:
        of_wafer.setdefault(row.get("wafer", wafer), []).append(row)
    for name, some in of_wafer.items():
        yield f"{name}: {summary(some)}"


def summary(rows: Sequence[Row]) -> str:
    """Means over the rows of the claims that ran."""
    ran = [row for row in rows if "share of ideal [%]" in row]
    if not ran:
        return "nothing fits"
    likely = [row for row in ran if (row["N"], row["M"]) == LAYOUTS[0]]
    parts = [
        f"{name} ({len(some)} cases): latency {_mean(some, 'lower latency [%]'):.1f} % lower, "
        f"throughput {_mean(some, 'throughput ratio'):.2f}x"
        for name, some in (("all", ran), ("N = M = 8", likely))
        if some
    ]
    return "means of " + "; ".join(parts) + "; the paper's own, of cases not public: 76.4 %, 4.24x"


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def measure(lengths: Sequence[int], layouts: Layouts, case: tuple[str, Wafer, Model]) -> list[Row]:
    """Rows of one (section, wafer, model)."""
    name, wafer, model = case
    return list(SECTIONS[name](Bench(wafer, model, layouts), lengths))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help="all but joint, if none is named"
    )
    parser.add_argument("--wafer", default="wsc-54", help="one or more, with commas")
    parser.add_argument("--models", default="llama-3-8b,llama-3.1-70b,qwen2-72b")
    parser.add_argument("--tokens", default="16384,32768,65536,131072")
    parser.add_argument("--layouts", default=",".join(f"{n}x{m}" for n, m in LAYOUTS))
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="one PNG a section")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    sections = asked.sections or [name for name in SECTIONS if name not in LONG]
    for name in sections:
        if name not in SECTIONS:
            parser.error(f"there is no section {name!r}: choose from {', '.join(SECTIONS)}")
    if asked.figures is not None:
        require_matplotlib()
        asked.figures.mkdir(parents=True, exist_ok=True)
    lengths = [int(each) for each in asked.tokens.split(",")]
    layouts = [_layout(each) for each in asked.layouts.split(",")]
    wafers = [Wafer.load(name) for name in asked.wafer.split(",")]
    models = [Model.load(name) for name in asked.models.split(",")]
    cases = [
        (name, wafer, model)
        for name in sections
        for wafer in (wafers[:1] if name == "bounds" else wafers)
        for model in (models[:1] if name == "bounds" else models)
    ]
    found: dict[str, list[Row]] = {name: [] for name in sections}
    missing = [name for name, _, _ in cases]
    measured = in_processes(partial(measure, lengths, layouts), cases)
    for (name, wafer, _), rows in zip(cases, measured, strict=True):
        several = {"wafer": wafer.name} if len(wafers) > 1 and name != "bounds" else {}
        found[name] += [{**several, **row} for row in rows]
        missing.remove(name)
        if name in missing:
            continue
        if not asked.json:
            show(name, found[name], asked.markdown)
            if name == "claims":
                print("\n".join(summaries(found[name], wafers[0].name)) + "\n")
        if asked.figures is not None:
            path = draw(name, found[name], asked.figures)
            print(f"{name}: {path or 'nothing to draw'}", file=sys.stderr)
    if asked.json:
        names = [wafer.name for wafer in wafers]
        json.dump({"schema_version": 1, "wafers": names, "sections": found}, sys.stdout)


def _layout(word: str) -> tuple[int, int]:
    stages, chunks = word.split("x")
    return int(stages), int(chunks)


if __name__ == "__main__":
    main()
