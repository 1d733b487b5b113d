"""How a region shares out an attention: nothing lost, whatever the memory, the leanest known."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wafer_emu.small import LLAMA, SIMD, TINY, WAFERS, clock_of, models
from wafer_emu.model import Model
from wafer_emu.placement import Region
from wafer_emu.program import attention_operation
from wafer_emu.tiling import AttentionTiling, attention_cost, attention_tilings, core_cost
from wafer_emu.wafer import Systolic, Wafer
from wafer_kernels import systolic

few = settings(max_examples=60, deadline=None)
lines = st.integers(1, 40)


def tilings(wafer: Wafer, model: Model, region: Region) -> tuple[AttentionTiling, ...]:
    operation = attention_operation(model, 0, 8, 0)
    cost = attention_cost(wafer, region, operation, 2, 1)
    return attention_tilings(cost, region.columns, operation.heads)


@few
@given(st.sampled_from(WAFERS), models(), lines, lines)
def test_units_cover_all_heads_and_splits(
    wafer: Wafer, model: Model, rows: int, columns: int
) -> None:
    for tiling in tilings(wafer, model, Region(0, 0, rows, columns)):
        assert tiling.splits >= 1
        pairs = model.heads * tiling.splits
        assert pairs <= tiling.units * columns < pairs + model.heads
        assert tiling.key_tile % tiling.key_granule == 0
        assert tiling.block_row_tokens % tiling.query_tile == 0


@few
@given(st.sampled_from(WAFERS), models(), lines, lines)
def test_bytes_are_those_of_keys_queries_and_their_state(
    wafer: Wafer, model: Model, rows: int, columns: int
) -> None:
    operation = attention_operation(model, 0, 8, 0)
    for tiling in tilings(wafer, model, Region(0, 0, rows, columns)):
        key = 2 * tiling.units * (operation.key_width + operation.value_width) * 2
        query = tiling.units * (operation.key_width * 2 + (operation.value_width + 2) * 4)
        assert tiling.key_buffer_bytes == key * tiling.key_tile
        assert tiling.query_bytes == query + tiling.key_tile * 4
        used = tiling.key_buffer_bytes + tiling.block_row_tokens * tiling.query_bytes
        assert tiling.bytes == used


@few
@given(st.sampled_from(WAFERS), models(), lines, lines)
def test_tilings_start_with_the_leanest_that_there_is(
    wafer: Wafer, model: Model, rows: int, columns: int
) -> None:
    known = tilings(wafer, model, Region(0, 0, rows, columns))
    sizes = [tiling.bytes for tiling in known]
    assert sizes == sorted(sizes)
    leanest = known[0]
    assert leanest.units == -(-model.heads // columns)
    assert leanest.key_tile == leanest.key_granule
    assert leanest.block_row_tokens == leanest.query_tile


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


def test_tilings_do_not_know_how_much_memory_there_is() -> None:
    model, region = Model.from_hf(LLAMA), Region(0, 0, 4, 4)
    known = tilings(TINY, model, region)
    assert known == tilings(TINY.replace({"core.sram_bytes": 9_999}), model, region)
    assert known[0].key_tile == 8
    assert max(tiling.key_tile for tiling in known) == 64


def test_spare_units_are_taken_where_columns_would_idle() -> None:
    """3 heads on 4 columns: a unit a column leaves one idle, 3 units a column none."""
    model = Model.from_hf({**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3})
    wafer = TINY.replace({"core.step_cycles": 0})
    clock = clock_of(wafer, model, 4, 4)
    tiling = clock.tiling(attention_operation(model, 0, 512, 4096))
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
    leanest = tilings(wafer, model, Region(0, 0, 4, 4))[0]
    assert (leanest.query_tile, leanest.key_granule, leanest.block_row_tokens) == (1, 1, 1)
    assert leanest.key_tile == 1
