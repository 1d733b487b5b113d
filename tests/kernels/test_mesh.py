"""Products on a grid of cores against moves played one by one, and against closed forms."""

from fractions import Fraction
from math import ceil

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import mesh as naive
from wafer_kernels import compute_shift
from wafer_kernels.errors import ConfigError, UsageError
from wafer_kernels.gemm import ALGORITHMS, gemm, utilization
from wafer_kernels.gemm_line import broadcast_stage_cycles
from wafer_kernels.mesh import (
    CANNON,
    MESHGEMM,
    GemmTiming,
    GridCost,
    GridDetail,
    closed_form,
    even_detail,
    longest_shift_hops,
    most_turns,
    ring_hops,
    ring_places,
)
from wafer_kernels.systolic import simd_core, systolic_core, tile_cycles, vector_cycles

WSE2_CORE = simd_core(4, 5710)
SIDES = st.integers(1, 7)
SIZES = st.integers(1, 40)


@st.composite
def grids(draw: st.DrawFn) -> GridCost:
    core = draw(st.sampled_from([WSE2_CORE, systolic_core(2, 3, lanes=2), simd_core(2)]))
    return GridCost(
        rows=draw(SIDES),
        columns=draw(SIDES),
        core=core,
        element_bytes=2,
        step_cycles=draw(st.sampled_from([0, 7, 60])),
        link_bytes_per_cycle=draw(st.sampled_from([0, 1, 4])),
        hop_cycles=draw(st.integers(0, 9)),
        ramp_cycles=draw(st.integers(0, 3)),
        shared_ramp=draw(st.integers(0, 1)),
        routes=draw(st.sampled_from([2, 24])),
    )


@st.composite
def details(draw: st.DrawFn, grid: GridCost) -> GridDetail:
    """A slow core, a slow link and a crossing on each axis, where there is room for them."""
    detail = even_detail(grid)
    slow = draw(st.integers(0, grid.rows - 1)), draw(st.integers(0, grid.columns - 1))
    detail.core_extra_cycles[slow] = draw(st.integers(0, 50))
    for rates, extras in (
        (detail.x_link_bytes_per_cycle, detail.x_link_extra_cycles),
        (detail.y_link_bytes_per_cycle, detail.y_link_extra_cycles),
    ):
        if rates.size:
            rates[draw(st.integers(0, rates.size - 1))] = draw(st.integers(1, 3))
            extras[draw(st.integers(0, rates.size - 1))] = draw(st.integers(0, 40))
    return detail


def naive_mesh(grid: GridCost, detail: GridDetail) -> naive.Mesh:
    return naive.Mesh(
        grid.rows,
        grid.columns,
        grid.element_bytes,
        grid.link_bytes_per_cycle,
        grid.hop_cycles,
        grid.ramp_cycles,
        bool(grid.shared_ramp),
        {(int(i), int(j)): int(v) for (i, j), v in np.ndenumerate(detail.core_extra_cycles)},
        dict(enumerate(detail.x_link_bytes_per_cycle.tolist())),
        dict(enumerate(detail.x_link_extra_cycles.tolist())),
        dict(enumerate(detail.y_link_bytes_per_cycle.tolist())),
        dict(enumerate(detail.y_link_extra_cycles.tolist())),
    )


def step_product(grid: GridCost) -> naive.Product:
    def product(m: int, k: int, n: int) -> int:
        return tile_cycles(grid.core, m, k, n, grid.element_bytes)

    return product


def require_equal(timing: GemmTiming, played: naive.Played) -> None:
    for place in played.finish:
        assert timing.start_cycles[place] == played.start[place], place
        assert timing.finish_cycles[place] == played.finish[place], place
        assert timing.busy_cycles[place] == played.busy[place], place
    assert timing.cycles == played.makespan
    assert timing.alignment_cycles == played.alignment
    assert timing.useful_macs == played.macs
    assert timing.padded_macs >= played.macs
    assert timing.byte_hops == played.byte_hops
    assert timing.stall_cycles.min() >= 0


@settings(max_examples=60, deadline=None)
@given(st.data(), SIZES, SIZES, SIZES, st.booleans(), st.booleans(), st.booleans())
def test_shift_products_equal_moves_played_one_by_one(
    data: st.DataObject, m: int, k: int, n: int, wraps: bool, aligned_a: bool, aligned_b: bool
) -> None:
    grid = data.draw(grids())
    detail = data.draw(details(grid))
    timing = gemm(
        grid,
        m,
        k,
        n,
        "cannon" if wraps else "meshgemm",
        aligned_a=aligned_a,
        aligned_b=aligned_b,
        detail=detail,
    )
    played = naive.shift_product(
        naive_mesh(grid, detail),
        m,
        k,
        n,
        step_product(grid),
        grid.step_cycles,
        wraps=wraps,
        move_a=not aligned_a,
        move_b=not aligned_b,
    )
    require_equal(timing, played)


@settings(max_examples=60, deadline=None)
@given(st.data(), SIZES, SIZES, SIZES, st.booleans())
def test_line_products_equal_moves_played_one_by_one(
    data: st.DataObject, m: int, k: int, n: int, aligned_b: bool
) -> None:
    grid = data.draw(grids())
    detail = data.draw(details(grid))
    stage = broadcast_stage_cycles(grid)
    mesh = naive_mesh(grid, detail)

    def add(m: int, n: int) -> int:
        lanes, issue = grid.core.lanes, grid.core.issue_millicycles
        return ceil(n * (ceil(m / lanes) + Fraction(issue, 1000))) if lanes and m else 0

    product, step = step_product(grid), grid.step_cycles
    require_equal(
        gemm(grid, m, k, n, "summa", detail=detail),
        naive.summa(mesh, m, k, n, product, step, stage),
    )
    require_equal(
        gemm(grid, m, k, n, "allgather", aligned_b=aligned_b, detail=detail),
        naive.allgather(mesh, m, k, n, product, step, stage, not aligned_b),
    )
    require_equal(
        gemm(grid, m, k, n, "gemm-t", detail=detail),
        naive.transposed(mesh, m, k, n, product, step, add),
    )


@settings(max_examples=60, deadline=None)
@given(SIDES, SIDES, SIZES, SIZES, SIZES)
def test_least_common_multiple_grid_is_the_padded_product_on_a_square(
    rows: int, columns: int, m: int, k: int, n: int
) -> None:
    """With free links a core takes, in each step, the time of the logical cores it stands for."""
    grid = GridCost(rows, columns, WSE2_CORE, 2, 10, 0, 0, 0, 0)
    side, m_padded, k_padded, n_padded = naive.padded_square(rows, columns, m, k, n)
    timing = gemm(grid, m, k, n, "waferllm-lcm")
    tiles = (side // rows) * (side // columns)
    tile = tile_cycles(WSE2_CORE, m_padded // side, k_padded // side, n_padded // side, 2)
    assert timing.steps == side
    assert timing.cycles == side * (tiles * tile + 10)
    assert timing.useful_macs == m * k * n
    assert timing.padded_macs >= m_padded * k_padded * n_padded
    if rows == columns:
        same = gemm(grid, m_padded, k_padded, n_padded, "meshgemm")
        assert timing.cycles == same.cycles
        assert timing.byte_hops == same.byte_hops


@settings(max_examples=60, deadline=None)
@given(grids(), st.integers(1, 300), st.integers(1, 300), st.integers(1, 300), st.data())
def test_closed_form_equals_the_kernel_cycle_for_cycle(
    grid: GridCost, m: int, k: int, n: int, data: st.DataObject
) -> None:
    aligned_a, aligned_b = data.draw(st.booleans()), data.draw(st.booleans())
    for name, kind in (("meshgemm", MESHGEMM), ("cannon", CANNON)):
        timing = gemm(grid, m, k, n, name, aligned_a=aligned_a, aligned_b=aligned_b)
        closed = closed_form(grid, m, k, n, kind, int(aligned_a), int(aligned_b))
        assert closed in {-1, timing.cycles}


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (5, 3), (1, 6), (16, 16), (12, 40)])
@pytest.mark.parametrize("size", [(1, 1, 1), (7, 257, 129), (300, 301, 302)])
def test_closed_form_holds_where_compute_is_slow(
    rows: int, columns: int, size: tuple[int, int, int]
) -> None:
    grid = GridCost(rows, columns, WSE2_CORE, 2, 342, 4, 1, 2, 0)
    assert closed_form(grid, *size) == gemm(grid, *size).cycles
    even = (rows * 5, max(rows, columns) * 7, columns * 3)
    assert closed_form(grid, *even) == gemm(grid, *even).cycles > 0


def test_closed_form_declines_where_links_are_the_limit() -> None:
    grid = GridCost(4, 4, simd_core(4), 2, 0, 1, 1, 2, 0)
    assert closed_form(grid, 16, 16, 16) == -1
    assert gemm(grid, 16, 16, 16).stall_cycles.max() > 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200))
def test_no_shift_of_the_folded_ring_is_longer_than_two_hops(length: int) -> None:
    places, hops = ring_places(MESHGEMM, length), ring_hops(MESHGEMM, length)
    assert places.tolist() == naive.folded(length)
    assert hops.max() == longest_shift_hops(MESHGEMM, length) <= 2
    wrapping = ring_hops(CANNON, length)
    assert wrapping.max() == longest_shift_hops(CANNON, length) == length - 1
    for slices in (length, length + 3):
        offsets = [i * slices // length for i in range(length)]
        assert most_turns(slices, length) == max(min(x, slices - x) for x in offsets)


@settings(max_examples=60, deadline=None)
@given(SIDES, SIDES, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.data())
def test_free_links_and_even_tiles_leave_no_stall(
    rows: int, columns: int, m: int, k: int, n: int, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["meshgemm", "cannon", "waferllm-lcm", "summa", "allgather"]))
    free = GridCost(rows, columns, WSE2_CORE, 2, 9, 0, 0, 0, 0, routes=1000)
    even = gemm(free, m * rows, k * rows * columns, n * columns, name, aligned_b=False)
    assert even.stall_cycles.max() == 0
    assert even.cycles == even.busy_cycles.max()


@settings(max_examples=60, deadline=None)
@given(grids(), SIZES, SIZES, SIZES, st.sampled_from(ALGORITHMS), st.integers(1, 8))
def test_faster_hardware_is_never_slower(
    grid: GridCost, m: int, k: int, n: int, name: str, rate: int
) -> None:
    slow = grid._replace(link_bytes_per_cycle=rate)
    base = gemm(slow, m, k, n, name).cycles
    assert gemm(slow._replace(link_bytes_per_cycle=rate + 1), m, k, n, name).cycles <= base
    assert gemm(slow._replace(link_bytes_per_cycle=0), m, k, n, name).cycles <= base
    assert gemm(slow._replace(hop_cycles=0), m, k, n, name).cycles <= base
    assert gemm(slow._replace(shared_ramp=0), m, k, n, name).cycles <= base


@settings(max_examples=60, deadline=None)
@given(st.data(), SIZES, SIZES, SIZES)
def test_transposed_mesh_takes_the_same_time(data: st.DataObject, m: int, k: int, n: int) -> None:
    """C^T = B^T A^T on the transposed grid: operands, vector axis and routing swapped."""
    grid = data.draw(grids())._replace(core=simd_core(3, 1250))
    detail = data.draw(details(grid))
    turned_grid = grid._replace(
        rows=grid.columns, columns=grid.rows, core=grid.core._replace(vector_axis=1)
    )
    turned_detail = GridDetail(
        detail.core_extra_cycles.T.copy(),
        detail.y_link_bytes_per_cycle,
        detail.y_link_extra_cycles,
        detail.x_link_bytes_per_cycle,
        detail.x_link_extra_cycles,
    )
    for name in ("meshgemm", "cannon", "summa"):
        upright = gemm(grid, m, k, n, name, aligned_b=False, detail=detail)
        turned = gemm(turned_grid, n, k, m, name, aligned_b=False, detail=turned_detail)
        assert (turned.finish_cycles == upright.finish_cycles.T).all()
        assert (turned.busy_cycles == upright.busy_cycles.T).all()
        assert upright.byte_hops == turned.byte_hops


def test_a_slow_core_delays_its_neighbours_first_and_the_far_ones_later() -> None:
    grid = GridCost(9, 9, WSE2_CORE, 2, 100, 4, 1, 2, 0)
    even = gemm(grid, 18, 18, 18)
    detail = even_detail(grid)
    detail.core_extra_cycles[4, 4] = 1000
    slow = gemm(grid, 18, 18, 18, detail=detail)
    late = slow.finish_cycles - even.finish_cycles
    assert late[4, 4] == late.max() == 9 * 1000
    assert (slow.busy_cycles - even.busy_cycles)[4, 4] == 9 * 1000
    assert late.min() < 9 * 1000  # its delay needs a step for each logical neighbour


def test_a_slow_crossing_that_compute_hides_delays_nobody_and_a_slower_one_its_own_shift() -> None:
    grid = GridCost(1, 8, WSE2_CORE, 2, 500, 4, 1, 2, 0)
    even = gemm(grid, 8, 64, 64, aligned_a=True)
    detail = even_detail(grid)
    detail.x_link_extra_cycles[3] = 400
    assert (gemm(grid, 8, 64, 64, aligned_a=True, detail=detail).finish_cycles == even.cycles).all()
    detail.x_link_extra_cycles[3] = 4000
    slow = gemm(grid, 8, 64, 64, aligned_a=True, detail=detail)
    assert slow.finish_cycles.min() > even.cycles
    short = gemm(grid._replace(columns=2), 8, 16, 16, aligned_a=True)
    assert short.cycles < slow.cycles


@pytest.mark.parametrize(
    ("rows", "columns"), [(130, 128), (40, 450), (200, 90), (9, 11), (3, 20), (1, 30), (2, 2)]
)
def test_threads_and_blocks_do_not_change_a_cycle(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = GridCost(rows, columns, WSE2_CORE, 2, 20, 4, 1, 2, 1)
    detail = even_detail(grid)
    detail.core_extra_cycles[rows // 3, columns // 2] = 333
    threads = numba.get_num_threads()
    planes = []
    for parallel_cores, used in ((10**9, threads), (0, 1), (0, threads)):
        monkeypatch.setattr(compute_shift, "PARALLEL_CORES", parallel_cores)
        numba.set_num_threads(used)
        planes.append(gemm(grid, 700, 301, 500, detail=detail).finish_cycles)
    assert (planes[0] == planes[1]).all()
    assert (planes[0] == planes[2]).all()
    assert len(np.unique(planes[0])) > 1


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    rows=st.integers(1, 24),
    columns=st.integers(1, 24),
    block_rows=st.integers(1, 9),
    k=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_blocks_that_go_ahead_do_not_change_a_cycle(
    data: st.DataObject, rows: int, columns: int, block_rows: int, k: int, seed: int
) -> None:
    """Any height of the blocks, so borders one row apart too, and any delays of B."""
    grid = data.draw(grids())._replace(rows=rows, columns=columns)
    detail = even_detail(grid)
    detail.core_extra_cycles[:] = np.random.default_rng(seed).integers(0, 99, (rows, columns))
    name = data.draw(st.sampled_from(["meshgemm", "cannon"]))
    in_turn = gemm(grid, 30, k, 41, name, detail=detail)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute_shift, "PARALLEL_CORES", 0)
        patch.setattr(compute_shift, "BLOCK_ROWS", block_rows)
        in_blocks = gemm(grid, 30, k, 41, name, detail=detail)
    assert (in_blocks.finish_cycles == in_turn.finish_cycles).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_smallest_and_odd_products(name: str) -> None:
    one = GridCost(1, 1, WSE2_CORE, 2, 342, 4, 1, 2, 1)
    assert gemm(one, 1, 1, 1, name).cycles == tile_cycles(WSE2_CORE, 1, 1, 1, 2) + 342
    array = systolic_core(128, 128)
    for rows, columns in ((1, 1), (3, 5)):
        odd = gemm(GridCost(rows, columns, array, 2, 0, 64, 1, 2, 0), 7, 257, 129, name)
        assert odd.useful_macs == 7 * 257 * 129
        assert odd.padded_macs >= odd.useful_macs
        assert odd.stall_cycles.min() >= 0


def test_gemm_t_chains_follow_each_other_like_a_pipeline() -> None:
    """One pace per step; the chains' way along the row counts once for each turn of the root.

    A dependency can run to the root, follow it to the end of the row, and run back once it has
    gone round: three times the length of the row, whatever the number of steps.
    """
    grid = GridCost(6, 6, WSE2_CORE, 2, 300, 4, 1, 2, 0)
    timing = gemm(grid, 24, 24, 24, "gemm-t")
    pace = tile_cycles(WSE2_CORE, 4, 4, 4, 2) + 300
    add = vector_cycles(4, 5710, 4, 4)
    hop = 4 * 4 * 2 // 4 + 1 + 2 * 2 + add
    assert 6 * pace + 5 * hop <= timing.cycles <= 6 * (pace + 2 * add) + 3 * 5 * hop
    alone = gemm(grid._replace(columns=1), 24, 4, 24, "gemm-t")
    assert alone.cycles == 6 * pace


def test_720x720_meshgemm_against_cannon_and_summa() -> None:
    """WSE-2-like constants. Published: 2-3x for small products, about 17 % for large ones."""
    grid = GridCost(720, 720, WSE2_CORE, 2, 342, 4, 1, 2, 1)
    ratio = {}
    for size in (2048, 4096, 8192):
        ours = closed_form(grid, size, size, size)
        ratio[size] = gemm(grid, size, size, size, "cannon").cycles / ours
    assert ratio[2048] == pytest.approx(2.70, abs=0.01)
    assert ratio[4096] == pytest.approx(1.82, abs=0.01)
    assert ratio[8192] == pytest.approx(1.23, abs=0.01)
    assert gemm(grid, 2048, 2048, 2048, "summa").cycles > closed_form(grid, 2048, 2048, 2048)


def test_wrong_input_is_refused() -> None:
    grid = GridCost(3, 4, WSE2_CORE, 2, 0, 4, 1, 2, 0)
    with pytest.raises(UsageError, match="choose one of meshgemm, cannon"):
        gemm(grid, 4, 4, 4, "strassen")
    with pytest.raises(UsageError, match="got 0 x 4 x 4"):
        gemm(grid, 0, 4, 4)
    with pytest.raises(ConfigError, match="at least 1"):
        gemm(grid._replace(rows=0), 4, 4, 4)
    with pytest.raises(ConfigError, match="hop_cycles"):
        gemm(grid._replace(hop_cycles=-1), 4, 4, 4)
    with pytest.raises(ConfigError, match="core_extra_cycles"):
        gemm(grid, 4, 4, 4, detail=even_detail(grid._replace(rows=2)))


def test_utilization_is_useful_macs_over_peak() -> None:
    grid = GridCost(2, 2, simd_core(4), 2, 0, 0, 0, 0, 0)
    timing = gemm(grid, 8, 8, 8)
    assert timing.cycles == 2 * 4 * 4
    assert utilization(grid, timing, 4) == 512 / (4 * 4 * 32) == 1.0
