"""The joint choice of stages and chunks, by planning and running with the emulator itself."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

import mocap.policy
from mocap.policy import Policy, Request
from wafer_emu.deployment import PAGE_TOKENS, deploy, stage_count
from wafer_emu.engine import run_plan
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.placement import place_regions
from wafer_emu.plan import Plan, make_plan
from wafer_emu.stage_clocks import Shelf
from wafer_emu.wafer import Wafer
from wafer_emu.ways import memory_tiers
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError, DeadlockError, UsageError

__all__ = ["Found", "search"]

CHUNKS_PER_STAGE = (1, 1.5, 2, 3, 4, 6, 8)
OWED = 0  # expected of what is tried whatever the time: rivals of one stage, and one pipeline
WORSE = 1.1  # more chunks are not looked at once the expected time has risen so far
Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class Found:
    """The best plan found, and what was tried on the way, for the settings of the run."""

    plan: Plan
    tried: dict[str, Any]


@dataclass(order=True)
class _Candidate:
    """Stages and chunks under a policy, and the figure expected of them [cycles]."""

    expected: int
    serial: int
    policy: Policy = field(compare=False)
    stages: int = field(compare=False)
    chunks: int | None = field(compare=False)  # None: a policy that does not cut, or by size


@dataclass
class _Search:
    """One search: what is asked, and what was found so far."""

    wafer: Wafer
    model: Model
    workload: Workload
    policy: Policy
    options: Options
    shelf: Shelf
    queue: list[_Candidate] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)
    best: tuple[int, bool, Plan] | None = None  # at equal cycles the policy asked for is better
    failure: CapacityError | DeadlockError | None = None

    def add(self, policy: Policy, stages: int, chunks: int | None, expected: int) -> None:
        """Queue a candidate."""
        candidate = _Candidate(expected, len(self.tried) + len(self.queue), policy, stages, chunks)
        heapq.heappush(self.queue, candidate)

    def try_next(self) -> tuple[_Candidate, int | None]:
        """Plan and run the most promising candidate; its figure, None if it does not fit."""
        candidate = heapq.heappop(self.queue)
        policy = candidate.policy
        options = replace(self.options, stages=candidate.stages, chunks=candidate.chunks)
        record: dict[str, Any] = {
            "policy": policy.name,
            "stages": candidate.stages,
            "chunks": candidate.chunks,
        }
        self.tried.append(record)
        try:
            plan = self._plan(self.workload, policy, options)
            cycles = self._figure(plan)
        except (CapacityError, DeadlockError) as error:
            self.failure = error
            record["error"] = {"kind": error.kind, "message": error.message}
            return candidate, None
        record["cycles"] = cycles
        record["cores_used"] = plan.deployment.placement.cores_used
        if self.best is None or (cycles, policy is not self.policy) < self.best[:2]:
            self.best = cycles, policy is not self.policy, plan
        return candidate, cycles

    def _plan(self, workload: Workload, policy: Policy, options: Options) -> Plan:
        return make_plan(self.wafer, self.model, workload, policy, options, self.shelf)

    def _figure(self, plan: Plan) -> int:
        """Cycles that a plan is judged by.

        ``latency``: time to first token, summed over requests. ``throughput``: what the same
        requests once more would add to the makespan.
        """
        schedule = run_plan(plan)
        if self.options.objective == "latency":
            ends = schedule.end[-1, plan.last]
            return int(ends.sum()) - sum(one.arrival_cycle for one in plan.requests)
        again = run_plan(self._plan(_twice(self.workload), plan.policy, plan.deployment.options))
        return int(again.end.max() - schedule.end.max())


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

    Every candidate is first judged by one even chunk in the middle of the longest request,
    ``(M + N - 1) t(L / M, (L - L / M) / 2)``, within half the time, and they are planned and run in
    that order until ``search_seconds`` are over; the one that runs then is finished, and one that
    fits is waited for, as are rivals of a fixed number of stages and the most promising pipeline.
    The policy's rivals are tried with the stages and chunks that suited it, and win where they
    are faster.

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
    hunt = _Search(wafer, model, workload, policy, options, shelf)
    rivals = [mocap.policy.get(name) for name in policy.rivals]
    longest = max(workload.requests, key=lambda one: one.computed_tokens)
    request = Request(0, longest.tokens, longest.prefix_tokens)
    counts = list(_stage_counts(wafer, model, policy, options))
    wrong: UsageError | None = None
    for stages in counts:
        least = math.inf
        for chunks in _chunk_counts(stages, policy, options, request):
            try:
                expected = _expected(hunt, stages, chunks, request)
            except UsageError as error:  # regions that this many stages do not allow
                wrong = error
                break
            hunt.add(policy, stages, chunks, expected)
            if expected > WORSE * least:
                break
            least = min(least, expected)
        half = time.monotonic() - begun > options.search_seconds / 2
        if half and any(candidate.stages > 1 for candidate in hunt.queue):
            break
    if not hunt.queue:
        assert wrong is not None
        raise wrong
    pipelines = [candidate for candidate in hunt.queue if candidate.stages > 1]
    if pipelines:
        min(pipelines).expected = OWED
        heapq.heapify(hunt.queue)
    for rival in rivals:
        if rival.stage_count in counts:
            hunt.add(rival, rival.stage_count, None, OWED)
    done: set[tuple[str, int, int | None]] = set()
    while hunt.queue:
        share = (time.monotonic() - begun) / options.search_seconds
        if share >= 1 and hunt.best is not None and hunt.queue[0].expected > OWED:
            break
        tell(f"search, {len(hunt.tried)} plans tried", min(share, 1.0))
        candidate, cycles = hunt.try_next()
        if candidate.policy is not policy or cycles is None or candidate.chunks == 1:
            continue  # a single chunk is cut alike by all
        for rival in rivals:
            key = rival.name, candidate.stages, candidate.chunks if rival.uses else None
            if rival.stage_count is None and key not in done:
                done.add(key)
                hunt.add(rival, *key[1:], cycles)
    if hunt.best is None:
        assert hunt.failure is not None
        raise hunt.failure
    return Found(hunt.best[2], _record(hunt))


def _record(hunt: _Search) -> dict[str, Any]:
    """What the settings of the run say of a search."""
    assert hunt.best is not None
    cycles, _, plan = hunt.best
    return {
        "asked_policy": hunt.policy.name,
        "objective": hunt.options.objective,
        "seconds": hunt.options.search_seconds,
        "complete": not hunt.queue,
        "chosen": {
            "policy": plan.policy.name,
            "stages": len(plan.deployment.stages),
            "chunks": max(map(len, plan.cuts)),
            "cycles": cycles,
            "cores_used": plan.deployment.placement.cores_used,
        },
        "tried": hunt.tried,
    }


def _stage_counts(wafer: Wafer, model: Model, policy: Policy, options: Options) -> Iterator[int]:
    """Stage counts worth trying: powers of two, divisors of the layers and of the dies."""
    layers = options.layers or model.layers
    if options.stages != "auto" or policy.stage_count is not None:
        count = stage_count(wafer, layers, options, policy)
        shape, order = options.region, options.placement
        yield count or len(place_regions(wafer, None, shape, layers, order))
        return
    dies = wafer.dies if wafer.dies > 1 else 0
    counts = range(1, min(layers, dies or wafer.cores) + 1)
    powers = [count for count in counts if count & (count - 1) == 0]
    yield from powers
    for count in counts:
        if count not in powers and (layers % count == 0 or (dies and dies % count == 0)):
            yield count


def _chunk_counts(
    stages: int, policy: Policy, options: Options, request: Request
) -> Iterable[int | None]:
    """Chunk counts worth trying with a number of stages."""
    if options.chunks != "auto":
        return [options.chunks]
    if "chunks" not in policy.uses:
        return [None]
    pages = max(1, request.new_tokens // PAGE_TOKENS)
    return sorted({min(pages, math.ceil(each * stages)) for each in CHUNKS_PER_STAGE})


def _expected(hunt: _Search, stages: int, chunks: int | None, request: Request) -> int:
    """Rough makespan: every chunk takes as long as an even one in the middle of the request.

    Under the roomiest memory tier; 0, so tried early, where the weights fit in none.
    """
    options = replace(hunt.options, stages=stages, chunks=chunks)
    tokens = options.usual_chunk(request.new_tokens, stages, hunt.policy.uses)
    tiers = memory_tiers(hunt.wafer, options)[-1]
    try:
        deployment = deploy(
            hunt.wafer, hunt.model, options, hunt.policy, tiers, 0, request, hunt.shelf
        )
    except CapacityError:
        return 0
    before = request.prefix_tokens + (request.new_tokens - tokens) // 2
    cycles = deployment.slowest_cost()(tokens, before)
    return cycles * (-(-request.new_tokens // tokens) + stages - 1)


def _twice(workload: Workload) -> Workload:
    """Every request of a workload two times."""
    doubled = [one for one in workload.requests for _ in range(2)]
    return Workload(
        tuple(msgspec.structs.replace(one, index=index) for index, one in enumerate(doubled)),
        f"{workload.source}, twice",
    )
