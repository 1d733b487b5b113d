"""Time to first token and throughput of each policy under the Mooncake conversation trace.

python tools/mooncake_trace.py TRACE.jsonl [--wafer wsc-54] [--model llama-3-8b] [--head 200]
                               [--compress 1,4,8] [--markdown | --json]

The trace is part of the Mooncake release (FAST '25) and not of this package. Requests are served
first come first served, and shortest first; with the KV of earlier requests reused and without.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import mocap.policy
from mocap.policy import Policy
from mocap.prefill_only import ShortestFirst
from wafer_emu.engine import run_plan
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.plan import make_plan
from wafer_emu.stage_clocks import Shelf
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError

POLICIES = ("gpipe", "layerwise", "uniform", "mocap")
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

Row = dict[str, Any]


def shortest_first(name: str) -> Policy:
    """The policy of this name, which takes the shortest of the requests that wait."""
    served = type(mocap.policy.get(name))
    made: Policy = type(f"{served.__name__}ShortestFirst", (ShortestFirst, served), {})()
    return made


def measure(
    wafer: Wafer, model: Model, trace: Workload, compress: Sequence[float], options: Options
) -> Iterator[Row]:
    """One row for each speed of arrivals, prefix reuse, policy and order of service."""
    shelf: Shelf = {}
    for factor in compress:
        for reuse in (False, True):
            faster = trace.compressed(factor)
            workload = faster.with_prefix_reuse() if reuse else faster
            for name in POLICIES:
                for order in ("first come", "shortest first"):
                    policy = mocap.policy.get(name) if order[0] == "f" else shortest_first(name)
                    row: Row = {"arrivals": f"{factor:g}x", "prefix reuse": reuse}
                    row |= {"policy": name, "order": order}
                    yield row | _served(wafer, model, workload, policy, options, shelf)


def _served(
    wafer: Wafer,
    model: Model,
    workload: Workload,
    policy: Policy,
    options: Options,
    shelf: Shelf,
) -> Row:
    """Time to first token [s] and requests per second of one policy."""
    try:
        plan = make_plan(wafer, model, workload, policy, options, shelf)
    except CapacityError as error:
        return {"refused": error.message.split(" (")[0]}
    schedule, clock_hz = run_plan(plan), wafer.core.clock_hz
    arrivals = np.array([one.arrival_cycle for one in plan.requests], np.int64)
    waits = (schedule.end[-1, plan.last] - arrivals) / clock_hz
    found: Row = {"stages": len(plan.deployment.stages), "mean [s]": float(waits.mean())}
    found |= {f"{name} [s]": float(np.quantile(waits, q)) for name, q in QUANTILES.items()}
    return found | {"requests/s": len(plan.requests) * clock_hz / int(schedule.end.max())}


def text(value: object) -> str:
    """A figure as it stands in a table."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--wafer", default="wsc-54")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--head", type=int, default=200)
    parser.add_argument("--compress", default="1,4,8")
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
    rows = list(measure(Wafer.load(asked.wafer), Model.load(asked.model), trace, factors, options))
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = [[text(row.get(head)) for head in heads] for row in rows]
    console = Console(width=None if sys.stdout.isatty() else 160)
    if asked.json:
        json.dump({"schema_version": 1, "trace": trace.source, "rows": rows}, sys.stdout)
    elif asked.markdown:
        body = [heads, ["---"] * len(heads), *lines]
        console.out("\n".join("| " + " | ".join(line) + " |" for line in body), highlight=False)
    else:
        table = Table(*heads, title=trace.source)
        for line in lines:
            table.add_row(*line)
        console.print(table)


if __name__ == "__main__":
    main()
