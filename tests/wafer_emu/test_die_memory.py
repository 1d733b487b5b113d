"""What passes die memory: every byte counted once, hidden behind the computation or waited for."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wafer_emu.small import DIES, LLAMA, TINY, chunks, clock_of, clocks, prefixes
from wafer_emu.activity import Activity
from wafer_emu.clock import Clock, Tiers
from wafer_emu.die_memory import arrival_cycles, layer_dram_bytes, passing_layers, stream_bytes
from wafer_emu.emulation import Run, emulate
from wafer_emu.model import Model
from wafer_emu.state import CLASSES
from wafer_emu.work import Counter
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError, ConfigError

few = settings(max_examples=40, deadline=None)
runs = settings(max_examples=15, deadline=None)
MODEL = Model.from_hf({**LLAMA, "num_hidden_layers": 4})
ROW = 24 * 2  # bytes of a token in the residual stream
policies = st.sampled_from(["gpipe", "uniform", "lbcp", "mocap"])


def run_of(tokens: int, policy: str, tier: str, requests: int = 1, **options: object) -> Run:
    work = Workload.equal(requests, tokens, 0)
    run = emulate(DIES, MODEL, work, policy, stages=2, activations_tier=tier, **options)
    assert all(invariant["holds"] for invariant in run.summary["invariants"])
    return run


@few
@given(clocks(), chunks, prefixes, st.booleans())
def test_streamed_bytes_are_those_that_the_work_counts(
    clock: Clock, tile: int, prefix: int, causal_skip: bool
) -> None:
    for layer in range(clock.model.layers):
        moved = layer_dram_bytes(clock, layer, tile, np.array([prefix, prefix + 3]), causal_skip)
        for found, before in zip(moved, (prefix, prefix + 3), strict=True):
            assert found == Counter(clock).layer_work(layer, tile, before, causal_skip).dram_bytes


@few
@given(clocks(), chunks, st.lists(prefixes, min_size=1, max_size=3))
def test_a_passing_layer_takes_its_computation_or_all_its_bytes(
    clock: Clock, tile: int, before: list[int]
) -> None:
    if clock.wafer.dram is None:
        return
    down, across = clock.region.dies(clock.wafer)
    per_cycle = down * across * clock.wafer.dram.bytes_per_second / clock.wafer.core.clock_hz
    taken = passing_layers(clock, 0, tile, np.array(before))
    for cycles, prefix in zip(taken, before, strict=True):
        weights_and_kv = Counter(clock).layer_work(0, tile, prefix).dram_bytes
        moved = weights_and_kv + 2 * stream_bytes(clock, tile)
        assert cycles == max(clock.layer(0, tile, prefix), ceil(moved / per_cycle))


def test_slow_die_memory_is_waited_for() -> None:
    slow = DIES.replace({"dram.bytes_per_second": 20_000_000})  # a byte in 100 cycles
    clock = clock_of(slow, MODEL, 3, 3, Tiers("sram", "sram", "dram"))
    (cycles,) = passing_layers(clock, 0, 100, np.array([0]))
    assert cycles == 100 * 2 * 100 * ROW > clock.layer(0, 100, 0)
    assert arrival_cycles(clock, 10) == 100 * 10 * ROW + 200  # 100 ns at 2 GHz


@runs
@given(policies, st.integers(1, 300), st.integers(1, 3), st.integers(1, 5))
def test_the_ledger_of_the_dies_closes(policy: str, tokens: int, requests: int, tiles: int) -> None:
    run = run_of(tokens, policy, "dram", requests, chunks=tiles)
    assert run.summary["settings"]["activations_tier"] == "dram"
    for book, memory in zip(run.books.dies, run.plan.memories, strict=True):
        assert book.resident[CLASSES.index("activations")].sum() == 0
        assert (book.peak <= book.capacity).all()
        assert np.array_equal(book.written - book.freed, book.resident.sum(axis=1))
        written = int(book.written[CLASSES.index("activations")])
        assert written == sum(int(memory.die_activations(int(c)).sum()) for c in run.plan.tokens)


@runs
@given(policies, st.integers(1, 300), st.integers(1, 5))
def test_bytes_of_the_stream_by_formula(policy: str, tokens: int, chunks: int) -> None:
    """Layers times tile in and out where a chunk is longer than a tile, else in and out once."""
    run = run_of(tokens, policy, "dram", chunks=chunks, weights_tier="sram", kv_tier="sram")
    deployment = run.plan.deployment
    expected = 0
    for stage in deployment.stages:
        for chunk in run.plan.tokens:
            layers = stage.layers if chunk > deployment.tile_tokens else 1
            expected += 2 * layers * int(chunk) * ROW
    assert Activity(run.plan).total().dram_bytes == expected


@runs
@given(policies, st.integers(1, 300))
def test_die_memory_is_never_faster_than_the_same_plan_on_the_cores(
    policy: str, tokens: int
) -> None:
    there = run_of(tokens, policy, "dram").plan.deployment
    here = replace(there, tiers=replace(there.tiers, activations="sram"))
    for stage in range(2):
        assert there.stage_cost(stage, tokens, 0) > here.stage_cost(stage, tokens, 0)


def test_a_whole_request_fits_once_its_activations_leave_the_cores() -> None:
    options: dict[str, Any] = {"stages": 2, "region": (3, 3), "chunks": 200, "kv_tier": "dram"}
    small = DIES.replace({"core.sram_bytes": 60_000})
    work = Workload.single(20_000)
    with pytest.raises(CapacityError, match="--activations-tier dram"):
        emulate(small, MODEL, work, "gpipe", activations_tier="sram", **options)
    run = emulate(small, MODEL, work, "gpipe", **options)
    assert run.summary["settings"]["activations_tier"] == "dram"
    assert all(invariant["holds"] for invariant in run.summary["invariants"])


def test_a_die_that_is_full_is_named() -> None:
    full = DIES.replace({"dram.capacity_bytes": 100_000})
    with pytest.raises(CapacityError, match="die memories") as error:
        emulate(
            full, MODEL, Workload.single(40_000), "gpipe", stages=2, region=(3, 3), chunks=40,
            weights_tier="sram", kv_tier="sram", activations_tier="dram",
        )  # fmt: skip
    details = error.value.details
    assert details["tier"] == "dram"
    assert sum(details["items"].values()) == details["need_bytes"]
    assert details["short_bytes"] == details["need_bytes"] - details["capacity_bytes"] > 0


def test_a_wafer_without_die_memory_says_so() -> None:
    with pytest.raises(ConfigError, match="--activations-tier sram"):
        emulate(TINY, MODEL, Workload.single(8), stages=2, activations_tier="dram")
