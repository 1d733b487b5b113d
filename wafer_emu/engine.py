"""The engine at work on a plan: when every chunk runs on every stage."""

from __future__ import annotations

import numpy as np

from wafer_emu.plan import Plan
from wafer_kernels import pipeline
from wafer_kernels.errors import DeadlockError

__all__ = ["run_plan"]


def run_plan(plan: Plan) -> pipeline.Schedule:
    """Run all chunks of a plan through all stages.

    Raises
    ------
    DeadlockError
        If an admitted plan cannot end, which would be a defect.
    """
    schedule = pipeline.schedule(*plan.compute.shape)
    if pipeline.run(plan.tasks, plan.slot, schedule) != pipeline.DONE:
        stage, task = np.argwhere(schedule.end == 0)[0]
        raise DeadlockError(
            f"stage {stage} can never start chunk {plan.chunk[task]} of request "
            f"{plan.request[task]}: an admitted plan should not deadlock, please report this",
            stage=int(stage),
            chunk=int(plan.chunk[task]),
            request=int(plan.request[task]),
        )
    return schedule
