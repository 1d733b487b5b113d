"""Tile cycles against SCALE-Sim's results, an array stepped cycle by cycle, and closed forms."""

import csv
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import systolic as naive
from wafer_kernels.errors import ConfigError, UsageError
from wafer_kernels.systolic import (
    padded_macs,
    simd_core,
    sram_elements,
    systolic_core,
    tile,
    tile_cycles,
    vector_cycles,
)

PUBLISHED = Path(__file__).parents[2] / "data" / "published" / "scalesim_cycles.csv"
DATAFLOWS = st.sampled_from(["os", "ws", "is"])
SIZES = st.integers(1, 20)


def scalesim_rows() -> list[dict[str, str]]:
    with PUBLISHED.open(newline="") as file:
        return list(csv.DictReader(file))


def matrix(rng: random.Random, rows: int, columns: int) -> list[list[int]]:
    return [[rng.randint(-9, 9) for _ in range(columns)] for _ in range(rows)]


def test_scalesim_has_90_rows_and_every_one_is_our_duration_less_one() -> None:
    rows = scalesim_rows()
    assert len(rows) == 90
    for row in rows:
        m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        core = systolic_core(int(row["array_rows"]), int(row["array_cols"]), row["dataflow"])
        timing = tile(core, m, k, n, 1)
        assert timing.cycles - 1 == int(row["total_cycles"])  # they print the last cycle's index
        published = float(row["overall_utilization_percent"]) / 100
        ours = timing.utilization * timing.cycles / (timing.cycles - 1)
        assert ours == pytest.approx(published, abs=6e-7)


def test_scalesim_sram_counts() -> None:
    for row in scalesim_rows():
        m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        array = int(row["array_rows"]), int(row["array_cols"])
        reads, writes = sram_elements(systolic_core(*array, row["dataflow"]), m, k, n)
        assert reads == int(row["sram_ifmap_reads"]) + int(row["sram_filter_reads"])
        published = int(row["sram_ofmap_writes"])
        if row["dataflow"] == "os":  # their count adds rows + columns per fold, which nobody writes
            published -= -(-m // array[0]) * -(-n // array[1]) * sum(array)
        assert writes == published


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, DATAFLOWS, SIZES, SIZES, SIZES, st.booleans())
def test_array_equals_one_that_is_stepped_cycle_by_cycle(
    rows: int, columns: int, dataflow: str, m: int, k: int, n: int, drain: bool
) -> None:
    rng = random.Random(m * 10_000 + k * 100 + n)
    a, b = matrix(rng, m, k), matrix(rng, k, n)
    core = systolic_core(rows, columns, dataflow, explicit_drain=drain)
    stepped = naive.array_cycles(rows, columns, dataflow, a, b, drain=drain)
    assert tile_cycles(core, m, k, n, 2) == stepped
    assert sram_elements(core, m, k, n) == naive.sram_traffic(rows, columns, dataflow, m, k, n)


@pytest.mark.parametrize("dataflow", ["os", "ws", "is"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5)])
def test_7x257x129_on_odd_arrays(rows: int, columns: int, dataflow: str) -> None:
    rng = random.Random(7)
    a, b = matrix(rng, 7, 257), matrix(rng, 257, 129)
    core = systolic_core(rows, columns, dataflow)
    assert tile_cycles(core, 7, 257, 129, 2) == naive.array_cycles(rows, columns, dataflow, a, b)


def test_hand_counted_cases() -> None:
    assert tile(systolic_core(1, 1), 1, 1, 1, 1).cycles == 1
    assert tile(systolic_core(4, 4), 4, 4, 4, 1).cycles == 10
    assert tile(systolic_core(128, 128), 128, 128, 128, 1).cycles == 382
    assert tile(systolic_core(128, 128, explicit_drain=True), 128, 128, 128, 1).cycles == 510
    assert tile(systolic_core(8, 8, depth=4), 8, 32, 8, 2).cycles == 8 + 14
    assert tile(systolic_core(8, 8, depth=4), 8, 33, 8, 2).cycles == 9 + 14


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 9000), SIZES, SIZES, SIZES)
def test_simd_equals_exact_fractions(lanes: int, issue: int, m: int, k: int, n: int) -> None:
    assert tile_cycles(simd_core(lanes, issue), m, k, n, 2) == naive.simd_cycles(
        lanes, issue, m, k, n
    )
    along_n = simd_core(lanes, issue, vector_axis=1)
    assert tile_cycles(along_n, n, k, m, 2) == naive.simd_cycles(lanes, issue, m, k, n)


def test_sram_bandwidth_bounds_a_tile_when_it_must() -> None:
    core = systolic_core(16, 16, read_bytes_per_cycle=4, write_bytes_per_cycle=1)
    timing = tile(core, 16, 8, 16, 2)
    assert timing.compute_cycles == 38
    assert timing.read_cycles == (16 * 8 + 8 * 16) * 2 // 4 == 128
    assert timing.write_cycles == 16 * 16 * 2
    assert timing.cycles == 512
    assert timing.utilization == 16 * 8 * 16 / (256 * 512)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), SIZES, SIZES, SIZES, DATAFLOWS, st.integers(1, 8))
def test_more_bandwidth_or_lanes_is_never_slower(
    rate: int, more: int, m: int, k: int, n: int, dataflow: str, lanes: int
) -> None:
    slow = systolic_core(4, 6, dataflow, read_bytes_per_cycle=rate, write_bytes_per_cycle=rate)
    fast = slow._replace(read_bytes_per_cycle=rate + more, write_bytes_per_cycle=rate + more)
    unbounded = slow._replace(read_bytes_per_cycle=0, write_bytes_per_cycle=0)
    cycles = [tile_cycles(core, m, k, n, 2) for core in (slow, fast, unbounded)]
    assert cycles == sorted(cycles, reverse=True)
    assert cycles[2] == tile(slow, m, k, n, 2).compute_cycles
    narrow, wide = simd_core(lanes, 500), simd_core(lanes + 1, 500)
    assert tile_cycles(wide, m, k, n, 2) <= tile_cycles(narrow, m, k, n, 2)


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, DATAFLOWS, SIZES, SIZES, SIZES, st.integers(1, 4))
def test_useful_macs_fit_into_padded_macs_and_peak(
    rows: int, columns: int, dataflow: str, m: int, k: int, n: int, depth: int
) -> None:
    for core in (systolic_core(rows, columns, dataflow, depth=depth), simd_core(rows, 300)):
        timing = tile(core, m, k, n, 2)
        assert timing.useful_macs == m * k * n <= timing.padded_macs
        assert timing.padded_macs == padded_macs(core, m, k, n)
        assert 0 < timing.utilization <= 1


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_transposed_product_on_a_transposed_array_takes_the_same_time(
    rows: int, columns: int, m: int, k: int, n: int
) -> None:
    upright, turned = systolic_core(rows, columns), systolic_core(columns, rows)
    assert tile_cycles(upright, m, k, n, 2) == tile_cycles(turned, n, k, m, 2)
    weights, inputs = systolic_core(rows, columns, "ws"), systolic_core(rows, columns, "is")
    assert tile_cycles(weights, m, k, n, 2) == tile_cycles(inputs, n, k, m, 2)


def test_vector_cycles() -> None:
    assert vector_cycles(4, 0, 9, 10) == 30
    assert vector_cycles(4, 250, 9, 10) == 33  # 30 + 2.5, rounded up once for all instructions
    assert vector_cycles(4, 250, 0, 10) == 0
    assert tile_cycles(simd_core(4), 0, 3, 3, 2) == 0


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of os, ws, is"):
        systolic_core(4, 4, "xx")
    with pytest.raises(ConfigError, match="got 0, 4, 1"):
        systolic_core(0, 4)
    with pytest.raises(ConfigError, match="unbounded"):
        systolic_core(4, 4, read_bytes_per_cycle=-1)
    with pytest.raises(ConfigError, match="lanes >= 1"):
        simd_core(0)
    with pytest.raises(UsageError, match="m=0"):
        tile(simd_core(4), 0, 1, 1, 2)
    with pytest.raises(UsageError, match="2\\^50"):
        tile(simd_core(4), 2**20, 2**20, 2**20, 2)
