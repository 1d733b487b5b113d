"""The clock: sums and parts of operations, against loops over cores and equations by hand."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.naive import work as naive
from tests.wafer_emu.small import (
    DEEPSEEK,
    DIES,
    LLAMA,
    MIXTRAL,
    TINY,
    chunks,
    clock_of,
    clocks,
    models,
    prefixes,
)
from wafer_emu.clock import GATE_OPERATIONS, NORM_OPERATIONS, Clock, Tiers, vector_shape
from wafer_emu.model import Model
from wafer_emu.placement import Region
from wafer_emu.program import (
    Add,
    Append,
    Attention,
    Embed,
    Experts,
    Gate,
    Lookup,
    Norm,
    Operation,
    Tensor,
    attention_operation,
    layer_operations,
)
from wafer_emu.wafer import Wafer
from wafer_kernels.attention import diagonal_cycles, prefix_cycles
from wafer_kernels.gemm import gemm
from wafer_kernels.systolic import tile_cycles, vector_cycles

few = settings(max_examples=40, deadline=None)
sizes = st.integers(1, 40)


@few
@given(clocks(), chunks, prefixes, st.booleans(), st.integers(0, 1))
def test_a_layer_is_the_sum_of_its_operations(
    clock: Clock, chunk: int, prefix: int, causal_skip: bool, layer: int
) -> None:
    operations = layer_operations(clock.model, layer, chunk, prefix, causal_skip)
    expected = sum(clock.operation(each) for each in operations)
    assert clock.layer(layer, chunk, prefix, causal_skip) == expected
    assert clock.layer(layer, chunk, prefix, causal_skip) == expected  # as remembered


@few
@given(clocks(), chunks, st.lists(prefixes, min_size=1, max_size=4), st.booleans())
def test_many_prefixes_at_once_cost_what_they_cost_one_by_one(
    clock: Clock, chunk: int, several: list[int], causal_skip: bool
) -> None:
    found = clock.layers(1, chunk, np.array(several), causal_skip)
    assert found.tolist() == [clock.layer(1, chunk, prefix, causal_skip) for prefix in several]


@few
@given(clocks(), chunks, prefixes, st.integers(0, 1))
def test_charging_the_masked_half_is_never_faster(
    clock: Clock, chunk: int, prefix: int, layer: int
) -> None:
    skipped = clock.layer(layer, chunk, prefix)
    assert clock.layer(layer, chunk, prefix, causal_skip=False) >= skipped


@few
@given(clocks(), chunks, prefixes, st.integers(1, 30))
def test_more_earlier_tokens_are_never_faster(
    clock: Clock, chunk: int, prefix: int, more: int
) -> None:
    """A window moves the borders of the tiles that it cuts off: there a key more may save steps.

    So may, by a fraction of a per cent, a ragged last tile, which travels faster than a whole one.
    """
    assume(clock.model.windows[0] is None)
    fewer, some = clock.layer(0, chunk, prefix), clock.layer(0, chunk, prefix + more)
    assert some >= fewer or fewer - some < fewer / 200


@few
@given(clocks(), sizes, sizes, st.integers(1, 9))
def test_elements_take_as_long_as_on_the_fullest_core(
    clock: Clock, rows: int, columns: int, operations: int
) -> None:
    core, region = clock.wafer.core, clock.region
    per_core = [
        vector_cycles(core.vector_lanes, core.vector_issue_millicycles, height * width, operations)
        for height in naive.deal(rows, region.rows)
        for width in naive.deal(columns, region.columns)
    ]
    assert clock.vector(rows, columns, operations) == max(per_core)


@few
@given(clocks(), sizes, sizes, sizes)
def test_a_product_takes_the_faster_form_or_the_stream(
    clock: Clock, m: int, k: int, n: int
) -> None:
    shifted = gemm(clock.grid, m, k, n).cycles
    rows, columns = clock.region.rows, clock.region.columns
    core = clock.grid.core._replace(vector_axis=1)
    slowest = max(
        tile_cycles(core, 1, height, width, clock.grid.element_bytes)
        for height in naive.deal(k, rows)
        for width in naive.deal(n, columns)
    )
    summed = clock.reduce(rows, max(naive.deal(n, columns)) * 4)
    stays = m * (slowest + clock.grid.step_cycles + summed)
    streamed = 0
    if clock.tiers.weights == "dram":
        assert clock.wafer.dram is not None
        down, across = clock.region.dies(clock.wafer)
        per_cycle = down * across * clock.wafer.dram.bytes_per_second / clock.wafer.core.clock_hz
        streamed = ceil(k * n * clock.grid.element_bytes / per_cycle)
    assert clock.product(m, k, n) == max(min(shifted, stays), streamed)
    assert clock.weights_stay(m, k, n) == (stays < shifted)


def test_one_row_keeps_the_weights_and_many_move_them() -> None:
    clock = clock_of(TINY, Model.from_hf(LLAMA), 8, 8)
    assert clock.weights_stay(1, 256, 256)
    assert not clock.weights_stay(256, 256, 256)


def test_the_slowest_link_of_a_region_is_its_die_crossing() -> None:
    wafer, model = Wafer.preset("wsc-54"), Model.from_hf(LLAMA)
    inside, across = clock_of(wafer, model, 16, 16), clock_of(wafer, model, 16, 17)
    assert inside.slowest_link == (256, 1, 1)
    # an edge of 2 TB/s is shared by 16 rows at 2 GHz, and takes 25 ns
    assert across.slowest_link == (125, 2, 51)
    assert clock_of(TINY, model, 9, 9).slowest_link == (32, 1, 1)


def test_die_memories_stream_together() -> None:
    model, tiers = Model.from_hf(LLAMA), Tiers("dram", "dram")
    assert clock_of(DIES, model, 3, 3, tiers).dram_cycles(1000) == 1
    assert clock_of(DIES, model, 3, 3, tiers).dram_cycles(1001) == 2  # 2 TB/s at 2 GHz
    assert clock_of(DIES, model, 6, 4, tiers).dram_cycles(4001) == 2


def test_appending_is_spread_over_all_cores_or_goes_to_the_dies() -> None:
    model = Model.from_hf(LLAMA)  # 2 bytes an element
    append = Append((Tensor("key", 7, 12), Tensor("value", 7, 12)), 0, 0)
    clock = clock_of(TINY, model, 3, 2)
    assert clock.operation(append) == ceil(ceil(7 * 24 * 2 / 6) / 32)
    narrow = clock_of(DIES, model, 3, 2, Tiers("sram", "dram"))
    assert narrow.operation(append) == 1
    byte_wide = Clock(TINY, model, Region(0, 0, 1, 1), Tiers(), 0, "bfloat16", "float32")
    assert byte_wide.operation(append) == 7 * 24 * 4 // 32


def test_norms_sum_over_the_columns_of_a_group() -> None:
    clock = clock_of(TINY, Model.from_hf(LLAMA), 2, 6)
    whole = Norm(Tensor("a", 5, 24), Tensor("b", 5, 24), "w", 24)
    heads = Norm(Tensor("a", 5, 24), Tensor("a", 5, 24), "w", 8, 3)
    each = Norm(Tensor("a", 5, 24), Tensor("a", 5, 24), "w", 2, 12)
    scaling = clock.vector(5, 24, NORM_OPERATIONS)
    assert clock.operation(whole) == scaling + clock.reduce(6, 3 * 4)
    assert clock.operation(heads) == scaling + clock.reduce(2, 3 * 4)
    assert clock.operation(each) == scaling
    assert clock.reduce(1, 100) == 0


def test_element_wise_operations_know_their_shape() -> None:
    a, b = Tensor("a", 5, 24), Tensor("b", 5, 24)
    assert vector_shape(Gate(a, b, a, "silu")) == (5, 24, GATE_OPERATIONS)
    assert vector_shape(Add(a, b)) == (5, 24, 1)
    assert vector_shape(Norm(a, a, "w", 6, 3)) == (5, 18, NORM_OPERATIONS)
    with pytest.raises(TypeError, match="not element-wise"):
        vector_shape(Embed(a))


@few
@given(clocks(), st.integers(1, 60))
def test_uniform_routing_shares_out_all_choices(clock: Clock, tokens: int) -> None:
    source = Tensor("hidden", tokens, 5)
    operation = Experts(source, Tensor("gate", 2 * tokens, 7), "w", 0, 8, 2)
    rows = [r for r, times in clock.expert_rows(operation) for _ in range(times)]
    assert sorted(rows, reverse=True) == [each for each in naive.deal(2 * tokens, 8) if each]


def test_experts_take_turns_and_rows_cross_the_region() -> None:
    model = Model.from_hf(MIXTRAL)
    clock = clock_of(TINY, model, 4, 2)
    loads = (0, 11, 5, 0)
    up = Experts(Tensor("hidden", 8, 24), Tensor("gate", 16, 20), "w", 0, 4, 2, loads=loads)
    across = ceil(16 * 24 * 2 / (2 * 2 * 32)) + 4
    assert clock.operation(up) == clock.product(11, 24, 20) + clock.product(5, 24, 20) + across
    down = Experts(
        Tensor("gate", 16, 20), Tensor("block", 8, 24), "w", 0, 4, 2, combine=True, loads=loads
    )
    products = clock.product(11, 20, 24) + clock.product(5, 20, 24)
    assert clock.operation(down) == products + across
    one_row = clock_of(TINY, model, 1, 2)
    even = replace(up, loads=None)
    assert one_row.operation(even) == 4 * one_row.product(4, 24, 20)  # nothing to cross


@few
@given(clocks(), chunks, prefixes)
def test_attention_is_the_blocks_and_the_ends_of_its_fastest_tiling(
    clock: Clock, chunk: int, prefix: int
) -> None:
    clock.tiers = Tiers()
    operation = attention_operation(clock.model, 0, chunk, prefix)
    ring, found = clock.ring_attention(operation), {}
    for tiling in ring.tilings(chunk):
        cost = ring.cost(tiling)
        found[tiling] = ring.ends(tiling, chunk)
        for size, before in tiling.query_blocks(clock.region.rows, chunk):
            found[tiling] += prefix_cycles(cost, size, prefix + before) + diagonal_cycles(
                cost, size
            )
    expected = min(found.values())
    assert found[clock.tiling(operation)] == expected
    if operation.expand is not None:
        expected += clock.product(*clock.expansion_shape(operation))
    assert clock.operation(operation) == expected


@few
@given(clocks(), chunks, prefixes, st.integers(0, 60_000), st.integers(1, 60_000))
def test_attention_with_more_memory_is_never_slower(
    clock: Clock, chunk: int, prefix: int, less: int, more: int
) -> None:
    operation = attention_operation(clock.model, 0, chunk, prefix)
    small, large = (
        replace(clock, attention_bytes=size).operation(operation) for size in (less, less + more)
    )
    assert large <= small


@few
@given(models(), chunks, prefixes, st.booleans())
def test_blocks_meet_all_keys_that_the_mask_lets_any_query_see(
    model: Model, chunk: int, prefix: int, causal_skip: bool
) -> None:
    clock = Clock(TINY, model, Region(0, 0, 1, 2), Tiers(), 0, "bfloat16", "bfloat16")
    operation = attention_operation(model, 0, chunk, prefix, causal_skip)
    seen_before = prefix if operation.window is None else min(prefix, operation.window - 1)
    for size, before in clock.tiling(operation).query_blocks(1, chunk):
        found = int(clock.earlier_keys(operation, np.array(prefix), size, before))
        queries = range(before, before + size)
        if causal_skip:
            keys = {
                key
                for query in queries
                for key in range(-prefix, query + 1)
                if operation.window is None or query - key < operation.window
            }
        else:
            keys = set(range(-seen_before, chunk))
        assert found == len(keys - set(queries))


def test_kv_in_die_memory_hides_behind_the_steps_or_shows() -> None:
    model = Model.from_hf(LLAMA)
    operation = attention_operation(model, 0, 8, 50)
    resident = clock_of(DIES, model, 3, 3).operation(operation)
    assert clock_of(DIES, model, 3, 3, Tiers("sram", "dram")).operation(operation) == resident
    slow = DIES.replace({"dram.bytes_per_second": 2_000_000_000})  # 1 byte a cycle
    clock = clock_of(slow, model, 3, 3, Tiers("sram", "dram"))
    ends = clock.ring_attention(operation).ends(clock.tiling(operation), 8)
    assert clock.operation(operation) == ends + 58 * 24 * 2


def test_latents_so_far_are_expanded_for_every_chunk() -> None:
    model = Model.from_hf(DEEPSEEK)
    clock = clock_of(TINY, model, 2, 2)
    operation = attention_operation(model, 0, 8, 50)
    assert clock.expansion_shape(operation) == (58, 8, 4 * (6 + 5))
    assert clock.operation(operation) > clock.product(58, 8, 44)


def test_the_epilogue_is_a_norm_and_a_product_of_the_last_row() -> None:
    clock = clock_of(TINY, Model.from_hf(LLAMA), 2, 2)
    stream, hidden = Tensor("stream", 6, 24), Tensor("hidden", 6, 24)
    norm = clock.operation(Norm(stream, hidden, "model.norm.weight", 24))
    assert clock.epilogue(6) == norm + clock.product(1, 24, 50)


def test_embedding_rows_come_from_the_host_or_over_the_columns() -> None:
    clock = clock_of(TINY, Model.from_hf(LLAMA), 3, 2)
    stream = Tensor("stream", 7, 24)
    assert clock.operation(Embed(stream)) == 0
    assert clock.operation(Lookup(stream, "w")) == ceil(7 * 24 * 2 / (2 * 32)) + 3


def test_layers_alike_share_their_cost() -> None:
    clock = clock_of(TINY, Model.from_hf({**LLAMA, "num_hidden_layers": 5}), 2, 2)
    assert len({clock.layer_kind(layer) for layer in range(5)}) == 1
    clock.layer(0, 8, 4)
    remembered = len(clock._memo)
    assert clock.layer(4, 8, 4) == clock.layer(0, 8, 4)
    assert len(clock._memo) == remembered
    mixed = clock_of(TINY, Model.from_hf(DEEPSEEK), 2, 2)
    assert mixed.layer_kind(0) != mixed.layer_kind(1)


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(TypeError, match="no cost"):
        clock_of(TINY, Model.from_hf(LLAMA), 2, 2).operation(Operation())


def test_one_core_adds_up_its_steps() -> None:
    """8 tokens of 8 features on one 8 x 8 array: 8 + 14 cycles a product, 10 a step."""
    model = Model.from_hf({
        **LLAMA,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
    })  # fmt: skip
    clock = clock_of(TINY, model, 1, 1)
    assert clock.product(8, 8, 8) == 8 + 14 + 10
    operation = attention_operation(model, 0, 8, 0)
    assert isinstance(operation, Attention)
    tiling = clock.tiling(operation)
    softmax = 8 * (8 * 8 // 16) + 8  # eight instructions on 64 scores, issue of a cycle each
    rescale = 8 * 8 // 16 + 1
    step = tiling.units * (2 * 22 + softmax + rescale) + 10
    ends = clock.ring_attention(operation).ends(clock.tiling(operation), 8)
    assert clock.operation(operation) == step + ends
