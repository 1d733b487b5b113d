"""Time to first token and throughput of each policy under a request trace.

python tools/mooncake_trace.py TRACE.jsonl [--wafer wsc-54] [--model llama-3-8b] [--head 200]
                               [--compress 1,4,8] [--policies A,B] [--markdown | --json]

Made for the Mooncake conversation trace (FAST '25 release), which is no part of this package; any
trace that `wafer-emu run --workload` reads will do. Arrivals are as given and compressed, the KV of
earlier requests is reused or not, and requests are served first come first, or shortest first.
A load marked ! is 1 or more: more comes than the busiest stage can do.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

import mocap.policy
from mocap.policy import Policy, Request, Setting
from mocap.prefill_only import ShortestFirst
from tools.processes import in_processes
from tools.tables import NARROW, Row, binds, show
from wafer_emu.deployment import SlowestCost
from wafer_emu.engine import run_plan
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.plan import make_plan
from wafer_emu.stage_clocks import Shelf
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError

POLICIES = ("gpipe", "uniform", "terapipe", "mocap", "prefill-only", "layerwise")
ORDERS: dict[str, Callable[[Any, Sequence[Request]], list[Request]]] = {
    "first come": Policy.order,
    "shortest first": ShortestFirst.order,
}
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
IDLE = 0.5  # load below which a queue is only that of a burst

Cuts = dict[tuple[object, ...], list[int]]


def remembering(name: str, cuts: Cuts) -> type[Policy]:
    """The policy of this name, which remembers in ``cuts`` how it cut a request."""
    of_this_name = type(mocap.policy.get(name))

    def partition(self: Policy, request: Request, setting: Setting) -> list[int]:
        key = (request.new_tokens, request.prefix_tokens, *_conditions(setting))
        if key not in cuts:
            cuts[key] = of_this_name.partition(self, request, setting)
        return cuts[key]

    return type(of_this_name.__name__, (of_this_name,), {"partition": partition})


def served(policy: type[Policy], order: str) -> Policy:
    """A policy that takes waiting requests in this order, and is otherwise the same."""
    made: Policy = type(policy.__name__, (policy,), {"order": ORDERS[order]})()
    return made


def _conditions(setting: Setting) -> tuple[object, ...]:
    """What cuts depend on besides the request: costs and capacities of the deployment."""
    assert isinstance(setting.cost, SlowestCost)
    deployment = setting.cost.deployment
    costs = (deployment.clocks, deployment.placement.stages, deployment.tile_tokens)
    return (*costs, setting.kv_capacity_bytes, setting.chunks)


def measure(
    wafer: Wafer,
    model: Model,
    trace: Workload,
    factors: Sequence[float],
    options: Options,
    case: tuple[str, bool],
) -> list[Row]:
    """Rows of one (policy, prefix reuse): every speed of arrivals, every order of service."""
    name, reuse = case
    shelf: Shelf = {}
    cutting = remembering(name, {})
    rows = []
    for factor, order in product(factors, ORDERS):
        faster = trace.compressed(factor)
        workload = faster.with_prefix_reuse() if reuse else faster
        row: Row = {"arrivals": f"{factor:g}x", "prefix reuse": reuse, "policy": name}
        policy = served(cutting, order)
        figures = _figures(wafer, model, workload, policy, options, shelf)
        rows.append({**row, "order": order, **figures})
    return rows


def _figures(
    wafer: Wafer, model: Model, workload: Workload, policy: Policy, options: Options, shelf: Shelf
) -> Row:
    """Time to first token [s], requests per second and how loaded the wafer is, or what binds.

    ``load`` is the work of the busiest stage over the time in which requests arrive (null if they
    all come at once): from 1 on the queue grows for as long as they come. ``queued`` is the share
    of requests that find the first stage taken.
    """
    try:
        plan = make_plan(wafer, model, workload, policy, options, shelf)
    except CapacityError as error:
        return {"binds": binds(error)}
    schedule, clock_hz = run_plan(plan), wafer.core.clock_hz
    arrivals = np.array([one.arrival_cycle for one in plan.requests], np.int64)
    waits = (schedule.end[-1, plan.last] - arrivals) / clock_hz
    tiers = plan.deployment.tiers
    found: Row = {"stages": len(plan.deployment.stages)}
    found |= {"weights, KV in": f"{tiers.weights}, {tiers.kv}", "mean [s]": float(waits.mean())}
    found |= {f"{name} [s]": float(np.quantile(waits, q)) for name, q in QUANTILES.items()}
    found["requests/s"] = len(plan.requests) * clock_hz / int(schedule.end.max())
    begins = plan.chunk == 0
    queued = schedule.start[0, begins] > schedule.input_ready[0, begins]
    work, span = int(plan.tasks.duration.sum(axis=1).max()), int(arrivals.max())
    return found | {"load": work / span if span else math.inf, "queued": float(queued.mean())}


def by_order(rows: Sequence[Row], order: str) -> list[Row]:
    """The table of one order of service, 80 characters wide."""
    table = []
    for row in rows:
        if row["order"] == order:
            load = row.get("load")
            full = "" if load is None or load < 1 else " !"
            case: Row = {"arrivals": row["arrivals"], "reuse": row["prefix reuse"]}
            case |= {"policy": row["policy"], "load": load and f"{load:.2f}{full}"}
            case["queued"] = None if load is None else f"{row['queued']:.0%}"
            table.append(case | {head: row.get(f"{head} [s]") for head in ("mean", *QUANTILES)})
            table[-1]["req/s"] = row.get("requests/s")
    return table


def remarks(rows: Sequence[Row]) -> list[str]:
    """What the tables say: where each policy runs, how loaded it is, what order and reuse do."""
    said = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        places = {
            f"{row['stages']} stage{'s' * (row['stages'] > 1)}, weights and KV in "
            f"{row['weights, KV in']}"
            for row in own
            if "load" in row
        }
        reasons = {f"does not run: {row['binds']}" for row in own if "binds" in row}
        said.append(f"{policy}: {'; '.join(sorted(places) + sorted(reasons))}.")
    known = {
        (row["arrivals"], row["prefix reuse"], row["policy"], row["order"]): row
        for row in rows
        if "load" in row
    }
    first, shortest = ORDERS
    for arrivals in dict.fromkeys(key[0] for key in known):
        here = {key: row for key, row in known.items() if key[0] == arrivals}
        loads = [row["load"] for row in here.values()]
        line = f"Arrivals {arrivals}: load {min(loads):.2f} to {max(loads):.2f}"
        full = dict.fromkeys(key[2] for key, row in here.items() if row["load"] >= 1)
        if full:
            line += f", saturated: {', '.join(full)}"
        elif max(loads) < IDLE:
            line += ", idle: queues are those of bursts alone"
        orders = [
            (here.get((*key[:3], first)), row) for key, row in here.items() if key[3] == shortest
        ]
        saved = [
            (here.get((arrivals, False, *key[2:])), row) for key, row in here.items() if key[1]
        ]
        line += f". Shortest first over first come: mean {_ratios(orders, 'mean [s]')}"
        line += f", p99 {_ratios(orders, 'p99 [s]')}"
        said.append(f"{line}; reuse over none: mean {_ratios(saved, 'mean [s]')}.")
    return said


def _ratios(pairs: Iterable[tuple[Row | None, Row]], figure: str) -> str:
    """Least and largest ratio of a figure over that of the reference."""
    ratios = [row[figure] / reference[figure] for reference, row in pairs if reference is not None]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"


def conditions(trace: Workload, wafer: Wafer, model: Model, options: Options) -> str:
    """What the figures hold for."""
    lengths = np.array([one.tokens for one in trace.requests])
    reused = [one.prefix_tokens for one in trace.with_prefix_reuse().requests]
    given = sum(one.prefix_tokens for one in trace.requests)
    last = trace.requests[-1].arrival_seconds
    return (
        f"{Path(trace.source).name}: {lengths.size} requests within {last:,.0f} s, "
        f"{lengths.mean():,.0f} tokens on average, {np.median(lengths):,.0f} median, "
        f"{lengths.max():,} at most; reuse saves {(sum(reused) - given) / lengths.sum():.1%} of "
        f"them. {model.name} on {wafer.name}, {options.stages} stages where the policy does not "
        f"say, chunks of at most {options.chunk_tokens:,} tokens where it cuts; causal skip on."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--wafer", default="wsc-54")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--head", type=int, default=200)
    parser.add_argument("--compress", default="1,4,8")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    if not asked.trace.exists():
        print(f"skipped: there is no trace at {asked.trace}", file=sys.stderr)
        return
    trace = Workload.from_file(asked.trace)
    trace = trace.head(min(asked.head, len(trace.requests)))
    factors = [float(each) for each in asked.compress.split(",")]
    options = Options(stages=asked.stages, chunk_tokens=asked.chunk_tokens)
    wafer, model = Wafer.load(asked.wafer), Model.load(asked.model)
    cases = list(product(asked.policies.split(","), (False, True)))
    found = in_processes(partial(measure, wafer, model, trace, factors, options), cases)
    order = {f"{factor:g}x": place for place, factor in enumerate(factors)}
    rows = sorted(
        (row for some in found for row in some),
        key=lambda row: (order[row["arrivals"]], row["prefix reuse"]),
    )
    if asked.json:
        json.dump({"schema_version": 1, "trace": trace.source, "rows": rows}, sys.stdout)
        return
    for served_first in ORDERS:
        title = f"time to first token [s], {served_first}"
        show(title, by_order(rows, served_first), asked.markdown, narrow=True)
    for line in (*remarks(rows), conditions(trace, wafer, model, options)):
        print(f"- {line}" if asked.markdown else fill(line, NARROW, subsequent_indent="  "))


if __name__ == "__main__":
    main()
