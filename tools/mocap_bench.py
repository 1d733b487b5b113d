"""Plans of one model on one wafer, and what the moves in them cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import mocap.policy
from mocap.policy import Policy
from wafer_emu.engine import run_plan
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.plan import Plan, make_plan
from wafer_emu.stage_clocks import Shelf
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload

__all__ = ["AMPLE_BYTES", "LAYOUTS", "Bench", "Layouts", "moved_bytes", "price"]

Layouts = Sequence[tuple[int, int]]
LAYOUTS: Layouts = ((8, 8), (8, 16), (16, 16))  # (stages, chunks); the paper's are not public
AMPLE_BYTES = 1 << 50  # a KV budget that never binds: all work with full tiles


class Bench:
    """Plans of one model on one wafer, which share their clocks.

    ``layouts`` are the (stages, chunks) that are measured.
    """

    def __init__(self, wafer: Wafer, model: Model, layouts: Layouts = LAYOUTS) -> None:
        self.wafer, self.model, self.layouts = wafer, model, layouts
        self.shelf: Shelf = {}

    def plan(
        self, policy: str | Policy, tokens: int, options: Options, leanest: bool = False
    ) -> Plan:
        """Plan of one prompt, as roomy as it fits or with the leanest tiles.

        Raises
        ------
        CapacityError
            If it fits in no memory.
        """
        if isinstance(policy, str):
            policy = mocap.policy.get(policy, options.policy)
        workload = Workload.single(tokens)
        return make_plan(self.wafer, self.model, workload, policy, options, self.shelf, leanest)

    def seconds(self, plan: Plan) -> float:
        """Latency of a plan [s]."""
        return int(run_plan(plan).end.max()) / self.wafer.core.clock_hz

    def slowed(self, bytes_per_second: int) -> Bench:
        """The same with other links between dies."""
        wafer = self.wafer.replace({"die_link.bytes_per_second": bytes_per_second})
        return Bench(wafer, self.model, self.layouts)


def moved_bytes(plan: Plan) -> int:
    """KV written to other stages."""
    return int(plan.transfers.written_bytes.sum())


def price(plan: Plan, overlap: bool = True) -> float:
    """Makespan over that with moves free; not overlapped, every byte moved is waited for."""
    nothing = np.zeros_like(plan.traffic.read)
    free = plan.traffic._replace(read=nothing, write=nothing, ask=nothing)
    moving = plan
    if not overlap:
        waited = plan.tasks._replace(duration=plan.compute + _serial_cycles(plan))
        moving = replace(plan, tasks=waited, traffic=free)
    return _makespan(moving) / _makespan(replace(plan, traffic=free))


def _makespan(plan: Plan) -> int:
    return int(run_plan(plan).end.max())


def _serial_cycles(plan: Plan) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Cycles of all transfers of every task, layer by layer, one after another (stage, task)."""
    cycles, links = np.zeros_like(plan.compute), plan.deployment.links
    sent = plan.transfers
    for stage, part, task in zip(*np.nonzero(sent.read + sent.write + sent.ask), strict=True):
        host = int(plan.tasks.host[stage, part])
        for moved, one, other in (
            (sent.ask, stage, host), (sent.read, host, stage), (sent.write, stage, host)
        ):  # fmt: skip
            each = links.transfer_cycles(int(moved[stage, part, task]), int(one), int(other))
            cycles[stage, task] += int(sent.layers[stage]) * each
    return cycles
