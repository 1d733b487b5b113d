"""Whole runs on small wafers: more hardware is never slower, a longer prompt never faster."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wafer_emu.small import DIES, LLAMA, TINY
from wafer_emu.emulation import emulate
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


@few
@given(wafers, policies, lengths, st.integers(8_000, 40_000), st.integers(2, 4))
def test_more_memory_holds_whatever_less_memory_holds(
    wafer: Wafer, policy: str, tokens: int, sram_bytes: int, times: int
) -> None:
    """Not that it is faster: tilings are chosen by an estimate, which misses by a few percent."""
    try:
        makespan(wafer.replace({"core.sram_bytes": sram_bytes}), tokens, policy)
    except CapacityError:
        return
    makespan(wafer.replace({"core.sram_bytes": times * sram_bytes}), tokens, policy)


@pytest.mark.parametrize("policy", ["uniform", "gpipe"])
def test_4097_tokens_are_not_faster_than_4096(policy: str) -> None:
    wafer = Wafer.preset("wsc-54")
    model = Model.preset("llama-3-8b")
    runs = [
        emulate(wafer, model, Workload.single(tokens), policy, stages=8) for tokens in (4096, 4097)
    ]
    assert runs[1].summary["makespan_cycles"] >= runs[0].summary["makespan_cycles"]
