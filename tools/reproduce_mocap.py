"""The claims of the MOCAP paper (arXiv 2606.22968), measured on the emulator and taken apart.

python tools/reproduce_mocap.py [SECTION ...] [--wafer wsc-54] [--models A,B] [--tokens 16384,65536]
                                [--markdown | --json]

claims     latency and throughput of mocap over gpipe, beside the ideal N M / (N + M - 1); the same
           with masked tiles charged, with memory no matter, and with gpipe's tile L / M
ablation   what chunking alone, LBCP and MBKR each buy, and what the moves cost in latency
bounds     longest prompts under a KV budget alone: pairs, mirror, groups, optimal; and pairs under
           chunks of equal time, which front-load tokens and so weaken them
ledger     longest prompts that the real memory ledger holds, static and dynamic gain apart
bandwidth  the price of the moves as the links between dies slow down
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import mocap.policy
from mocap import reallocation
from mocap.mbkr import Reallocating
from mocap.policy import Setting
from wafer_emu.deployment import PAGE_TOKENS
from wafer_emu.emulation import max_length
from wafer_emu.engine import run_plan
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.plan import Plan, make_plan
from wafer_emu.stage_clocks import Shelf
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels import pipeline
from wafer_kernels.errors import CapacityError

LAYOUTS = ((8, 8), (8, 16), (16, 16))
LEDGER_POLICIES = ("terapipe", "uniform", "lbcp", "mbkr", "mocap")
GRAIN_TOKENS = 1024  # longest prompts are found in multiples of this
LINK_BYTES_PER_SECOND = (1, 3, 10, 30, 100, 300, 1000, 4000)  # [GB/s]
AMPLE_BYTES = 1 << 50  # a KV budget that never binds: both work with full tiles
BUDGET_TOKENS = 1 << 20  # KV budget of the bounds, in tokens of one stage

Row = dict[str, Any]


def ideal_ratio(stages: int, chunks: int) -> float:
    """Latency of whole requests over that of equal chunks, N M / (N + M - 1)."""
    return stages * chunks / (stages + chunks - 1)


class Bench:
    """Plans of one model on one wafer, which share their clocks."""

    def __init__(self, wafer: Wafer, model: Model) -> None:
        self.wafer, self.model = wafer, model
        self.shelf: Shelf = {}

    def plan(self, policy: str, tokens: int, options: Options) -> Plan:
        """Plan of one prompt."""
        workload, chosen = Workload.single(tokens), mocap.policy.get(policy, options.policy)
        return make_plan(self.wafer, self.model, workload, chosen, options, self.shelf)

    def ratio(self, tokens: int, options: Options) -> float:
        """Latency of gpipe over that of mocap."""
        gpipe, mocap = (
            int(run_plan(self.plan(policy, tokens, options)).end.max())
            for policy in ("gpipe", "mocap")
        )
        return gpipe / mocap

    def coarse_gpipe(self, tokens: int, options: Options) -> float | None:
        """Latency of gpipe in tiles as long as mocap's mean chunk [s]; None if they do not fit."""
        assert isinstance(options.chunks, int)
        tile = {"tile_tokens": -(-tokens // options.chunks)}
        try:
            plan = self.plan("gpipe", tokens, replace(options, policy=tile))
        except CapacityError:
            return None
        return self.time(int(run_plan(plan).end.max()))

    def time(self, cycles: int) -> float:
        """Cycles as seconds."""
        return cycles / self.wafer.core.clock_hz


def claims(bench: Bench, lengths: Sequence[int]) -> Iterator[Row]:
    """Mocap over gpipe for one request, causal skip on, and off beside it."""
    for tokens in lengths:
        for stages, chunks in LAYOUTS:
            ideal = ideal_ratio(stages, chunks)
            row: Row = {"model": bench.model.name, "tokens": tokens, "N": stages, "M": chunks}
            options = Options(stages=stages, chunks=chunks)
            asked = "gpipe"
            try:
                whole = bench.plan(asked, tokens, options)
                asked = "mocap"
                cut = bench.plan(asked, tokens, options)
                masked = bench.ratio(tokens, replace(options, causal_skip=False))
                roomy = bench.ratio(tokens, replace(options, kv_budget=AMPLE_BYTES))
            except CapacityError as error:
                yield {**row, "binds": f"{asked}: {error.message.split('; what would')[0]}"}
                continue
            slow, fast = (bench.time(int(run_plan(each).end.max())) for each in (whole, cut))
            coarse = bench.coarse_gpipe(tokens, options)
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
    """From gpipe to mocap, one idea at a time, KV in SRAM so that MBKR has work to do."""
    for tokens in lengths:
        for stages, chunks in LAYOUTS:
            row: Row = {"model": bench.model.name, "tokens": tokens, "N": stages, "M": chunks}
            options = Options(stages=stages, chunks=chunks, kv_tier="sram")
            for policy in ("gpipe", "uniform", "lbcp", "mbkr", "mocap"):
                try:
                    plan = bench.plan(policy, tokens, options)
                except CapacityError:
                    row[f"{policy} [s]"] = None
                    continue
                row[f"{policy} [s]"] = bench.time(int(run_plan(plan).end.max()))
                if policy == "mocap":
                    row["KV moved [MB]"] = _moved_bytes(plan) / 1e6
                    row["price of moves [%]"] = 100 * (_price(plan) - 1)
            yield row


def bounds(bench: Bench, lengths: Sequence[int]) -> Iterator[Row]:
    """Longest prompt over that of no moves, in slots: equal stages, KV alone, no hand-off."""
    partners: list[tuple[str, Row]] = [
        ("pairs", {}),
        ("mirror", {"partner": "mirror"}),
        ("groups of 4", {"partner": "groups", "group_size": 4}),
        ("optimal", {"partner": "optimal"}),
    ]
    for stages, share in ((8, 1.0), (8, 1.5), (8, 2.0), (16, 1.0)):
        row: Row = {"N": stages, "M": int(share * stages)}
        for name, options in partners:
            policy = mocap.policy.get("mbkr", options)
            for requests, kind in ((1, "alone"), (2, "stream")):
                setting = _slots(stages, int(share * stages), lambda c, p: c, PAGE_TOKENS * 16)
                longest = reallocation.max_tokens(policy, setting, requests)
                row[f"{name}, {kind}"] = longest / setting.local_tokens
        setting = _slots(stages, int(share * stages), lambda c, p: c * (BUDGET_TOKENS + 2 * p + c),
                         PAGE_TOKENS * 16)  # fmt: skip
        longest = reallocation.max_tokens(mocap.policy.get("mocap"), setting, 2)
        row["pairs, equal times"] = longest / setting.local_tokens
        yield row


def _slots(stages: int, chunks: int, cost: Callable[[int, int], int], page_tokens: int) -> Setting:
    """Equal stages with a KV budget, and nothing else."""
    return Setting(
        stages=stages,
        chunks=chunks,
        page_tokens=page_tokens,
        cost=cost,
        stage_cost=lambda stage, c, p: cost(c, p),
        kv_bytes_per_token=(1,) * stages,
        kv_capacity_bytes=(BUDGET_TOKENS,) * stages,
        hops=tuple(tuple(abs(a - b) for b in range(stages)) for a in range(stages)),
        link_bytes_per_cycle=1 << 40,
    )


def ledger(bench: Bench, lengths: Sequence[int]) -> Iterator[Row]:
    """Longest prompts in SRAM by the whole ledger; ``static``: all stages peak at once."""
    for stages, chunks in LAYOUTS:
        options = Options(stages=stages, chunks=chunks, kv_tier="sram")
        row: Row = {"model": bench.model.name, "N": stages, "M": chunks}
        found = max_length(
            bench.wafer, bench.model, LEDGER_POLICIES, options=options, grain_tokens=GRAIN_TOKENS
        )
        row |= {each["policy"]: each["max_tokens"] for each in found}
        if row["terapipe"]:
            plan = bench.plan("mbkr", row["mbkr"], options)
            static = _static_tokens(plan)
            row["mbkr/terapipe"] = row["mbkr"] / row["terapipe"]
            row["static"] = static
            row["static gain"] = static / row["terapipe"]
            row["dynamic gain"] = row["mbkr"] / static
            row["price at longest [%]"] = 100 * (_price(plan) - 1)
        yield row


def _static_tokens(plan: Plan) -> int:
    """Longest prompt that permanent lending alone would hold, with the room of this plan."""
    assert isinstance(plan.policy, Reallocating)
    stages = len(plan.deployment.stages)
    capacities = [int(each) for each in plan.tasks.capacity[:, plan.tokens.size - 1]]
    setting = plan.deployment.setting(plan.tokens.size, capacities, [0] * stages)
    return reallocation.static_max_tokens(setting, plan.policy.groups(setting))


def bandwidth(bench: Bench, lengths: Sequence[int]) -> Iterator[Row]:
    """Price of the moves of the longest prompt that fits in SRAM."""
    stages, chunks = LAYOUTS[0]
    options = Options(stages=stages, chunks=chunks, kv_tier="sram")
    longest = max_length(
        bench.wafer, bench.model, ["mbkr"], options=options, grain_tokens=GRAIN_TOKENS
    )
    tokens = longest[0]["max_tokens"]
    if tokens == 0 or bench.wafer.die_link is None:
        return
    moved = _moved_bytes(bench.plan("mbkr", tokens, options))
    for rate in LINK_BYTES_PER_SECOND:
        slower = bench.wafer.replace({"die_link.bytes_per_second": rate * 10**9})
        plan = Bench(slower, bench.model).plan("mbkr", tokens, options)
        yield {
            "model": bench.model.name,
            "tokens": tokens,
            "die link [GB/s]": rate,
            "KV moved [MB]": moved / 1e6,
            "latency [s]": bench.time(_makespan(plan, plan.tasks.duration)),
            "price, overlapped [%]": 100 * (_price(plan) - 1),
            "price, serial [%]": 100 * (_price(plan, overlap=False) - 1),
        }


def _moved_bytes(plan: Plan) -> int:
    return sum(each.written_bytes for row in plan.transfers for each in row)


def _price(plan: Plan, overlap: bool = True) -> float:
    """Makespan over that with moves free; not overlapped, every byte moved is waited for."""
    duration = plan.tasks.duration if overlap else plan.compute + _serial_cycles(plan)
    return _makespan(plan, duration) / _makespan(plan, plan.compute)


def _makespan(plan: Plan, duration: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    schedule = pipeline.schedule(*duration.shape)
    pipeline.run(plan.tasks._replace(duration=duration), plan.slot, schedule)
    return int(schedule.end.max())


def _serial_cycles(plan: Plan) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Cycles of all transfers of every task, layer by layer (stage, task)."""
    cycles = np.zeros_like(plan.compute)
    for stage, row in enumerate(plan.transfers):
        layers, host = plan.deployment.stages[stage].layers, int(plan.tasks.host[stage, -1])
        for task, each in enumerate(row):
            for moved in (each.written_bytes, each.read_bytes):
                one = plan.deployment.transfer_cycles(moved // layers, stage, host)
                cycles[stage, task] += layers * one
    return cycles


SECTIONS: dict[str, Callable[[Bench, Sequence[int]], Iterator[Row]]] = {
    "claims": claims,
    "ablation": ablation,
    "bounds": bounds,
    "ledger": ledger,
    "bandwidth": bandwidth,
}


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


def text(value: object) -> str:
    """A figure as it stands in a table."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show(name: str, rows: Sequence[Row], markdown: bool) -> None:
    """Print one section."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = [[text(row.get(head)) for head in heads] for row in rows]
    console = Console(width=None if sys.stdout.isatty() else 200)
    if markdown:
        body = [heads, ["---"] * len(heads), *lines]
        written = "\n".join("| " + " | ".join(line) + " |" for line in body)
        console.out(f"## {name}\n\n{written}\n", highlight=False)
    else:
        table = Table(*heads, title=name)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    if name == "claims":
        console.out(summary(rows), highlight=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[*SECTIONS])
    parser.add_argument("--wafer", default="wsc-54")
    parser.add_argument("--models", default="llama-3-8b,llama-3.1-70b,qwen2-72b")
    parser.add_argument("--tokens", default="16384,32768,65536,131072")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    lengths = [int(each) for each in asked.tokens.split(",")]
    wafer = Wafer.load(asked.wafer)
    benches = [Bench(wafer, Model.load(name)) for name in asked.models.split(",")]
    found: dict[str, list[Row]] = {}
    for name in asked.sections:
        used = benches[:1] if name == "bounds" else benches
        found[name] = [row for bench in used for row in SECTIONS[name](bench, lengths)]
        if not asked.json:
            show(name, found[name], asked.markdown)
    if asked.json:
        json.dump({"schema_version": 1, "wafer": wafer.name, "sections": found}, sys.stdout)


if __name__ == "__main__":
    main()
