"""Attention as products, key block after key block: cycles, memory and work of the other form."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import block_attention as naive
from tests.wafer_emu.small import LLAMA, TINY, chunks, clocks, prefixes
from wafer_emu.busy import busy_map
from wafer_emu.clock import Clock, Tiers
from wafer_emu.memory import StageMemory
from wafer_emu.model import Model
from wafer_emu.placement import Region, Stage
from wafer_emu.program import attention_operation, layer_operations
from wafer_emu.wafer import Program, Wafer
from wafer_emu.work import _compute_shift_work, _sum_along_row, operation_work
from wafer_kernels.systolic import tile_cycles, vector_cycles

few = settings(max_examples=40, deadline=None)


def with_products(wafer: Wafer) -> Wafer:
    """The wafer with attention as products."""
    return msgspec.structs.replace(
        wafer,
        program=Program(attention="products", request_cycles=0),
        provenance=wafer.provenance | {"program": "assumed: for a test"},
    )


def as_products(clock: Clock) -> Clock:
    return Clock(
        with_products(clock.wafer),
        clock.model,
        clock.region,
        clock.tiers,
        clock.attention_bytes,
        clock.weights_dtype,
        clock.kv_dtype,
    )


block_clocks = clocks().map(as_products)


def llama_clock(rows: int, columns: int, **changes: object) -> Clock:
    model = Model.from_hf({**LLAMA, **changes})
    wafer = with_products(TINY)
    return Clock(wafer, model, Region(0, 0, rows, columns), Tiers(), 4000, model.dtype, model.dtype)


@few
@given(block_clocks, chunks, prefixes, st.booleans(), st.integers(0, 1))
def test_useful_macs_are_those_of_the_model(
    clock: Clock, chunk: int, prefix: int, causal_skip: bool, layer: int
) -> None:
    operations = layer_operations(clock.model, layer, chunk, prefix, causal_skip)
    counted = sum(operation_work(clock, each).macs for each in operations)
    assert counted == clock.model.layer_macs(layer, chunk, prefix, causal_skip=causal_skip)


@few
@given(block_clocks, chunks, prefixes, st.integers(0, 1))
def test_no_core_is_busy_for_longer_than_a_layer_lasts(
    clock: Clock, chunk: int, prefix: int, layer: int
) -> None:
    operations = layer_operations(clock.model, layer, chunk, prefix)
    busy = busy_map(clock, operations)
    assert busy.shape == (clock.region.rows, clock.region.columns)
    assert busy.max() <= clock.layer(layer, chunk, prefix)


@few
@given(st.integers(1, 6), st.integers(1, 9), chunks, prefixes, st.integers(1, 3))
def test_padded_work_is_that_of_loops_over_tiles(
    rows: int, columns: int, chunk: int, prefix: int, groups: int
) -> None:
    heads = 2 * groups
    clock = llama_clock(rows, columns, num_attention_heads=heads, num_key_value_heads=2)
    simd = clock.wafer.replace(
        {"core.compute": {"kind": "simd", "lanes": 1, "issue_millicycles": 0}}
    )
    clock = Clock(simd, clock.model, clock.region, clock.tiers, 4000, "bfloat16", "bfloat16")
    operation = attention_operation(clock.model, 0, chunk, prefix)
    work = operation_work(clock, operation)
    assert work.padded_macs == naive.multiplied(rows, columns, heads, chunk, prefix, 6, 6)
    blocks = clock.block_attention(operation)
    width, served = naive.head_columns(columns, heads)
    assert (blocks.width, blocks.turns) == (width, max(served))
    found = [keys for keys, times in blocks.blocks(prefix) for _ in range(times if keys else 0)]
    assert [chunk, *found] == naive.key_blocks(chunk, prefix)


@pytest.mark.parametrize(("rows", "columns", "heads"), [(3, 8, 4), (4, 4, 4), (5, 2, 4)])
def test_bytes_on_the_mesh_are_those_of_loops_over_scores(
    rows: int, columns: int, heads: int
) -> None:
    """P V and the sums of the softmax taken away, as the work of products and norms counts them."""
    clock = llama_clock(rows, columns, num_attention_heads=heads, num_key_value_heads=heads)
    chunk, prefix = 10, 25
    operation = attention_operation(clock.model, 0, chunk, prefix)
    blocks, hops = clock.block_attention(operation), operation_work(clock, operation).hop_bytes
    for keys in naive.key_blocks(chunk, prefix):
        values = _compute_shift_work(blocks.head, chunk, keys, 6).hop_bytes
        sums = _sum_along_row(blocks.head, 2 * chunk * 4, blocks.width).hop_bytes
        hops -= heads * (values + sums)
    assert hops == naive.score_byte_hops(rows, columns, heads, chunk, prefix, 6, 2)


def test_one_core_takes_the_sum_of_its_tiles() -> None:
    clock = llama_clock(1, 1, num_attention_heads=1, num_key_value_heads=1)
    core, grid = clock.wafer.core, clock.grid
    chunk, keys = 12, 7
    blocks = clock.block_attention(attention_operation(clock.model, 0, chunk, keys))

    def vector(elements: int, operations: int) -> int:
        return vector_cycles(core.vector_lanes, core.vector_issue_millicycles, elements, operations)

    expected = (
        tile_cycles(grid.core, chunk, 6, keys, 2)
        + tile_cycles(grid.core, chunk, keys, 6, 2)
        + 2 * core.step_cycles
        + vector(chunk * keys, 8)
        + vector(chunk * 6, 1)
    )
    assert blocks.block_cycles(keys) == expected


@few
@given(block_clocks, chunks, st.integers(0, 3))
def test_every_full_block_before_the_chunk_costs_the_same(
    clock: Clock, chunk: int, blocks: int
) -> None:
    operation = attention_operation(clock.model, 0, chunk, 0)
    if operation.window is not None or operation.expand is not None or clock.tiers.kv == "dram":
        return
    cycles = clock.attentions(operation, chunk * np.arange(blocks + 2))
    assert len(set(np.diff(cycles).tolist())) == 1


def test_memory_holds_the_scores_of_a_block() -> None:
    """Two heads on two columns each; three queries a row, twelve keys over two columns."""
    clock = llama_clock(4, 4, num_attention_heads=2, num_key_value_heads=2)
    blocks = clock.block_attention(attention_operation(clock.model, 0, 12, 99))
    scores, state, sums = 6 * 2, (3 + 2) * 4, 3 * 2
    assert blocks.row_bytes == scores + state + sums
    assert blocks.slice_bytes == 2 * 3 * (3 + 3) * 2
    memory = StageMemory(clock, Stage(0, 0, 2, clock.region), False, False, 12, 0)
    working = 3 * blocks.row_bytes + blocks.slice_bytes
    live = (6 + 3 + 3) * 3 * 2  # stream, query and attended
    assert memory.load(12).activations.max() == working + live
