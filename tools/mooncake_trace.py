"""Time to first token and throughput of each policy under a request trace.

python tools/mooncake_trace.py TRACE.jsonl [--wafer wsc-54] [--model llama-3-8b] [--head 200]
                               [--compress 1,4,8] [--policies A,B] [--markdown | --json]

Made for the Mooncake conversation trace (FAST '25 release), which is no part of this package; any
trace that `wafer-emu run --workload` reads will do. Arrivals are as given and compressed, the KV of
earlier requests is reused or not, and requests are served first come first, or shortest first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import mocap.policy
from mocap.policy import Policy, Request, Setting
from mocap.prefill_only import ShortestFirst
from tools.processes import in_processes
from tools.tables import Row, binds, show
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
FIGURES = ("mean [s]", *(f"{name} [s]" for name in QUANTILES), "requests/s")

Cuts = dict[tuple[object, ...], list[int]]


def served(name: str, order: str, cuts: Cuts) -> Policy:
    """The policy of this name, which takes waiting requests in this order.

    Cuts are remembered in ``cuts``: when a request arrives and who goes first does not change them.
    """
    of_this_name = type(mocap.policy.get(name))

    def partition(self: Policy, request: Request, setting: Setting) -> list[int]:
        key = (request.new_tokens, request.prefix_tokens, *_conditions(setting))
        if key not in cuts:
            cuts[key] = of_this_name.partition(self, request, setting)
        return cuts[key]

    members = {"order": ORDERS[order], "partition": partition}
    made: Policy = type(of_this_name.__name__, (of_this_name,), members)()
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
    cuts: Cuts = {}
    rows = []
    for factor, order in product(factors, ORDERS):
        faster = trace.compressed(factor)
        workload = faster.with_prefix_reuse() if reuse else faster
        row: Row = {"arrivals": f"{factor:g}x", "prefix reuse": reuse, "policy": name}
        policy = served(name, order, cuts)
        figures = _figures(wafer, model, workload, policy, options, shelf)
        rows.append({**row, "order": order, **figures})
    return rows


def _figures(
    wafer: Wafer, model: Model, workload: Workload, policy: Policy, options: Options, shelf: Shelf
) -> Row:
    """Time to first token [s] and requests per second, or what binds."""
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
    return found | {"requests/s": len(plan.requests) * clock_hz / int(schedule.end.max())}


def side_by_side(rows: Iterable[Row]) -> list[Row]:
    """One row a case, with the figures of both orders of service next to each other."""
    merged: dict[tuple[object, ...], Row] = {}
    for row in rows:
        case = (row["arrivals"], row["prefix reuse"], row["policy"])
        one = merged.setdefault(case, {})
        one |= {head: value for head, value in row.items() if head not in (*FIGURES, "order")}
        one |= {f"{row['order']}: {head}": row.get(head) for head in FIGURES}
    return list(merged.values())


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
    show("time to first token and throughput", side_by_side(rows), asked.markdown)
    print(conditions(trace, wafer, model, options))


if __name__ == "__main__":
    main()
