"""What the links between regions carried, and what it cost that flows share them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wafer_emu.engine import run_plan
from wafer_emu.model import dtype_bytes
from wafer_emu.plan import Plan
from wafer_kernels import pipeline

__all__ = ["carried_bytes", "contention_cycles", "link_columns", "links_summary"]

Int64 = npt.NDArray[np.int64]


def carried_bytes(plan: Plan) -> Int64:
    """Bytes that each link carried (link,): hand-offs, KV, and what remote attention sends."""
    stages, sent, model = len(plan.deployment.stages), plan.transfers, plan.deployment.model
    between = np.zeros((stages, stages), np.int64)
    handed = int(plan.tokens.sum()) * model.hidden_size * dtype_bytes(model.dtype)
    between[np.arange(stages - 1), np.arange(1, stages)] = handed
    home = np.broadcast_to(np.arange(stages)[:, np.newaxis], sent.hops.shape)
    layers = sent.layers[:, np.newaxis]
    host = plan.tasks.host[:, : sent.hops.shape[1]]
    np.add.at(between, (host, home), sent.read.sum(axis=2) * layers)
    np.add.at(between, (home, host), (sent.write + sent.ask).sum(axis=2) * layers)
    carried = np.zeros(plan.links.capacity.size, np.int64)
    pair = np.repeat(np.arange(stages * stages), np.diff(plan.links.first))
    np.add.at(carried, plan.links.route, between.ravel()[pair])
    return carried


def contention_cycles(plan: Plan, schedule: pipeline.Schedule) -> int:
    """Cycles by which the run is longer than if every flow had its links alone."""
    alone = plan.links._replace(shared=np.zeros_like(plan.links.shared))
    return int(schedule.end.max() - run_plan(replace(plan, links=alone)).end.max())


def link_columns(plan: Plan, schedule: pipeline.Schedule) -> dict[str, Int64]:
    """Columns of the run file's links: first core of both cells, bytes, busy cycles."""
    edges = plan.deployment.links.edges
    corners = [(a.row, a.column, b.row, b.column) for a, b in edges]
    ends = np.array(corners, np.int64).reshape(-1, 4).T
    names = ("row", "column", "to_row", "to_column")
    columns = dict(zip(names, ends, strict=True))
    return {**columns, "bytes": carried_bytes(plan), "busy_cycles": schedule.link_busy}


def links_summary(plan: Plan, schedule: pipeline.Schedule) -> dict[str, Any]:
    """The busiest link, None where there is none, and what contention costs."""
    found: dict[str, Any] = {"contention_cycles": contention_cycles(plan, schedule)}
    columns = link_columns(plan, schedule)
    if columns["bytes"].size == 0:
        return {"busiest": None, **found}
    most = int(np.argmax(columns["busy_cycles"]))
    one = {name: int(column[most]) for name, column in columns.items()}
    busiest = {
        "from": [one["row"], one["column"]],
        "to": [one["to_row"], one["to_column"]],
        "bytes": one["bytes"],
        "busy_fraction": one["busy_cycles"] / int(schedule.end.max()),
    }
    return {"busiest": busiest, **found}
