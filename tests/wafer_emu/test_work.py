"""Work and busy cycles: against closed forms, loops over cores, and the dataflow kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import work as naive
from tests.wafer_emu.small import (
    DEEPSEEK,
    DIES,
    LLAMA,
    MIXTRAL,
    SIMD,
    TINY,
    chunks,
    clock_of,
    clocks,
    prefixes,
    routings,
)
from wafer_emu.clock import Clock, Tiers
from wafer_emu.model import Model
from wafer_emu.placement import Region
from wafer_emu.program import (
    Append,
    Attention,
    Embed,
    Experts,
    Lookup,
    Norm,
    Operation,
    Product,
    Task,
    Tensor,
    attention_operation,
    layer_operations,
    lower,
)
from wafer_emu.wafer import Wafer
from wafer_emu.work import Counter, Work, busy_map, operation_work
from wafer_kernels.gemm import gemm
from wafer_kernels.systolic import padded_macs, sram_elements, tile_cycles

few = settings(max_examples=60, deadline=None)
lines = st.integers(1, 7)
sizes = st.integers(1, 40)


def product_operation(m: int, k: int, n: int) -> Product:
    return Product(Tensor("a", m, k), Tensor("c", m, n), "w")


def total(clock: Clock, operations: tuple[Operation, ...]) -> Work:
    work = Work()
    for operation in operations:
        work = work.plus(operation_work(clock, operation))
    return work


def test_work_adds_and_multiplies() -> None:
    one, two = Work(1, 2, 3, 4, 5, 6), Work(10, 20, 30, 40, 50, 60)
    assert one.plus(two) == (11, 22, 33, 44, 55, 66)
    assert one.times(10) == two
    assert one.times(0) == Work()


@few
@given(clocks(), chunks, prefixes, st.booleans(), st.integers(0, 1))
def test_macs_over_tiles_are_the_closed_form(
    clock: Clock, chunk: int, prefix: int, causal_skip: bool, layer: int
) -> None:
    operations = layer_operations(clock.model, layer, chunk, prefix, causal_skip)
    work = total(clock, operations)
    assert work.macs == clock.model.layer_macs(layer, chunk, prefix, causal_skip=causal_skip)
    assert work.padded_macs >= work.macs


@pytest.mark.parametrize("name", Model.presets())
def test_macs_of_real_layers_are_the_closed_form(name: str) -> None:
    model = Model.preset(name)
    clock = clock_of(Wafer.preset("wsc-54"), model, 32, 48)
    for layer in {0, model.layers - 1}:
        work = Counter(clock).layer_work(layer, 1021, 3000)
        assert work.macs == model.layer_macs(layer, 1021, 3000)


def test_experts_are_counted_with_the_tokens_that_they_got() -> None:
    model = Model.from_hf(MIXTRAL)
    clock = clock_of(TINY, model, 3, 2)
    even = layer_operations(model, 0, 11, 0)
    operations = [
        replace(each, loads=(0, 7, 7, 8)) if isinstance(each, Experts) else each for each in even
    ]
    assert total(clock, operations).macs == total(clock, even).macs
    # padding tells the two apart: 7 rows thrice against 6, 6, 5 and 5
    experts = next(each for each in operations if isinstance(each, Experts))
    counts = [7, 7, 8]
    expected = sum(
        padded_macs(clock.grid.core, m, k, n)
        for rows in counts
        for _, _, m, k, n in naive.compute_shift_tiles(
            3, 2, rows, experts.source.columns, experts.target.columns
        )
        if min(m, k, n) > 0
    )
    assert not clock.weights_stay(7, experts.source.columns, experts.target.columns)
    assert operation_work(clock, experts).padded_macs == expected


def test_the_head_computes_one_row() -> None:
    model = Model.from_hf(LLAMA)
    clock = clock_of(TINY, model, 3, 2)
    last = lower(model, Task(1, 1, 30, 0, last_chunk=True))
    assert total(clock, last.epilogue).macs == model.head_macs()
    every = lower(model, Task(1, 1, 30, 0, last_chunk=True, all_logits=True))
    assert total(clock, every.epilogue).macs == 30 * model.head_macs()


@few
@given(clocks(), sizes, sizes, sizes)
def test_product_is_a_loop_over_cores_and_steps(clock: Clock, m: int, k: int, n: int) -> None:
    rows, columns = clock.region.rows, clock.region.columns
    core, element = clock.grid.core, clock.grid.element_bytes
    tiles, steps = naive.compute_shift_tiles(rows, columns, m, k, n), max(rows, columns)
    if clock.weights_stay(m, k, n):
        core = core._replace(vector_axis=1)
        tiles, steps = naive.row_vector_tiles(rows, columns, m, k, n), m
    busy = np.full((rows, columns), steps * clock.grid.step_cycles)
    macs = padded = accessed = 0
    for row, column, *shape in tiles:
        busy[row, column] += tile_cycles(core, *shape, element)
        if min(shape) > 0:
            macs += int(np.prod(shape))
            padded += padded_macs(core, *shape)
            accessed += sum(sram_elements(core, *shape)) * element
    work = operation_work(clock, product_operation(m, k, n))
    assert (work.macs, work.padded_macs, work.sram_bytes) == (macs, padded, accessed)
    assert np.array_equal(busy_map(clock, [product_operation(m, k, n)]), busy)
    weights = k * n * element if clock.tiers.weights == "dram" else 0
    assert work.dram_bytes == weights


@few
@given(lines, lines, sizes, sizes, sizes)
def test_compute_shift_counts_what_the_dataflow_kernel_counts(
    rows: int, columns: int, m: int, slice_size: int, n: int
) -> None:
    clock = clock_of(TINY, Model.from_hf(LLAMA), rows, columns)
    k = slice_size * max(rows, columns)  # even slices: the mean over the ring is then exact
    if clock.weights_stay(m, k, n):
        return
    timing = gemm(clock.grid, m, k, n)
    work = operation_work(clock, product_operation(m, k, n))
    assert work.padded_macs == timing.padded_macs
    assert work.hop_bytes == timing.byte_hops
    plane = busy_map(clock, [product_operation(m, k, n)])
    assert np.array_equal(plane, timing.busy_cycles)


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (9, 9), (3, 9), (6, 3)])
def test_die_crossings_are_those_of_a_walk_around_the_folded_ring(rows: int, columns: int) -> None:
    """Dies of 3 x 3 cores; a slice per column, so that every element makes whole turns."""
    clock = clock_of(DIES, Model.from_hf(LLAMA), rows, columns)
    m, n, slices = 37, 41, max(rows, columns)
    k = 3 * slices
    assert not clock.weights_stay(m, k, n)
    around_row = naive.turn_hops(columns, 3, 0, columns)
    around_column = naive.turn_hops(rows, 3, 0, rows)
    expected = [m * k * a + n * k * b for a, b in zip(around_row, around_column, strict=True)]
    if columns == slices:
        skew = naive.skew_hops(rows, columns, m, k, 3)
        expected = [a + b for a, b in zip(expected, skew, strict=True)]
    work = operation_work(clock, product_operation(m, k, n))
    found = [work.hop_bytes // 2, work.die_hop_bytes // 2]
    if columns == slices:
        assert found == expected
    else:  # the skew of a short ring moves a share of the slices at a time: more than none
        assert found[0] > expected[0]


def test_key_tiles_make_all_turns_but_the_last() -> None:
    """4 heads on 2 columns of 3 rows: 6 + 3 keys, each at three rows; splits share a column."""
    model = Model.from_hf(LLAMA)
    clock = clock_of(TINY.replace({"core.compute": SIMD}), model, 3, 2)
    attention = attention_operation(model, 0, 3, 6)
    tiling = clock.tiling(attention)
    assert tiling.splits <= tiling.units
    per_key = [naive.turn_hops(3, 9, first, 2)[0] for first in range(3)]
    keys = sum(per_key) * 3  # a third of the 9 keys starts at each row
    elements = 4 * (6 + 6)  # of a key and a value for each head
    assert operation_work(clock, attention).hop_bytes == keys * elements * 2


def test_queries_go_to_the_columns_of_their_head_and_parts_come_back() -> None:
    """1 head on 4 columns of 1 row, a key split each."""
    model = Model.from_hf({**LLAMA, "num_attention_heads": 1, "num_key_value_heads": 1})
    clock = clock_of(TINY, model, 1, 4)
    attention = attention_operation(model, 0, 5, 90)
    tiling = clock.tiling(attention)
    assert tiling.splits == 4 * tiling.units
    gathered, merged = 5 * 6 * 2 * 3, 5 * (6 + 2) * 4 * naive.summing_hops(4)
    assert operation_work(clock, attention).hop_bytes == gathered + merged


@few
@given(clocks(), chunks, prefixes, st.booleans(), st.integers(0, 1))
def test_no_core_is_busy_for_longer_than_the_clock_says(
    clock: Clock, chunk: int, prefix: int, causal_skip: bool, layer: int
) -> None:
    for operation in layer_operations(clock.model, layer, chunk, prefix, causal_skip):
        busy = busy_map(clock, [operation])
        assert busy.shape == (clock.region.rows, clock.region.columns)
        assert busy.min() >= 0
        assert busy.max() <= clock.operation(operation), operation


@pytest.mark.parametrize(
    ("wafer", "name", "rows", "columns"),
    [("wse-2", "llama-3-8b", 60, 40), ("wsc-54", "llama-3.1-70b", 32, 48)],
)
def test_cores_of_real_regions_are_mostly_busy(
    wafer: str, name: str, rows: int, columns: int
) -> None:
    clock = clock_of(Wafer.preset(wafer), Model.preset(name), rows, columns)
    busy = Counter(clock).layer_busy(0, 1024, 3072)
    cycles = clock.layer(0, 1024, 3072)
    assert busy.max() <= cycles
    assert busy.max() > 0.9 * cycles


@few
@given(clocks(most_lines=1), chunks, prefixes)
def test_one_core_is_busy_all_the_time_that_it_does_not_wait(
    clock: Clock, chunk: int, prefix: int
) -> None:
    clock.tiers = Tiers()
    for operation in layer_operations(clock.model, 0, chunk, prefix):
        cycles = clock.operation(operation)
        if isinstance(operation, Attention):
            tiling = clock.tiling(operation)
            if operation.window is not None and tiling.splits > 1:
                continue  # the slowest split need not be the first
            cycles -= clock.ring_attention(operation).ends(tiling, chunk)
        assert busy_map(clock, [operation]).item() == cycles, operation


def test_columns_without_units_do_no_attention() -> None:
    model = Model.from_hf({**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3})
    clock = clock_of(TINY, model, 2, 5)
    attention = attention_operation(model, 0, 30, 400)
    tiling = clock.tiling(attention)
    used = -(-3 * tiling.splits // tiling.units)
    busy = busy_map(clock, [attention])
    places = naive.folded_ring(5)
    assert all(busy[:, places[column]].min() > 0 for column in range(used))
    assert all(busy[:, places[column]].max() == 0 for column in range(used, 5))


def test_bytes_of_vectors_norms_and_appends() -> None:
    model = Model.from_hf(LLAMA)  # 2 bytes an element
    clock = clock_of(DIES, model, 2, 6)
    norm = Norm(Tensor("a", 5, 24), Tensor("b", 5, 24), "w", 24)
    # three instructions read and write 120 elements; 5 sums of 4 bytes go along 6 columns and
    # back, one of five links to another die
    hops = 5 * 4 * naive.summing_hops(6)
    assert operation_work(clock, norm) == Work(0, 0, 3 * 2 * 120 * 2, hops, hops // 5, 0)
    append = Append((Tensor("k", 5, 12), Tensor("v", 5, 12)), 0, 0)
    assert operation_work(clock, append) == Work(sram_bytes=2 * 120 * 2)
    clock = clock_of(DIES, model, 2, 6, Tiers("sram", "dram"))
    assert operation_work(clock, append) == Work(sram_bytes=240, dram_bytes=240)


def test_embedding_rows_travel_a_third_of_the_rows_on_average() -> None:
    clock = clock_of(DIES, Model.from_hf(LLAMA), 6, 2)
    stream = Tensor("stream", 5, 24)
    pairs = [abs(a - b) for a in range(6) for b in range(6)]
    hops = 240 * sum(pairs) // len(pairs)
    work = operation_work(clock, Lookup(stream, "w"))
    assert work == Work(sram_bytes=480, hop_bytes=hops, die_hop_bytes=hops // 5)
    assert operation_work(clock, Embed(stream)) == Work()
    assert busy_map(clock, [Lookup(stream, "w"), Embed(stream)]).max() == 0


def test_kv_in_die_memory_is_streamed_once_a_query_block() -> None:
    model = Model.from_hf({**LLAMA, "model_type": "mistral", "sliding_window": 8})
    clock = Clock(DIES, model, Region(0, 0, 1, 4), Tiers("sram", "dram"), 0, "float16", "float16")
    attention = attention_operation(model, 0, 20, 30)
    blocks = list(clock.tiling(attention).query_blocks(1, 20))
    assert len(blocks) == 3  # a budget of nothing leaves one query tile of 8 at a time
    keys = sum(7 + size for size, _ in blocks)  # the window shows 7 tokens before a block
    assert operation_work(clock, attention).dram_bytes == keys * 2 * 2 * 6 * 2


def test_latents_are_expanded_into_keys_and_values_anew() -> None:
    model = Model.from_hf(DEEPSEEK)
    clock = clock_of(TINY, model, 3, 2)
    attention = attention_operation(model, 0, 9, 14)
    pairs = 9 * 14 + 45
    expected = 23 * 8 * 4 * (6 + 5) + pairs * 4 * (10 + 5)
    assert operation_work(clock, attention).macs == expected


@few
@given(clocks(), chunks, prefixes, st.booleans(), st.data())
def test_counter_gives_the_sum_over_a_layer(
    clock: Clock, chunk: int, prefix: int, causal_skip: bool, data: st.DataObject
) -> None:
    counter = Counter(clock)
    for routing in (None, data.draw(routings(clock.model, prefix + chunk)), None):
        for layer in range(clock.model.layers):
            asked = (layer, chunk, prefix, causal_skip, routing)
            operations = layer_operations(clock.model, *asked)
            assert counter.layer_work(*asked) == total(clock, operations)
            assert np.array_equal(counter.layer_busy(*asked), busy_map(clock, operations))


def test_layers_alike_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(clock_of(TINY, Model.from_hf(LLAMA), 3, 2))
    first = counter.layer_work(0, 8, 4)
    monkeypatch.setattr("wafer_emu.work.operation_work", None)
    assert counter.layer_work(1, 8, 4) == first


def test_a_row_vector_sums_its_parts_along_the_columns() -> None:
    clock = clock_of(TINY, Model.from_hf(LLAMA), 7, 2)
    assert clock.weights_stay(1, 40, 30)
    work = operation_work(clock, product_operation(1, 40, 30))
    assert work.hop_bytes == 30 * 4 * naive.summing_hops(7)


def test_an_unknown_operation_is_refused() -> None:
    clock = clock_of(TINY, Model.from_hf(LLAMA), 3, 2)
    with pytest.raises(TypeError, match="no count"):
        operation_work(clock, Operation())
    with pytest.raises(TypeError, match="no busy cycles"):
        busy_map(clock, [Operation()])
