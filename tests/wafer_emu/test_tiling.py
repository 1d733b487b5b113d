"""How a region shares out an attention: nothing lost, within the budget, the cheapest taken."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wafer_emu.small import LLAMA, SIMD, TINY, WAFERS, models
from wafer_emu.model import Model
from wafer_emu.placement import Region
from wafer_emu.program import Attention, attention_operation
from wafer_emu.tiling import AttentionTiling, core_cost, plan_attention
from wafer_emu.wafer import Systolic, Wafer
from wafer_kernels import systolic

few = settings(max_examples=60, deadline=None)
lines = st.integers(1, 40)
budgets = st.integers(0, 60_000)


def plan(wafer: Wafer, model: Model, region: Region, budget: int) -> AttentionTiling:
    return plan_attention(wafer, region, attention_operation(model, 0, 8, 0), 2, budget)


@few
@given(st.sampled_from(WAFERS), models(), lines, lines, budgets)
def test_units_cover_all_heads_and_splits(
    wafer: Wafer, model: Model, rows: int, columns: int, budget: int
) -> None:
    tiling = plan(wafer, model, Region(0, 0, rows, columns), budget)
    assert tiling.splits >= 1
    pairs = model.heads * tiling.splits
    assert pairs <= tiling.units * columns < pairs + model.heads
    assert tiling.key_tile % tiling.key_granule == 0
    assert tiling.block_row_tokens % tiling.query_tile == 0


@few
@given(st.sampled_from(WAFERS), models(), lines, lines, budgets)
def test_the_working_set_stays_within_the_budget_or_is_the_least(
    wafer: Wafer, model: Model, rows: int, columns: int, budget: int
) -> None:
    tiling = plan(wafer, model, Region(0, 0, rows, columns), budget)
    operation = attention_operation(model, 0, 8, 0)
    key = 2 * tiling.units * (operation.key_width + operation.value_width) * 2
    query = tiling.units * (operation.key_width * 2 + (operation.value_width + 2) * 4)
    assert tiling.key_buffer_bytes == key * tiling.key_tile
    assert tiling.query_bytes == query + tiling.key_tile * 4
    if tiling.key_tile > tiling.key_granule:
        assert tiling.key_buffer_bytes <= budget / 4
    if tiling.block_row_tokens > tiling.query_tile:
        used = tiling.key_buffer_bytes + tiling.block_row_tokens * tiling.query_bytes
        assert used <= budget < used + tiling.query_tile * tiling.query_bytes


@few
@given(st.integers(1, 30), st.integers(1, 50), st.integers(1, 5000))
def test_query_blocks_are_even_and_whole(rows: int, row_tokens: int, chunk: int) -> None:
    tiling = AttentionTiling(1, 1, 1, 1, 1, row_tokens, 0, 0)
    blocks = list(tiling.query_blocks(rows, chunk))
    sizes = [size for size, _ in blocks]
    assert sum(sizes) == chunk
    assert [before for _, before in blocks] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= rows * row_tokens
    assert (len(sizes) - 1) * rows * row_tokens < chunk


def test_more_memory_gives_longer_tiles_up_to_a_limit() -> None:
    model, region = Model.from_hf(LLAMA), Region(0, 0, 4, 4)
    tiles = [plan(TINY, model, region, budget).key_tile for budget in (0, 3000, 10**4, 10**6)]
    assert tiles == sorted(tiles)
    assert tiles[0] == 8
    assert tiles[-1] == 64


def test_spare_units_are_taken_where_columns_would_idle() -> None:
    """3 heads on 4 columns: a unit a column leaves one idle, 3 units a column none."""
    model = Model.from_hf({**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3})
    wafer = TINY.replace({"core.step_cycles": 0})
    tiling = plan(wafer, model, Region(0, 0, 4, 4), 10**6)
    assert (tiling.units, tiling.splits) == (3, 4)


def test_core_costs_are_those_of_the_wafer() -> None:
    array = Systolic(rows=3, columns=5, depth=2, dataflow="is", drain="explicit")
    wafer = TINY.replace({"core.compute": array})
    rates = {"read_bytes_per_cycle": 64, "write_bytes_per_cycle": 32}
    expected = systolic.systolic_core(3, 5, "is", depth=2, explicit_drain=True, **rates)
    assert core_cost(wafer) == expected
    expected = systolic.simd_core(3, 1700, **rates)
    assert core_cost(TINY.replace({"core.compute": SIMD})) == expected


def test_simd_cores_need_no_granules() -> None:
    wafer, model = TINY.replace({"core.compute": SIMD}), Model.from_hf(LLAMA)
    tiling = plan(wafer, model, Region(0, 0, 4, 4), 0)
    assert (tiling.query_tile, tiling.key_granule, tiling.block_row_tokens) == (1, 1, 1)
    operation = attention_operation(model, 0, 8, 0)
    assert isinstance(operation, Attention)
    assert tiling.key_tile == 1
