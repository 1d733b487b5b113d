"""A plan carried out: when its tasks run and, if weights are given, what they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from wafer_emu.engine import run_plan
from wafer_emu.plan import Plan, routed
from wafer_emu.replay import events
from wafer_emu.routing import Routing
from wafer_kernels import pipeline

if TYPE_CHECKING:
    from wafer_emu.values import Numbers

__all__ = ["Compute", "carry_out"]

Compute = Callable[[Plan, pipeline.Schedule], "Numbers"]


def carry_out(
    plan: Plan, routing: Sequence[Routing] | None, compute: Compute | None
) -> tuple[Plan, pipeline.Schedule, Numbers | None]:
    """Run a plan's tasks, and its numbers if there is something to ``compute`` them.

    Which experts tokens choose is known once their numbers are: the same plan is then timed again
    with the loads that they gave the experts. Values do not depend on when tasks run, but which
    cores keep which KV does; so the numbers are computed again if events now come in another order.

    Returns
    -------
    tuple
        The plan with its loads, when it ran, and the numbers that ran like that.
    """
    if routing is not None:
        plan = routed(plan, routing)
    schedule = run_plan(plan)
    if compute is None:
        return plan, schedule, None
    numbers = compute(plan, schedule)
    if not numbers.routing:
        return plan, schedule, numbers
    plan = routed(plan, numbers.routing)
    timed = run_plan(plan)
    if _order(plan, timed) != _order(plan, schedule):
        numbers = compute(plan, timed)
    return plan, timed, numbers


def _order(plan: Plan, schedule: pipeline.Schedule) -> list[tuple[int, ...]]:
    """What happens after what: (END or START, stage, task, layer)."""
    return [event[1:] for event in events(plan.tasks, schedule)]
