"""KV that is freed layer by layer, and KV that is pushed to its host late: plans, ledger, file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wafer_emu.numeric_cases import Case, Given, moving_cases
from tests.wafer_emu.test_service import CONFIG, WAFER
from wafer_emu.emulation import Run, emulate, max_length
from wafer_emu.engine import transfer_stall
from wafer_emu.memory import kv_quantum_bytes
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.replay import Books, replay
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError

STAGES = CHUNKS = 4
LAYERS = 2  # of a stage
MODEL = Model.from_hf({**CONFIG, "num_hidden_layers": STAGES * LAYERS})
UNEVEN = Model.from_hf({**CONFIG, "num_hidden_layers": 2 * STAGES + 1})
TOKEN_BYTES = 2 * MODEL.kv_heads * MODEL.head_dim * 4  # of one layer
BUDGET = 1200 * LAYERS * TOKEN_BYTES


def run_of(tokens: int, policy: str = "mbkr", requests: int = 1, **asked: Any) -> Run:
    record = asked.pop("record", None)
    options = Options(stages=STAGES, chunks=CHUNKS, kv_budget=BUDGET, policy=asked)
    return emulate(
        WAFER, MODEL, Workload.equal(requests, tokens), policy, options=options, record=record
    )


@pytest.mark.parametrize(("free", "alone", "pair"), [("task", 8, 12), ("layer", 7.5, 11)])
def test_longest_prompts_reach_the_bound(free: str, alone: float, pair: float) -> None:
    """Uniform, M = N = 8, L = 2: alone M - 1 chunks and a layer of the last, pairs 3N/2 - 2 + 2/L.

    Freed task by task: M chunks alone, 3N/2 in a pair.
    """
    model = Model.from_hf({**CONFIG, "num_hidden_layers": 8 * LAYERS})
    budget = 9600 * LAYERS * TOKEN_BYTES
    options = Options(stages=8, chunks=8, kv_budget=budget, policy={"kv_free": free})
    rows = max_length(WAFER, model, ["uniform", "mbkr"], options=options)
    pages = 3 * 16 * 8
    for row, most in zip(rows, (9600 * 8 / alone, 9600 * 8 * 2 / pair), strict=True):
        assert most - pages < row["max_tokens"] <= most + 16
    assert rows[1]["ratio"] == pytest.approx(2 * alone / pair, rel=0.01)


def recount(run: Run) -> list[int]:
    """Most KV bytes of every stage, from the table of blocks alone."""
    blocks = run.kv_blocks.to_dataframe()
    cycles = np.unique(blocks[["born_cycle", "moved_cycle", "freed_cycle"]])
    peaks = []
    for stage in range(STAGES):
        kept = []
        for cycle in cycles:
            alive = blocks[(blocks.born_cycle <= cycle) & (cycle < blocks.freed_cycle)]
            kept.append(int(alive[alive.host == stage].bytes.sum()))
        peaks.append(max(kept))
    return peaks


@pytest.mark.parametrize("free", ["task", "layer"])
@pytest.mark.parametrize("requests", [1, 3])
def test_blocks_of_the_file_add_up_to_the_peaks(tmp_path: Path, free: str, requests: int) -> None:
    """At write, KV is with its host from its birth on: blocks alone give each stage's peak."""
    run = run_of(1500, requests=requests, kv_free=free, record=tmp_path / "run.h5")
    assert recount(run) == run.summary["kv_peak_bytes_per_stage"]
    assert run.summary["reallocated_bytes"] > 0
    assert all(each["holds"] for each in run.summary["invariants"])


@pytest.mark.parametrize("free", ["task", "layer"])
@pytest.mark.parametrize("push", ["write", "late"])
def test_what_was_written_and_not_freed_is_resident_at_every_event(free: str, push: str) -> None:
    """Against the grants of the schedule: written as a layer begins, freed as the last one ends."""
    run = run_of(1500, requests=3, kv_free=free, push=push, moved="oldest")
    tasks, schedule = run.plan.tasks, run.schedule
    quantum = kv_quantum_bytes(run.plan.deployment.clocks[0])
    last = np.flatnonzero(tasks.last)
    seen = 0

    def check(cycle: int, books: Books) -> None:
        """Everything before ``cycle`` has happened, of what happens at it perhaps a part."""
        nonlocal seen
        if cycle == seen:
            return
        seen, resident = cycle, 0
        for stage, task in np.ndindex(schedule.start.shape):
            layers = int(tasks.layers[stage])
            end = last[np.searchsorted(last, task)]
            for layer in range(layers):
                begun = schedule.layer_start[stage, task, layer] < cycle
                if begun and schedule.layer_end[stage, end, layer] >= cycle:
                    resident += int(tasks.need[stage, :, task].sum()) // layers
                    if schedule.layer_end[stage, task, layer] < cycle:
                        resident -= int(tasks.leave[stage, task]) // layers
        assert books.resident_kv() == resident * quantum
        assert books.balanced()

    replay(run.plan, schedule, check)
    assert seen == schedule.end.max()


@settings(max_examples=40, deadline=None)
@given(
    case=moving_cases(STAGES),
    by_layer=st.booleans(),
    requests=st.integers(1, 3),
    spare=st.integers(0, 20),
)
def test_any_cuts_and_moves_keep_the_ledger(
    case: Case, by_layer: bool, requests: int, spare: int
) -> None:
    """A budget that one request just needs: those behind it wait, between layers too."""
    cuts, moves = case
    policy = Given(cuts, moves, by_layer)
    ample = sum(cuts) * UNEVEN.layers * TOKEN_BYTES

    def run(budget: int, requests: int = requests) -> Run:
        options = Options(stages=STAGES, kv_budget=budget)
        return emulate(WAFER, UNEVEN, Workload.equal(requests, sum(cuts)), policy, options=options)

    # In slots every stage takes as long, so that a request may need more than it took in cycles.
    alone = run(ample, 1).summary["kv_peak_bytes_per_stage"]
    budget = max(alone) + spare * TOKEN_BYTES
    try:
        tight = run(budget)
    except CapacityError:
        return
    for found in (tight, run(ample * requests)):
        assert all(each["holds"] for each in found.summary["invariants"])
        stalls = found.summary["stall_cycles"]
        schedule, plan = found.schedule, found.plan
        assert stalls["memory"] == (schedule.memory_wait + schedule.layer_wait).sum()
        spans = schedule.end - schedule.start
        waits = schedule.layer_wait + transfer_stall(plan, schedule)
        assert stalls["transfer"] == transfer_stall(plan, schedule).sum() >= 0
        assert np.array_equal(spans, plan.compute + waits)
    assert max(tight.summary["kv_peak_bytes_per_stage"]) <= budget


def test_layers_come_and_go_one_by_one(tmp_path: Path) -> None:
    run = run_of(1300, kv_free="layer", record=tmp_path / "run.h5")
    blocks, tasks = run.kv_blocks.to_dataframe(), run.tasks.to_dataframe()
    for home in range(STAGES):
        first = int(blocks[blocks.home == home].layer.min())
        ends = [set(blocks[blocks.layer == first + each].freed_cycle) for each in range(LAYERS)]
        last = tasks[(tasks.stage == home) & (tasks.chunk == CHUNKS - 1)].iloc[0]
        half = last.start_cycle + (last.end_cycle - last.start_cycle) // 2
        assert ends == [{half}, {last.end_cycle}]


def test_one_layer_at_a_time_is_the_same_for_one_chunk() -> None:
    """prefill-only keeps KV of one layer: a request of one chunk whose layers come and go."""
    run = emulate(WAFER, MODEL, Workload.single(300), "prefill-only")
    assert run.summary["kv_peak_bytes_per_stage"] == [300 * TOKEN_BYTES]
    assert all(each["holds"] for each in run.summary["invariants"])


def test_late_pushes_come_with_a_later_chunk(tmp_path: Path) -> None:
    run = run_of(1500, push="late", moved="oldest", record=tmp_path / "run.h5")
    blocks, tasks = run.kv_blocks.to_dataframe(), run.tasks.to_dataframe()
    moved = blocks[blocks.host != blocks.home]
    assert len(moved)
    late = 0
    for block in moved.itertuples():
        own = tasks[tasks.stage == block.home]
        written = own[own.start_cycle == block.born_cycle].iloc[0]
        pushed = own[own.end_cycle == block.moved_cycle].iloc[0]
        assert pushed.chunk >= written.chunk
        late += pushed.chunk > written.chunk
    assert late
    assert all(each["holds"] for each in run.summary["invariants"])


def test_late_pushes_read_less_and_never_move_more() -> None:
    for requests in (1, 3):
        write = run_of(1500, requests=requests, moved="oldest").summary
        late = run_of(1500, requests=requests, moved="oldest", push="late").summary
        assert 0 < late["reallocated_bytes"] <= write["reallocated_bytes"]
        assert late["remote_read_bytes"] < write["remote_read_bytes"]


def test_what_home_has_room_for_is_not_pushed() -> None:
    assert run_of(1200, trigger="balance").summary["reallocated_bytes"] > 0
    assert run_of(1200, trigger="balance", push="late").summary["reallocated_bytes"] == 0


def test_reports_say_when_kv_is_freed() -> None:
    freed = [
        run_of(600, kv_free=free).summary["settings"]["kv_freed"] for free in ("task", "layer")
    ]
    assert freed == ["request", "layer"]
