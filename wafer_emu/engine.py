"""The engine at work on a plan: when every chunk runs on every stage."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wafer_emu.plan import Plan
from wafer_kernels import pipeline
from wafer_kernels.errors import DeadlockError

__all__ = ["free_cycles", "input_stall", "memory_stall", "run_plan", "transfer_stall"]

Int64 = npt.NDArray[np.int64]


def run_plan(plan: Plan) -> pipeline.Schedule:
    """Run all chunks of a plan through all stages.

    Raises
    ------
    DeadlockError
        If an admitted plan cannot end, which would be a defect.
    """
    schedule = pipeline.schedule(plan.tasks, plan.links.capacity.size)
    ended = pipeline.run(plan.tasks, plan.slot, plan.traffic, plan.links, schedule)
    if ended != pipeline.DONE:
        stage, task = np.argwhere(schedule.end == 0)[0]
        raise DeadlockError(
            f"stage {stage} can never start chunk {plan.chunk[task]} of request "
            f"{plan.request[task]}: an admitted plan should not deadlock, please report this",
            stage=int(stage),
            chunk=int(plan.chunk[task]),
            request=int(plan.request[task]),
        )
    return schedule


def free_cycles(schedule: pipeline.Schedule) -> Int64:
    """Cycle from which each stage is free for each task (stage, task): 0 for its first."""
    first = np.zeros((schedule.end.shape[0], 1), np.int64)
    return np.concatenate([first, schedule.end[:, :-1]], axis=1)


def input_stall(plan: Plan, schedule: pipeline.Schedule) -> Int64:
    """Cycles (stage, task) that a free stage waits for the input of a request that has arrived."""
    arrival = np.array([request.arrival_cycle for request in plan.requests], np.int64)
    waiting = np.maximum(free_cycles(schedule), arrival[plan.request])
    return np.maximum(0, schedule.input_ready - waiting)


def memory_stall(schedule: pipeline.Schedule) -> Int64:
    """Cycles (stage, task) that wait for memory: before a task, and between its layers."""
    return schedule.memory_wait + schedule.layer_wait


def transfer_stall(plan: Plan, schedule: pipeline.Schedule) -> Int64:
    """Cycles (stage, task) inside a task in which it only waits for KV."""
    return schedule.end - schedule.start - schedule.layer_wait - plan.tasks.duration
