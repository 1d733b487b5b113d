"""Keeping a run: frames of every core while the ledger is replayed, then the tables."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from wafer_emu.activity import Activity
from wafer_emu.engine import input_stall, memory_stall, transfer_stall
from wafer_emu.link_use import link_columns
from wafer_emu.memory import kv_quanta_per_token, kv_quantum_bytes
from wafer_emu.options import Options
from wafer_emu.plan import Plan
from wafer_emu.recorder import Recorder
from wafer_emu.replay import Books
from wafer_emu.state import CLASSES
from wafer_emu.wafer import Wafer
from wafer_kernels import pipeline
from wafer_kernels.errors import UsageError

__all__ = ["Frames"]

Int64 = npt.NDArray[np.int64]


class Frames:
    """Writes frames at even times while the ledger is replayed; without a file it does nothing."""

    def __init__(self, recorder: Recorder | None, wafer: Wafer, options: Options, frames: int):
        self._recorder = recorder
        self._wafer, self._options, self._count = wafer, options, frames
        self._due: list[int] = []
        self._unsigned = np.min_scalar_type(_capacity(wafer, options))

    @classmethod
    def open(cls, path: str | Path | None, wafer: Wafer, options: Options, frames: int) -> Self:
        """Frames for a run file, opened before any work is done; None keeps nothing.

        Raises
        ------
        FileError
            If the file cannot be written.
        UsageError
            If there are fewer than one frame.
        """
        if frames < 1:
            raise UsageError(f"{frames} frames: ask for at least 1")
        recorder = None
        if path is not None:
            capacity = _capacity(wafer, options)
            recorder = Recorder(
                path, rows=wafer.core_rows, columns=wafer.core_columns, sram_bytes=capacity
            )
        return cls(recorder, wafer, options, frames)

    def __enter__(self) -> Self:
        inner: AbstractContextManager[object] = self._recorder or nullcontext()
        inner.__enter__()
        self._inner = inner
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.__exit__(kind, error, trace)

    def start(self, plan: Plan, schedule: pipeline.Schedule, activity: Activity) -> None:
        """Fix the times of the frames: the middles of even spans of the run."""
        self._plan, self._schedule, self._activity = plan, schedule, activity
        self._last = 0
        if self._recorder is not None:
            makespan = int(schedule.end.max())
            middles = [
                makespan * (2 * index + 1) // (2 * self._count) for index in range(self._count)
            ]
            self._due = sorted(set(middles) - {0}, reverse=True)

    def before(self, cycle: int, books: Books) -> None:
        """Write the frames that are due before an event at ``cycle``."""
        while self._due and self._due[-1] < cycle:
            self._write(self._due.pop(), books)

    def _write(self, cycle: int, books: Books) -> None:
        assert self._recorder is not None
        shape = (self._wafer.core_rows, self._wafer.core_columns)
        planes = np.zeros((len(CLASSES), *shape), self._unsigned)
        busy = np.zeros(shape, np.float32)
        span = cycle - self._last
        for stage, book in zip(self._plan.deployment.stages, books.cores, strict=True):
            region = stage.region
            here = region.cells
            planes[:, *here] = book.resident.reshape(len(CLASSES), region.rows, region.columns)
            start, end = self._schedule.start[stage.index], self._schedule.end[stage.index]
            overlap = np.minimum(end, cycle) - np.maximum(start, self._last)
            for task in np.flatnonzero(overlap > 0):
                share = overlap[task] / (end[task] - start[task]) / span
                busy[here] += self._activity.busy(stage.index, int(task)) * share
        self._recorder.frame(cycle, planes, np.minimum(busy, 1))
        self._last = cycle

    def finish(
        self, plan: Plan, schedule: pipeline.Schedule, books: Books, summary: dict[str, Any]
    ) -> None:
        """Write the frames still due, the tables and the attributes."""
        if self._recorder is None:
            return
        self.before(int(schedule.end.max()) + 1, books)
        for group, columns in _tables(plan, schedule, books, summary):
            self._recorder.table(group, columns)
        shape = (self._wafer.core_rows, self._wafer.core_columns)
        peak, at = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for stage, book in zip(plan.deployment.stages, books.cores, strict=True):
            region = stage.region
            here = region.cells
            peak[here] = book.peak.reshape(region.rows, region.columns)
            at[here] = book.peak_cycle.reshape(region.rows, region.columns)
        self._recorder.peaks(peak, at)
        deployment = plan.deployment
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._recorder.finish(
            {
                "title": f"{deployment.model.name} on {self._wafer.name} under {plan.policy.name}",
                "history": f"{now} {shlex.join(sys.argv)}",
                "configuration": {
                    "wafer": self._wafer.to_dict(),
                    "model": deployment.model.to_dict(),
                    "options": self._options.to_dict(),
                    "policy": plan.policy.name,
                    "policy_options": plan.policy.options(),
                    "workload": summary["settings"]["workload"],
                },
                "summary": summary,
                "seed": self._options.seed,
                "provenance": dict(self._wafer.provenance),
            }
        )


def _capacity(wafer: Wafer, options: Options) -> int:
    """Most bytes that a place of the ledger can hold."""
    return max(wafer.core.sram_bytes, options.kv_budget or 0)


def _tables(
    plan: Plan, schedule: pipeline.Schedule, books: Books, summary: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Int64]]]:
    """Columns of every table of the run file."""
    deployment = plan.deployment
    stages, count = schedule.start.shape
    stage = np.repeat(np.arange(stages), count)
    stall = transfer_stall(plan, schedule)
    arrival = np.array([request.arrival_cycle for request in plan.requests], np.int64)
    yield (
        "tasks",
        {
            "request": np.tile(plan.request, stages),
            "stage": stage,
            "chunk": np.tile(plan.chunk, stages),
            "tokens": np.tile(plan.tokens, stages),
            "prefix_tokens": np.tile(plan.prefix, stages),
            "input_ready_cycle": schedule.input_ready.ravel(),
            "start_cycle": schedule.start.ravel(),
            "end_cycle": schedule.end.ravel(),
            "stall_input_cycles": input_stall(plan, schedule).ravel(),
            "stall_memory_cycles": memory_stall(schedule).ravel(),
            "stall_transfer_cycles": stall.ravel(),
        },
    )
    first = np.searchsorted(plan.request, np.arange(len(plan.requests)))
    last = np.append(first[1:], count) - 1
    yield (
        "requests",
        {
            "tokens": np.array([request.tokens for request in plan.requests], np.int64),
            "prefix_tokens": np.array(
                [request.prefix_tokens for request in plan.requests], np.int64
            ),
            "chunks": last - first + 1,
            "arrival_cycle": arrival,
            "start_cycle": schedule.start[0, first],
            "end_cycle": schedule.end[-1, last],
        },
    )
    regions = [each.region for each in deployment.stages]
    yield (
        "stages",
        {
            "first_layer": np.array([each.first_layer for each in deployment.stages]),
            "layers": np.array([each.layers for each in deployment.stages]),
            "row": np.array([region.row for region in regions]),
            "column": np.array([region.column for region in regions]),
            "rows": np.array([region.rows for region in regions]),
            "columns": np.array([region.columns for region in regions]),
            "busy_cycles": plan.tasks.duration.sum(axis=1),
            "weight_bytes": np.array([memory.weight_bytes for memory in plan.memories]),
            "kv_peak_bytes": np.array(summary["kv_peak_bytes_per_stage"], np.int64),
            "kv_capacity_bytes": np.array(summary["kv_capacity_bytes_per_stage"], np.int64),
            "sram_peak_bytes": np.array([int(book.peak.max()) for book in books.cores]),
        },
    )
    yield "kv_blocks", _blocks(plan, schedule)
    yield "links", link_columns(plan, schedule)


def _blocks(plan: Plan, schedule: pipeline.Schedule) -> dict[str, Int64]:
    """KV blocks: the tokens of one piece and layer.

    A task whose memory goes layer by layer has an instant for every layer, else one for all.
    """
    deployment, tasks = plan.deployment, plan.tasks
    last = np.flatnonzero(plan.last)
    rows: list[tuple[int, ...]] = []
    for stage, by_task in enumerate(plan.pieces.written):
        clock, placed = deployment.clocks[stage], deployment.stages[stage]
        token_bytes = kv_quanta_per_token(clock) * kv_quantum_bytes(clock)
        begin, end = schedule.layer_start[stage], schedule.layer_end[stage]
        for piece in (piece for pieces in by_task for piece in pieces):
            request = int(plan.request[piece.written])
            host = int(tasks.host[stage, piece.part])
            for layer in range(placed.layers):
                at = layer * int(tasks.layers[stage]) // placed.layers
                born, moved = int(begin[piece.written, at]), int(end[piece.pushed, at])
                freed = int(end[last[request], at])
                rows.append(
                    (
                        request, placed.first_layer + layer, piece.first, piece.tokens, stage,
                        host, born, moved if piece.part else -1, freed, piece.tokens * token_bytes,
                    )
                )  # fmt: skip
    names = "request layer token tokens home host born_cycle moved_cycle freed_cycle bytes"
    columns = np.array(rows, np.int64).reshape(-1, 10).T
    return dict(zip(names.split(), columns, strict=True))
