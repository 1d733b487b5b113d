"""Tiles of chunks and of whole requests: which are dealt, and which a whole request takes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mocap.policy
from mocap.policy import Request
from tests.wafer_emu.small import DIES, LLAMA, TINY
from wafer_emu.clock import Tiers
from wafer_emu.deployment import Deployment, deploy
from wafer_emu.engine import run_plan
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.plan import Plan, make_plan
from wafer_emu.wafer import Wafer
from wafer_emu.ways import LEANEST, memory_tiers
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError, ConfigError

few = settings(max_examples=40, deadline=None)
MODEL = Model.from_hf(LLAMA)
wafers = st.sampled_from([TINY, DIES])
rungs = st.integers(0, LEANEST)


def deployed(wafer: Wafer, tokens: int, chunks: int, lean: int, policy: str) -> Deployment:
    options = Options(stages=2, chunks=chunks)
    asked = mocap.policy.get(policy)
    return deploy(wafer, MODEL, options, asked, Tiers(), lean, Request(0, tokens), {})


def planned(wafer: Wafer, tokens: int, **asked: Any) -> Plan:
    options = Options(**{"stages": 2, "chunks": 2, **asked})
    chosen = mocap.policy.get("gpipe", options.policy)
    return make_plan(wafer, MODEL, Workload.single(tokens), chosen, options)


@few
@given(wafers, st.integers(1, 3000), st.integers(1, 6), rungs, st.integers(1, 3000), st.booleans())
def test_tiles_are_even_or_whole_rounds_of_the_rows(
    wafer: Wafer, tokens: int, chunks: int, lean: int, chunk: int, in_rounds: bool
) -> None:
    deployment = deployed(wafer, tokens, chunks, lean, "uniform")
    deployment = deployment.with_tile(deployment.tile_tokens, in_rounds)
    tiles = list(deployment.tiles(chunk))
    sizes = [size for size, _ in tiles]
    assert sum(sizes) == chunk
    assert [before for _, before in tiles] == [sum(sizes[:k]) for k in range(len(sizes))]
    assert 0 < min(sizes) <= max(sizes) <= deployment.tile_tokens
    rounds = in_rounds and deployment.tile_tokens >= deployment.round_tokens
    grain = deployment.round_tokens if rounds else 1
    assert all(size % grain == 0 for size in sizes[:-1])
    assert max(sizes) - min(sizes) < 2 * grain
    if chunk <= deployment.tile_tokens:
        assert len(sizes) == 1


def test_a_tile_between_two_rounds_of_the_rows_is_dealt_in_whole_rounds() -> None:
    """48 rows of 8 tokens: a tile of 2,048 takes 6 rounds, of 1,920 it takes 5."""
    model, options = Model.preset("llama-3-8b"), Options(stages=8, chunks=16)
    deployment = deploy(
        Wafer.preset("wsc-54"), model, options, mocap.policy.get("mocap"),
        Tiers("dram", "sram", "sram"), 0, Request(0, 32_768), {},
    )  # fmt: skip
    assert (deployment.tile_tokens, deployment.round_tokens) == (2048, 384)
    assert [size for size, _ in deployment.tiles(2048)] == [2048]
    assert [size for size, _ in deployment.tiles(4000)] == [4 * 384, 4 * 384, 4000 - 8 * 384]


@settings(max_examples=8, deadline=None)
@given(wafers, st.integers(1, 600), st.integers(1, 5))
def test_a_whole_request_takes_the_fastest_tile_up_to_a_chunk(
    wafer: Wafer, tokens: int, chunks: int
) -> None:
    plan = planned(wafer, tokens, chunks=chunks)
    deployment = plan.deployment
    chunk = -(-tokens // chunks)
    assert deployment.tile_tokens <= chunk
    for halvings in (0, 1, 2):
        for in_rounds in (True, False):
            other = deployment.with_tile(-(-chunk // 2**halvings), in_rounds)
            assert deployment.slowest_cost()(tokens, 0) <= other.slowest_cost()(tokens, 0)


def test_a_tile_that_is_asked_for_is_taken() -> None:
    plan = planned(TINY, 1000, policy={"tile_tokens": 77})
    assert plan.deployment.tile_tokens == 77
    free = planned(TINY, 1000)
    assert int(run_plan(free).end.max()) <= int(run_plan(plan).end.max())
    assert planned(TINY, 10, policy={"tile_tokens": 77}).deployment.tile_tokens == 10
    with pytest.raises(ConfigError):
        planned(TINY, 10, policy={"tile_tokens": 0})


def test_whole_requests_take_the_fastest_tiers_that_hold_them() -> None:
    """Not leaner tiles in SRAM where die memory lets longer ones work faster."""
    small = DIES.replace({"core.sram_bytes": 60_000})
    asked = {"region": (3, 3), "chunks": 16, "kv_tier": "dram"}
    best = planned(small, 20_000, **asked)
    assert best.deployment.tiers.activations == "dram"
    with pytest.raises(CapacityError):
        planned(small, 20_000, **asked, activations_tier="sram")


def test_tiers_leave_sram_in_the_order_of_what_they_cost() -> None:
    tried = memory_tiers(DIES, Options())
    assert len(tried) == 8
    assert tried[0] == Tiers()
    assert tried[1:3] == [Tiers("sram", "sram", "dram"), Tiers("sram", "dram", "sram")]
    assert memory_tiers(TINY, Options()) == [Tiers()]
    fixed = memory_tiers(DIES, Options(weights_tier="sram", activations_tier="dram"))
    assert fixed == [Tiers("sram", "sram", "dram"), Tiers("sram", "dram", "dram")]
