"""The joint choice of stages and chunks, by planning and running with the emulator itself."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

import mocap.policy
from mocap.policy import Policy
from wafer_emu.candidates import Candidate, Judge, chunk_counts, stage_counts
from wafer_emu.deployment import PAGE_TOKENS
from wafer_emu.engine import run_plan
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.plan import Plan, make_plan
from wafer_emu.stage_clocks import Shelf
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError, DeadlockError, UsageError

__all__ = ["Found", "search"]

Tell = Callable[[str, float], None]
LAST_FLOORS = 1.5  # share of the time up to which what waits may still be ruled out
UNFITTING = 2  # what other policies are expected to take, at least, where a plan does not fit
HANDICAP = 1.1  # of rivals where a plan was slower than the best: they seldom gain as much
FINEST = 20  # chunk counts that differ by less than this part of the best are not looked at


@dataclass(frozen=True)
class Found:
    """The best plan found, and what was tried on the way, for the settings of the run."""

    plan: Plan
    tried: dict[str, Any]


@dataclass
class _Search:
    """One search: what is asked, and what was found so far."""

    judge: Judge
    policy: Policy
    rivals: tuple[Policy, ...] = ()
    queue: list[Candidate] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)
    ruled_out: list[Candidate] = field(default_factory=list)  # their floor is above the best
    best: tuple[int, bool, Plan] | None = None  # at equal cycles the policy asked for is better
    failure: CapacityError | DeadlockError | None = None
    asked: dict[tuple[str, int], set[int]] = field(default_factory=dict)  # chunks, by stages
    proposed: int = 0

    def add(self, policy: Policy, stages: int, chunks: int | None) -> None:
        """Queue a candidate.

        Raises
        ------
        UsageError
            If regions do not allow so many stages.
        """
        candidate = Candidate(0, self.proposed, policy, stages, chunks)
        candidate.expected = self.judge.expect(candidate)
        heapq.heappush(self.queue, candidate)
        self.proposed += 1
        if chunks is not None:
            self.asked.setdefault((policy.name, stages), set()).add(chunks)

    def refine(self) -> bool:
        """Queue the chunk counts halfway from the best to its neighbours; whether there are any.

        Under the policy asked for and all rivals that cut a prompt into as many chunks as wanted.
        """
        if self.best is None or self.judge.options.chunks != "auto":
            return False
        _, _, plan = self.best
        stages, chunks = len(plan.deployment.stages), plan.deployment.options.chunks
        if not isinstance(chunks, int):
            return False
        known = self.asked.get((plan.policy.name, stages), set()) | {chunks}
        below = max((each for each in known if each < chunks), default=chunks)
        pages = max(1, self.judge.longest.new_tokens // PAGE_TOKENS)
        above = min((each for each in known if each > chunks), default=min(2 * chunks, pages))
        halfway = {(below + chunks) // 2, (chunks + above) // 2}
        further = [each for each in halfway - known if abs(each - chunks) * FINEST >= chunks]
        for each in further:
            self._add_all(stages, each)
        return bool(further)

    def _add_all(self, stages: int, chunks: int) -> None:
        """Queue stages and chunks under every policy that was asked for other chunks there."""
        for policy in (self.policy, *self.rivals):
            asked = self.asked.get((policy.name, stages), set())
            if asked and chunks not in asked:
                self.add(policy, stages, chunks)

    def rules_out(self, candidate: Candidate) -> bool:
        """Whether no plan of a candidate is better than the best so far, and is it known by now."""
        while self.best is not None:
            if candidate.floor > self.best[0]:
                self.ruled_out.append(candidate)
                return True
            if not self.judge.raise_floor(candidate):
                break
        return False

    def run(self, candidate: Candidate) -> None:
        """Plan and run a candidate."""
        policy, judge = candidate.policy, self.judge
        options = replace(judge.options, stages=candidate.stages, chunks=candidate.chunks)
        record: dict[str, Any] = {
            "policy": policy.name,
            "stages": candidate.stages,
            "chunks": candidate.chunks,
        }
        self.tried.append(record)
        try:
            plan = self._plan(judge.workload, policy, options)
            cycles = self._figure(plan)
        except (CapacityError, DeadlockError) as error:
            self.failure = error
            record["error"] = {"kind": error.kind, "message": error.message}
            self._expect_of_others(candidate, UNFITTING * candidate.expected, 1.0)
            return
        record["cycles"] = cycles
        record["cores_used"] = plan.deployment.placement.cores_used
        if self.best is None or (cycles, policy is not self.policy) < self.best[:2]:
            climbs = self.best is not None
            self.best = cycles, policy is not self.policy, plan
            if climbs:
                self._climb(candidate.stages, candidate.chunks)
        elif candidate.stages == len(self.best[2].deployment.stages):
            self.refine()
        self._expect_of_others(candidate, cycles, HANDICAP if cycles > self.best[0] else 1.0)

    def _expect_of_others(self, candidate: Candidate, cycles: int, handicap: float) -> None:
        """Expect no less of other policies with the same stages and chunks.

        With a handicap for those that have not made the best plan.
        """
        ahead = self.best and self.best[2].policy.name
        for other in self.queue:
            if (other.stages, other.chunks) == (candidate.stages, candidate.chunks):
                least = max(other.expected, cycles)
                other.expected = least if other.policy.name == ahead else int(least * handicap)
        heapq.heapify(self.queue)

    def _climb(self, stages: int, chunks: int | None) -> None:
        """What is tried next, whatever is expected: more chunks than a new best, and its rivals."""
        if chunks is None:
            return
        self.refine()
        self._add_all(stages, chunks)
        counts = {one.chunks or 0 for one in self.queue if one.stages == stages}
        more = min((count for count in counts if count > chunks), default=chunks)
        for one in self.queue:
            if one.stages == stages and one.chunks in (chunks, more):
                one.expected = 0

    def _plan(self, workload: Workload, policy: Policy, options: Options) -> Plan:
        judge = self.judge
        return make_plan(judge.wafer, judge.model, workload, policy, options, judge.shelf)

    def _figure(self, plan: Plan) -> int:
        """Cycles that a plan is judged by.

        ``latency``: time to first token, summed over requests. ``throughput``: what the same
        requests once more would add to the makespan, but no less than the busiest stage works.
        """
        schedule = run_plan(plan)
        if self.judge.options.objective == "latency":
            ends = schedule.end[-1, plan.last]
            return int(ends.sum()) - sum(one.arrival_cycle for one in plan.requests)
        twice = _twice(self.judge.workload)
        both = self._plan(twice, plan.policy, plan.deployment.options)
        busiest = int(both.tasks.duration.sum(axis=1).max())
        return max(int(run_plan(both).end.max() - schedule.end.max()), -(-busiest // 2))

    def pipelines_tried(self) -> bool:
        """Whether a plan of several stages fits."""
        return any(one["stages"] > 1 and "error" not in one for one in self.tried)


def search(
    wafer: Wafer,
    model: Model,
    workload: Workload,
    policy: Policy,
    options: Options,
    shelf: Shelf,
    tell: Tell = lambda what, share: None,
) -> Found:
    """Choose stages and chunks where ``options`` leaves them to ``auto``.

    Candidates are all numbers of stages and of chunks, under the policy and under its rivals; then
    numbers of chunks between the best one and its neighbours, as long as there is time. They are
    planned and run in the order of what is expected of them, until ``search_seconds`` are over;
    but those whose floor is above the best figure so far are ruled out. The one that runs then is
    finished; for half as long again what waits may still be ruled out. Waited for are one that
    fits, rivals of a fixed number of stages unless they are ruled out, and, where one stage is the
    fastest, a pipeline to set beside it. The fastest plan wins, whichever policy made it.

    Parameters
    ----------
    policy
        Whose stages and chunks are chosen.
    shelf
        Clocks, kept from plan to plan of one wafer, model and options.
    tell
        Told what is tried and the share of the time that is over.

    Raises
    ------
    CapacityError
        If no candidate fits: the error of the last.
    UsageError, ConfigError
        If the question itself is wrong, whatever the stages.
    """
    begun = time.monotonic()
    rivals = tuple(mocap.policy.get(name) for name in policy.rivals)
    hunt = _Search(Judge(wafer, model, workload, options, shelf), policy, rivals)
    _fill(hunt)
    left: list[Candidate] = []
    share = 0.0
    while hunt.queue or (share < 1 and hunt.refine()):
        candidate = heapq.heappop(hunt.queue)
        share = (time.monotonic() - begun) / options.search_seconds
        tell(f"search, {len(hunt.tried)} plans tried", min(share, 1.0))
        owed = hunt.best is None or candidate.policy.stage_count is not None
        if share >= 1 and not owed:
            if share >= LAST_FLOORS or not hunt.rules_out(candidate):
                left.append(candidate)
        elif not hunt.rules_out(candidate):
            hunt.run(candidate)
    if hunt.best is None:
        assert hunt.failure is not None
        raise hunt.failure
    if len(hunt.best[2].deployment.stages) == 1:
        left = _find_a_pipeline(hunt, left)
    return Found(hunt.best[2], _record(hunt, left))


def _fill(hunt: _Search) -> None:
    """Queue all candidates."""
    judge, policy = hunt.judge, hunt.policy
    counts = list(stage_counts(judge.wafer, judge.model, policy, judge.options))
    wrong: UsageError | None = None
    for stages in counts:
        for each in (policy, *hunt.rivals):
            if each.stage_count not in (None, stages):
                continue
            for chunks in chunk_counts(stages, each, judge.options, judge.longest):
                if each is not policy and chunks == 1 and policy.uses:
                    continue  # one chunk is cut alike by all
                try:
                    hunt.add(each, stages, chunks)
                except UsageError as error:  # regions that this many stages do not allow
                    wrong = error
    if not hunt.queue:
        assert wrong is not None
        raise wrong


def _find_a_pipeline(hunt: _Search, left: list[Candidate]) -> list[Candidate]:
    """Run what promises to be the fastest pipeline, until one fits; what is left then."""
    waiting = sorted(
        [*left, *hunt.ruled_out], key=lambda one: (max(one.expected, one.floor), one.serial)
    )
    for candidate in waiting:
        if hunt.pipelines_tried():
            break
        if candidate.stages > 1:
            (left if candidate in left else hunt.ruled_out).remove(candidate)
            hunt.run(candidate)
    return left


def _record(hunt: _Search, left: list[Candidate]) -> dict[str, Any]:
    """What the settings of the run say of a search."""
    assert hunt.best is not None
    cycles, _, plan = hunt.best
    return {
        "asked_policy": hunt.policy.name,
        "objective": hunt.judge.options.objective,
        "seconds": hunt.judge.options.search_seconds,
        "complete": not left,
        "chosen": {
            "policy": plan.policy.name,
            "stages": len(plan.deployment.stages),
            "chunks": max(map(len, plan.cuts)),
            "cycles": cycles,
            "cores_used": plan.deployment.placement.cores_used,
        },
        "tried": hunt.tried,
        "ruled_out": dict(Counter(one.policy.name for one in hunt.ruled_out)),
        "left": dict(Counter(one.policy.name for one in left)),
    }


def _twice(workload: Workload) -> Workload:
    """Every request of a workload two times."""
    doubled = [one for one in workload.requests for _ in range(2)]
    return Workload(
        tuple(msgspec.structs.replace(one, index=index) for index, one in enumerate(doubled)),
        f"{workload.source}, twice",
    )
