"""Links slower than a byte a cycle keep their rate, and every ceiling stays exact."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wafer_emu.small import DIES, LLAMA, clock_of, clocks, sizes
from wafer_emu.clock import Clock
from wafer_emu.emulation import emulate
from wafer_emu.engine import run_plan
from wafer_emu.links import LinkRate, edge_share, in_shares_of_a_byte, slowest_link
from wafer_emu.model import Model
from wafer_emu.placement import Region
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels.gemm import gemm

few = settings(max_examples=40, deadline=None)
WSC = Wafer.preset("wsc-54")
MODEL = Model.from_hf(LLAMA)
rates = st.integers(1, 10**13)


@few
@given(rates, st.integers(1, 64))
def test_a_share_of_an_edge_is_exact_to_a_1024th_of_a_byte(rate: int, lanes: int) -> None:
    link = edge_share(WSC.replace({"die_link.bytes_per_second": rate}), lanes)
    exact = Fraction(rate, lanes * WSC.core.clock_hz)
    carried = Fraction(link.bytes, link.cycles)
    assert 0 < carried <= min(exact, WSC.link.bytes_per_cycle)
    if exact >= Fraction(1, 1024):
        assert min(exact, WSC.link.bytes_per_cycle) - carried < Fraction(1, 1024)
    assert link.hop_cycles == 1 + 50  # 25 ns at 2 GHz


@few
@given(st.integers(1, 300), st.integers(1, 2000), st.integers(0, 10**9), st.integers(1, 99))
def test_transfers_end_at_the_exact_ceiling(
    carried: int, cycles: int, moved: int, lanes: int
) -> None:
    link = LinkRate(carried, cycles, 1)
    assert link.transfer_cycles(moved, lanes) == ceil(Fraction(moved * cycles, lanes * carried))


@few
@given(clocks(), sizes, sizes, sizes, st.integers(2, 1024))
def test_counting_in_shares_of_a_byte_changes_no_time(
    clock: Clock, m: int, k: int, n: int, shares: int
) -> None:
    same = LinkRate(clock.grid.link_bytes_per_cycle * shares, shares, clock.grid.hop_cycles)
    assert gemm(in_shares_of_a_byte(clock.grid, same), m, k, n).cycles == (
        gemm(clock.grid, m, k, n).cycles
    )


@few
@given(sizes, sizes, sizes, st.integers(1, 7))
def test_a_slow_link_takes_as_long_as_the_larger_bytes_on_a_fast_one(
    m: int, k: int, n: int, slower: int
) -> None:
    """A byte in ``slower`` cycles: as if every element were so many times as wide, SRAM apart."""
    grid = clock_of(DIES, MODEL, 4, 3).grid
    free = grid._replace(core=grid.core._replace(read_bytes_per_cycle=0, write_bytes_per_cycle=0))
    slow = in_shares_of_a_byte(free, LinkRate(1, slower, grid.hop_cycles))
    wide = free._replace(element_bytes=free.element_bytes * slower, link_bytes_per_cycle=1)
    assert gemm(slow, m, k, n).cycles == gemm(wide, m, k, n).cycles


def test_nominal_links() -> None:
    assert slowest_link(WSC, Region(0, 0, 16, 16)) == (256, 1, 1)
    assert slowest_link(WSC, Region(0, 0, 48, 32)) == (125, 2, 51)
    slow = WSC.replace({"die_link.bytes_per_second": 10**9})
    assert slowest_link(slow, Region(0, 0, 48, 32))[:2] == (1, 32)


@pytest.mark.parametrize("policy", ["uniform", "gpipe"])
def test_edges_below_a_byte_a_cycle_go_on_slowing_a_run_down(policy: str) -> None:
    """On 3 x 3 cores a die's edge of 6 GB/s is a byte a cycle and core."""
    makespans = [
        emulate(
            DIES.replace({"die_link.bytes_per_second": rate}), MODEL, Workload.single(64), policy,
            stages=2, region=(6, 6),
        ).summary["makespan_cycles"]
        for rate in (6 * 10**9, 3 * 10**9, 10**9, 10**8, 10**6)
    ]  # fmt: skip
    assert makespans == sorted(set(makespans))
    assert makespans[-1] > 50 * makespans[-2]  # no floor under the rate


def test_hand_offs_slow_down_with_the_edge() -> None:
    clock_hz = DIES.core.clock_hz
    for rate in (10**12, 10**9, 10**6):
        wafer = DIES.replace({"die_link.bytes_per_second": rate, "die_link.latency_seconds": 0.0})
        plan = emulate(wafer, MODEL, Workload.single(64), "uniform", stages=2, region=(3, 3)).plan
        schedule = run_plan(plan)
        links, moved = plan.deployment.links, 64 // 2 * 24 * 2
        took = ceil(Fraction(moved * clock_hz, rate))
        assert links.transfer_cycles(moved, 0, 1) - links.latency(0, 1) == took
        assert schedule.input_ready[1, 0] - schedule.end[0, 0] == took + links.latency(0, 1)
