"""Collectives against published values and stepped wavelets; mesh latency against BookSim."""

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import collective as naive
from wafer_kernels.collective import (
    BROADCAST,
    CHAIN_REDUCE,
    PATTERNS,
    RING_ALLREDUCE,
    STAR_REDUCE,
    TREE_REDUCE,
    TWO_PHASE_REDUCE,
    allreduce_cycles,
    collective,
    collective_cycles,
    grid_allreduce_cycles,
    grid_broadcast_cycles,
    grid_reduce_cycles,
    mean_uniform_hops,
    zero_load_cycles,
)
from wafer_kernels.errors import UsageError

PUBLISHED = Path(__file__).parents[2] / "data" / "published"
PES = st.integers(2, 12)
WAVELETS = st.integers(1, 30)
RAMPS = st.integers(0, 4)
HOPS = st.integers(1, 3)


def rows_of(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_published_collectives_are_met_exactly() -> None:
    rows = rows_of("mesh_collectives.csv")
    assert {row["pattern"] for row in rows} == {
        "broadcast",
        "chain_reduce",
        "star_reduce",
        "ring_allreduce",
    }
    for row in rows:
        size = int(row["pes"]), int(row["wavelets"]), int(row["t_r"])
        timing = collective(row["pattern"], *size)
        assert timing.cycles == int(row["cycles"])
        assert timing.cycles == collective_cycles(PATTERNS[row["pattern"]], *size)


@settings(max_examples=60, deadline=None)
@given(PES, WAVELETS, RAMPS, HOPS)
def test_broadcast_and_reduces_equal_wavelets_that_are_stepped(
    pes: int, wavelets: int, ramp: int, hop: int
) -> None:
    size = pes, wavelets, ramp, hop
    assert collective_cycles(BROADCAST, *size) == naive.broadcast(*size)
    assert collective_cycles(CHAIN_REDUCE, *size) == naive.chain_reduce(*size)
    # The published star leaves out the hop into the root.
    assert collective_cycles(STAR_REDUCE, *size) + hop == naive.star_reduce(*size)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(PATTERNS)), st.integers(2, 2000), st.integers(1, 5000), RAMPS, HOPS)
def test_parts_add_up_and_nothing_beats_the_lower_bounds(
    pattern: str, pes: int, wavelets: int, ramp: int, hop: int
) -> None:
    timing = collective(pattern, pes, wavelets, ramp, hop)
    assert timing.cycles == sum(timing[1:])
    assert min(timing[1:]) >= 0
    if pattern != "ring_allreduce":  # a vector has to pass one ramp
        assert timing.cycles >= wavelets + 2 * ramp + 1
    longer = collective(pattern, pes, wavelets + 1, ramp, hop)
    assert longer.cycles >= timing.cycles


def test_tree_and_two_phase_by_hand() -> None:
    # Tree of 8, 4 wavelets: contention 4 * 3 = 12, energy 4 * 8 * 3 / 14 -> 7, 7 hops, 3 stages.
    assert collective("tree_reduce", 8, 4, 2) == (7 + 7 + 15, 7, 7, 15)
    assert collective("tree_reduce", 8, 400, 2) == (1200 + 15, 1200, 0, 15)
    # Four groups of four, 10 wavelets: 12 + 12 hops of 10 over 15 links -> 16, 15 hops, 6 stages.
    assert collective("two_phase_reduce", 16, 10, 2) == (16 + 15 + 30, 16, 15, 30)
    assert collective("two_phase_reduce", 16, 1000, 2) == (2000 + 30, 2000, 0, 30)


def test_the_best_pattern_changes_with_the_length_of_the_vector() -> None:
    """On 512 cores: few stages win for short vectors, few wavelets per ramp for long ones."""
    reduces = (CHAIN_REDUCE, STAR_REDUCE, TREE_REDUCE, TWO_PHASE_REDUCE)

    def best(wavelets: int) -> int:
        return min(reduces, key=lambda pattern: collective_cycles(pattern, 512, wavelets, 2))

    assert best(1) == STAR_REDUCE
    assert best(256) == TWO_PHASE_REDUCE
    assert best(20_000) == CHAIN_REDUCE


@settings(max_examples=60, deadline=None)
@given(PES, PES, WAVELETS, RAMPS, HOPS)
def test_grid_forms_follow_from_rows_and_columns(
    rows: int, columns: int, wavelets: int, ramp: int, hop: int
) -> None:
    tail = wavelets, ramp, hop
    assert grid_broadcast_cycles(rows, columns, *tail) == grid_broadcast_cycles(
        columns, rows, *tail
    )
    assert grid_broadcast_cycles(1, columns, *tail) == collective_cycles(BROADCAST, columns, *tail)
    reduced = grid_reduce_cycles(CHAIN_REDUCE, rows, columns, *tail)
    assert reduced == naive.chain_reduce(rows, *tail) + naive.chain_reduce(columns, *tail)
    spread = grid_broadcast_cycles(rows, columns, *tail)
    assert grid_allreduce_cycles(CHAIN_REDUCE, rows, columns, *tail) == reduced + spread
    ring = grid_allreduce_cycles(RING_ALLREDUCE, rows, columns, *tail)
    assert ring == sum(allreduce_cycles(RING_ALLREDUCE, side, *tail) for side in (rows, columns))
    star = collective_cycles(STAR_REDUCE, columns, *tail)
    both = star + collective_cycles(BROADCAST, columns, *tail)
    assert allreduce_cycles(STAR_REDUCE, columns, *tail) == both


def test_one_core_has_nobody_to_talk_to() -> None:
    for pattern, kind in PATTERNS.items():
        assert collective(pattern, 1, 100, 2).cycles == 0
        assert collective_cycles(kind, 8, 0, 2) == 0
    assert grid_broadcast_cycles(1, 1, 9, 2) == 0


def low_load_rows() -> list[dict[str, str]]:
    """Single-flit packets under 0.3 of uniform traffic's saturation: queues are empty."""
    return [
        row
        for row in rows_of("booksim_mesh.csv")
        if row["packet_size_flits"] == "1" and float(row["injection_rate"]) <= 0.05
    ]


def test_zero_load_latency_against_booksim() -> None:
    rows = low_load_rows()
    assert [int(row["k"]) for row in rows] == [8, 8, 4, 16, 32, 64]
    hops = np.array([float(row["avg_hops"]) for row in rows])
    latency = np.array([float(row["avg_packet_latency"]) for row in rows])
    slope, offset = np.polynomial.Polynomial.fit(hops, latency, 1).convert().coef[::-1]
    assert slope == pytest.approx(4, rel=0.02)
    assert offset == pytest.approx(2, rel=0.02)
    for row, measured in zip(rows, latency, strict=True):
        side = int(row["k"])
        predicted = mean_uniform_hops(side, side) * 4 + 2
        assert predicted == pytest.approx(measured, rel=0.02)
    assert [zero_load_cycles(hops, 4, 2) for hops in (1, 2, 126)] == [6, 10, 506]


def test_mean_hops_of_uniform_traffic_by_enumeration() -> None:
    nodes = [(row, column) for row in range(3) for column in range(5)]
    total = sum(abs(a[0] - b[0]) + abs(a[1] - b[1]) + 1 for a in nodes for b in nodes)
    assert mean_uniform_hops(3, 5) == pytest.approx(total / len(nodes) ** 2)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(UsageError, match="choose one of broadcast, chain_reduce"):
        collective("gossip", 4, 4, 2)
    with pytest.raises(UsageError, match="got 0, 4, 1, 2"):
        collective("broadcast", 0, 4, 2)
