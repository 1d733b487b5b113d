"""Whole runs on small wafers: more hardware is never slower, a longer prompt never faster."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.wafer_emu.small import DEEPSEEK, DIES, LLAMA, MIXTRAL, TINY
from wafer_emu.emulation import emulate, max_length
from wafer_emu.model import Model
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError

few = settings(max_examples=20, deadline=None)
MODEL = Model.from_hf(LLAMA)
SIMD = TINY.replace(
    {"core.compute": {"kind": "simd", "lanes": 2, "issue_millicycles": 1700, "vector_axis": "m"}}
)
WAFERS = [TINY, SIMD, DIES]
NARROW = TINY.replace({"link.bytes_per_cycle": 1, "link.hop_cycles": 30})
wafers = st.sampled_from(WAFERS)
lengths = st.integers(1, 400)
policies = st.sampled_from(["uniform", "gpipe"])


def makespan(wafer: Wafer, tokens: int, policy: str, stages: int = 2, **options: object) -> int:
    run = emulate(wafer, MODEL, Workload.single(tokens), policy, stages=stages, **options)
    assert all(invariant["holds"] for invariant in run.summary["invariants"])
    return int(run.summary["makespan_cycles"])


@few
@given(wafers, policies, lengths, st.integers(1, 60))
def test_a_longer_prompt_is_never_faster(wafer: Wafer, policy: str, tokens: int, more: int) -> None:
    assert makespan(wafer, tokens + more, policy) >= makespan(wafer, tokens, policy)


@few
@given(wafers, policies, lengths, st.integers(2, 8))
def test_wider_links_are_never_slower(wafer: Wafer, policy: str, tokens: int, times: int) -> None:
    narrow = wafer.replace({"link.bytes_per_cycle": 2})
    wide = wafer.replace({"link.bytes_per_cycle": 2 * times})
    assert makespan(wide, tokens, policy) <= makespan(narrow, tokens, policy)


@few
@given(st.sampled_from([SIMD]), policies, lengths, st.integers(2, 6))
def test_more_lanes_are_never_slower(wafer: Wafer, policy: str, tokens: int, lanes: int) -> None:
    more = wafer.replace({"core.compute.lanes": 2 * lanes, "core.vector_lanes": 16 * lanes})
    assert makespan(more, tokens, policy) <= makespan(wafer, tokens, policy)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Wafer, Model, dict[str, Any]]:
    """A wafer, a model, and options of a run in given memory tiers."""
    config = {**draw(st.sampled_from([LLAMA, MIXTRAL, DEEPSEEK]))}
    layers = draw(st.integers(2, 5))
    config |= {"num_hidden_layers": layers, "hidden_size": draw(st.sampled_from([16, 24, 40]))}
    options: dict[str, Any] = {
        "stages": draw(st.integers(1, min(4, layers))),
        "chunks": draw(st.none() | st.integers(1, 9)),
    }
    wafer = draw(st.sampled_from([*WAFERS, NARROW]))
    if wafer.dram is not None:
        tier = st.sampled_from(["sram", "dram"])
        options |= {"weights_tier": draw(tier), "kv_tier": draw(tier)}
    return wafer, Model.from_hf(config), options


# Cuts that follow cost are made on other costs where attention has more memory: what they reach
# is as good to a few per cent, not to the cycle.
EXACTLY = ["uniform", "gpipe", "layerwise"]
CUTS_BY_COST = ["terapipe", "lbcp", "mbkr", "mocap"]
AS_GOOD = 1.05
SMALL_DEEPSEEK = Model.from_hf({**DEEPSEEK, "num_hidden_layers": 4, "hidden_size": 16})


@few
@given(
    questions(),
    st.sampled_from([*EXACTLY, *CUTS_BY_COST]),
    st.integers(1, 600),
    st.integers(3_000, 60_000),
    st.sampled_from([1, 7]) | st.integers(1, 60_000),
)
@example((SIMD, SMALL_DEEPSEEK, {"stages": 4, "chunks": 2}), "lbcp", 346, 5_406, 12)
def test_more_memory_is_never_slower(
    question: tuple[Wafer, Model, dict[str, Any]], policy: str, tokens: int, less: int, more: int
) -> None:
    wafer, model, options = question
    if policy == "layerwise":
        options = {**options, "stages": None}

    def cycles(sram_bytes: int) -> int:
        sized = wafer.replace({"core.sram_bytes": sram_bytes, "core.code_bytes": 0})
        run = emulate(sized, model, Workload.single(tokens), policy, **options)
        return int(run.summary["makespan_cycles"])

    try:
        before = cycles(less)
    except CapacityError:
        return
    assert cycles(less + more) <= before * (1 if policy in EXACTLY else AS_GOOD)


@few
@given(
    questions(),
    st.sampled_from(["uniform", "gpipe"]),
    st.integers(3_000, 20_000),
    st.sampled_from([1, 7]) | st.integers(1, 5_000),
)
def test_more_memory_never_holds_a_shorter_prompt(
    question: tuple[Wafer, Model, dict[str, Any]], policy: str, less: int, more: int
) -> None:
    wafer, model, options = question
    if options.get("kv_tier") == "dram":
        return  # as long as the die memory is large

    def longest(sram_bytes: int) -> int:
        sized = wafer.replace({"core.sram_bytes": sram_bytes, "core.code_bytes": 0})
        return int(max_length(sized, model, [policy], **options)[0]["max_tokens"])

    assert longest(less + more) >= longest(less)


@few
@given(st.integers(5_000, 60_000), st.sampled_from(["uniform", "gpipe", "mocap"]))
def test_the_longest_prompt_runs_and_no_longer_one_does(sram_bytes: int, policy: str) -> None:
    """The search looks at the leanest way of working only: it finds what a run finds."""
    wafer = TINY.replace({"core.sram_bytes": sram_bytes, "core.code_bytes": 0})
    (found,) = max_length(wafer, MODEL, [policy], stages=2)
    if found["max_tokens"]:
        assert makespan(wafer, found["max_tokens"], policy) > 0
    if (
        policy != "mocap"
    ):  # whose moves in a roomier way of working may fit where the leanest's do not
        with pytest.raises(CapacityError):
            makespan(wafer, found["max_tokens"] + 16, policy)


@pytest.mark.parametrize("policy", ["uniform", "gpipe"])
def test_4097_tokens_are_not_faster_than_4096(policy: str) -> None:
    wafer = Wafer.preset("wsc-54")
    model = Model.preset("llama-3-8b")
    runs = [
        emulate(wafer, model, Workload.single(tokens), policy, stages=8) for tokens in (4096, 4097)
    ]
    assert runs[1].summary["makespan_cycles"] >= runs[0].summary["makespan_cycles"]


@pytest.mark.parametrize("policy", ["lbcp", "mocap"])
def test_kv_that_is_moved_does_not_buy_a_slow_way_of_working(policy: str) -> None:
    """With activations on the cores the chunks' KV would leave attention next to nothing."""
    wafer, model = Wafer.preset("wsc-54"), Model.preset("llama-3-8b")
    options: dict[str, Any] = {"stages": 8, "chunks": 8, "kv_tier": "sram"}
    run = emulate(wafer, model, Workload.single(65_536), policy, **options)
    assert run.summary["settings"]["activations_tier"] == "dram"
    assert run.summary["reallocated_bytes"] == 0
