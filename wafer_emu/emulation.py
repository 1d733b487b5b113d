"""The one public entry: wafer, model, workload and policy become a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import mocap.policy
from mocap.policy import Policy
from wafer_emu.activity import Activity
from wafer_emu.carry_out import Compute, carry_out
from wafer_emu.deployment import PAGE_TOKENS
from wafer_emu.frames import Frames
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.plan import Plan, make_plan
from wafer_emu.replay import Books, replay
from wafer_emu.routing import Routing
from wafer_emu.search import search
from wafer_emu.stage_clocks import Shelf
from wafer_emu.summary import summarise
from wafer_emu.wafer import Wafer
from wafer_emu.ways import most_tokens
from wafer_emu.workload import MAX_TOKENS, Workload
from wafer_kernels import pipeline
from wafer_kernels.errors import CapacityError, DeadlockError, UsageError

if TYPE_CHECKING:
    import xarray as xr

    from wafer_emu.numbers import LogitsOf
    from wafer_emu.values import Numbers, Values

__all__ = ["Progress", "Run", "compare", "emulate", "max_length"]

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes
    ----------
    summary
        Plain mapping of results; the keys are defined in docs/metrics.md.
    plan, schedule, books
        What was planned, when it ran, and the ledgers at the end.
    record
        The run file, if one was kept.
    numbers
        The values that the plan computed, if weights were given.
    """

    summary: dict[str, Any]
    plan: Plan
    schedule: pipeline.Schedule
    books: Books
    record: Path | None = None
    numbers: Numbers | None = None

    @property
    def values(self) -> Values:
        """What the first request came to."""
        if self.numbers is None:
            raise UsageError("this run counted cycles only: pass numbers=weights to emulate()")
        return self.numbers.values[0]

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """Logits of the first request's last token, or of all (tokens, vocabulary)."""
        return self.values.logits

    @property
    def hidden(self) -> npt.NDArray[np.float32]:
        """States after the final norm, of the same tokens (tokens, hidden)."""
        return self.values.hidden

    @property
    def kv(self) -> list[npt.NDArray[np.float32]]:
        """What each layer kept of every token of the first request (tokens, elements)."""
        return self.values.kv

    @cached_property
    def _tree(self) -> xr.DataTree:
        from wafer_emu.state import open_run

        if self.record is None:
            raise UsageError(
                "this run was not recorded: pass record='run.h5' to emulate() for its tables"
            )
        return open_run(self.record)

    @property
    def tasks(self) -> xr.Dataset:
        """One row a chunk and stage."""
        return self._tree["tasks"].to_dataset()

    @property
    def kv_blocks(self) -> xr.Dataset:
        """One row a KV block."""
        return self._tree["kv_blocks"].to_dataset()

    @property
    def state(self) -> xr.Dataset:
        """SRAM and activity of every core over time."""
        return self._tree["state"].to_dataset()


def _policy(policy: str | Policy, options: Options) -> Policy:
    return mocap.policy.get(policy, options.policy) if isinstance(policy, str) else policy


def emulate(
    wafer: Wafer,
    model: Model,
    workload: Workload,
    policy: str | Policy = "mocap",
    *,
    options: Options | None = None,
    record: str | Path | None = None,
    frames: int = 64,
    progress: Progress | None = None,
    numbers: Mapping[str, npt.NDArray[np.float32]] | None = None,
    token_ids: Sequence[Sequence[int]] = (),
    prefix_kv: Sequence[Sequence[npt.NDArray[np.float32]]] | None = None,
    logits: LogitsOf = "last",
    routing: Sequence[Routing] | None = None,
    **overrides: Any,
) -> Run:
    """Run the prefill of a workload on an emulated wafer.

    Parameters
    ----------
    wafer, model, workload
        What runs where.
    policy
        Name of a policy, or an object of a class of your own.
    options
        What else is asked; single fields of it can be given as keywords.
    record
        Run file to keep, HDF5 that xarray opens.
    frames
        Frames of the state of every core in the run file.
    progress
        Called with what is being done and the share that is done.
    numbers
        Weights by their Hugging Face names: the plan is also carried out on real numbers.
    token_ids
        Tokens of each request's whole prompt; of one request the tokens themselves.
    prefix_kv
        ``kv`` of a run on each request's resident prefix; None: the dense reference makes it.
    logits
        Of the ``last`` token, or of ``all`` computed ones.
    routing
        Of each request, the experts that its tokens choose, as ``run.numbers.routing`` of another
        run has them. With ``numbers`` it is theirs; else every expert gets an even share.

    Raises
    ------
    CapacityError
        If the plan does not fit; says which stage, when, how many bytes short, what fills it.
    UsageError, ConfigError, FileError
        If what is asked does not go together, or the file cannot be written.

    Examples
    --------
    >>> wafer, model = Wafer.preset("wsc-54"), Model.preset("llama-3-8b")
    >>> run = emulate(wafer, model, Workload.single(tokens=8192), "mocap", stages=8)
    >>> [round(share, 1) for share in run.summary["stage_busy_fraction"][:2]]
    [0.5, 0.5]
    """
    options = replace(options or Options(), **overrides)
    compute: Compute | None = None
    if numbers is not None:
        if routing is not None:
            raise UsageError("numbers say themselves which experts tokens choose: no routing")
        from wafer_emu import numbers as real

        compute = partial(
            real.compute, weights=numbers, token_ids=token_ids, prefix_kv=prefix_kv, logits=logits
        )
    return _emulate(
        wafer, model, workload, policy, options, record, frames, progress, {}, routing, compute
    )


def _emulate(
    wafer: Wafer,
    model: Model,
    workload: Workload,
    policy: str | Policy,
    options: Options,
    record: str | Path | None,
    frames: int,
    progress: Progress | None,
    shelf: Shelf,
    routing: Sequence[Routing] | None = None,
    compute: Compute | None = None,
) -> Run:
    tell = progress or (lambda what, share: None)
    with Frames.open(record, wafer, options, frames) as kept:
        tell("plan", 0.0)
        plan, searched = _plan(
            wafer, model, workload, _policy(policy, options), options, shelf, tell
        )
        tell("run", 0.3)
        plan, schedule, numbers = carry_out(plan, routing, compute)
        tell("replay", 0.5)
        activity = Activity(plan)
        kept.start(plan, schedule, activity)
        books = replay(plan, schedule, kept.before)
        tell("summary", 0.9)
        summary = summarise(plan, schedule, books, activity, model, workload)
        summary["settings"]["search"] = searched
        kept.finish(plan, schedule, books, summary)
    tell("done", 1.0)
    kept_at = None if record is None else Path(record)
    return Run(summary, plan, schedule, books, kept_at, numbers)


def _plan(
    wafer: Wafer,
    model: Model,
    workload: Workload,
    policy: Policy,
    options: Options,
    shelf: Shelf,
    tell: Progress,
) -> tuple[Plan, dict[str, Any] | None]:
    """The plan that is asked for, or the best one found; what was tried if any was searched."""
    if "auto" in (options.stages, options.chunks):
        found = search(wafer, model, workload, policy, options, shelf, tell)
        return found.plan, found.tried
    return make_plan(wafer, model, workload, policy, options, shelf), None


def compare(
    wafer: Wafer,
    model: Model,
    workload: Workload,
    policies: Sequence[str | Policy],
    *,
    options: Options | None = None,
    record: Callable[[str], Path] | None = None,
    frames: int = 64,
    pool: Executor | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> list[dict[str, Any]]:
    """Run the same work under several policies; the first is the reference.

    A policy that does not fit keeps its row, with ``error`` and null ratios. A ``pool`` of
    processes shares the policies out.

    Raises
    ------
    UsageError, ConfigError
        If the question itself is wrong, under any policy.
    """
    options = replace(options or Options(), **overrides)
    asked = [_own_options(policy, options) for policy in policies]
    files = [None if record is None else record(policy.name) for policy in asked]
    shelf: Shelf | None = {} if pool is None else None
    done = 0

    def tell(what: str, share: float) -> None:
        if progress is not None and done < len(asked):
            progress(f"{asked[done].name}: {what}", (done + share) / len(asked))

    one = partial(
        _row, wafer, model, workload, options, frames, shelf, tell if pool is None else None
    )
    answers = map(one, files, asked) if pool is None else pool.map(one, files, asked)
    rows: list[dict[str, Any]] = []
    for row in answers:
        rows.append(row)
        done += 1
        tell("under way", 0.0)
    reference = rows[0]
    for row in rows:
        known = "error" not in row and "error" not in reference
        row["latency_ratio"] = (
            row["makespan_cycles"] / reference["makespan_cycles"] if known else None
        )
        row["throughput_ratio"] = (
            row["requests_per_second"] / reference["requests_per_second"] if known else None
        )
    return rows


def _row(
    wafer: Wafer,
    model: Model,
    workload: Workload,
    options: Options,
    frames: int,
    shelf: Shelf | None,
    tell: Progress | None,
    record: Path | None,
    policy: Policy,
) -> dict[str, Any]:
    """Result of one policy, or why it does not fit."""
    shelf = {} if shelf is None else shelf
    try:
        run = _emulate(wafer, model, workload, policy, options, record, frames, tell, shelf)
    except (CapacityError, DeadlockError) as error:
        failure = {"kind": error.kind, "message": error.message}
        return {"policy": policy.name, "error": failure}
    return {**run.summary, "policy": policy.name}


def _own_options(policy: str | Policy, options: Options) -> Policy:
    """A policy with those of the options that it has: the others are for its competitors."""
    if not isinstance(policy, str):
        return policy
    has = mocap.policy.get(policy).option_types()
    return mocap.policy.get(
        policy, {key: options.policy[key] for key in options.policy if key in has}
    )


def max_length(
    wafer: Wafer,
    model: Model,
    policies: Sequence[str | Policy],
    *,
    options: Options | None = None,
    prefix_tokens: int = 0,
    grain_tokens: int = PAGE_TOKENS,
    pool: Executor | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> list[dict[str, Any]]:
    """Longest prompt that each policy's plan holds, by bisection on the plan itself.

    Lengths are multiples of ``grain_tokens``; a plan moves whole pages. A ``pool`` of
    processes shares the policies out.

    Returns
    -------
    list of dict
        ``policy``, ``max_tokens`` (0 if nothing fits), ``ratio`` over the first row's, ``limiting``
        (what refuses one token more: stage, core or tier, slot, items).
    """
    options = replace(options or Options(), **overrides)
    if "auto" in (options.stages, options.chunks):
        raise UsageError("the longest prompt is that of one layout: give stages and chunks numbers")
    if options.chunk_vector is not None:
        raise UsageError("a chunk vector sums to one length: give chunks or chunk_tokens instead")
    asked = [_own_options(policy, options) for policy in policies]
    one = partial(_longest, wafer, model, options, prefix_tokens, grain_tokens)
    answers = iter(map(one, asked) if pool is None else pool.map(one, asked))
    found: list[tuple[int, dict[str, Any]]] = []
    for policy in asked:
        if progress is not None:
            progress(f"longest prompt under {policy.name}", len(found) / len(asked))
        found.append(next(answers))
    first = found[0][0]
    return [
        {
            "policy": policy.name,
            "max_tokens": tokens,
            "limiting": limiting,
            "ratio": tokens / first if first else None,
        }
        for policy, (tokens, limiting) in zip(asked, found, strict=True)
    ]


def _longest(
    wafer: Wafer,
    model: Model,
    options: Options,
    prefix_tokens: int,
    grain_tokens: int,
    policy: Policy,
) -> tuple[int, dict[str, Any]]:
    """Longest prompt that a plan holds, and why no longer one does."""
    refusal: dict[str, Any] = {}
    shelf: Shelf = {}

    def fits(tokens: int) -> bool:
        nonlocal refusal
        try:
            workload = Workload.single(tokens, prefix_tokens)
            make_plan(wafer, model, workload, policy, options, shelf, leanest=True)
        except CapacityError as error:
            refusal = {**error.details, "message": error.message}
            return False
        return True

    try:
        most = min(MAX_TOKENS, most_tokens(wafer, model, policy, options, shelf))
    except CapacityError as error:
        return 0, {**error.details, "message": error.message}
    low, high = prefix_tokens // grain_tokens, most // grain_tokens + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * grain_tokens):
            low = middle
        else:
            high = middle
    tokens = low * grain_tokens
    if tokens <= prefix_tokens:
        fits(prefix_tokens + 1)
        return 0, refusal
    if tokens == MAX_TOKENS:
        return tokens, {"limit": f"prompts of more than {MAX_TOKENS:,} tokens are not accepted"}
    fits(tokens + grain_tokens)
    return tokens, refusal
