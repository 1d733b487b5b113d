"""Memory of a stage: every core's bytes against a loop over tensors, and what is left for KV."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import memory as naive
from tests.naive import work as naive_work
from tests.wafer_emu.small import DEEPSEEK, DIES, LLAMA, TINY, chunks, clock_of, clocks
from wafer_emu.clock import Clock, Tiers
from wafer_emu.dealing import Dealing, dealt
from wafer_emu.memory import StageMemory, kv_quanta_per_token, kv_quantum_bytes
from wafer_emu.model import Model, dtype_bytes
from wafer_emu.placement import Stage
from wafer_emu.program import Attention, Task, lower

few = settings(max_examples=40, deadline=None)
lines = st.integers(1, 9)
totals = st.integers(0, 60)


@few
@given(totals, lines)
def test_parts_are_dealt_along_the_folded_ring(total: int, length: int) -> None:
    assert dealt(total, length).tolist() == naive_work.placed(naive_work.deal(total, length))


@few
@given(lines, lines, st.lists(totals, min_size=1, max_size=4), st.lists(totals, min_size=1))
def test_kinds_of_cores_stand_for_all_cores(
    rows: int, columns: int, row_totals: list[int], column_totals: list[int]
) -> None:
    dealing = Dealing(rows, columns, row_totals, column_totals)
    assert dealing.counts.sum() == rows * columns
    for height in row_totals:
        for width in column_totals:
            kinds = dealing.matrix(height, width)
            cores = np.multiply.outer(dealt(height, rows), dealt(width, columns))
            assert np.array_equal(dealing.expand(kinds), cores)
            assert (kinds * dealing.counts).sum() == height * width


def memory_of(clock: Clock, tile: int, handoff: int, **ends: bool) -> StageMemory:
    stage = Stage(0, 0, clock.model.layers, clock.region)
    return StageMemory(
        clock, stage, ends.get("embedding", False), ends.get("head", False), tile, handoff
    )


@few
@given(clocks(), chunks, chunks, st.integers(0, 20), st.booleans(), st.booleans())
def test_every_core_holds_what_a_loop_over_tensors_finds(
    clock: Clock, chunk: int, tile: int, handoff: int, embedding: bool, head: bool
) -> None:
    memory = memory_of(clock, tile, handoff, embedding=embedding, head=head)
    load, model, region = memory.load(chunk), clock.model, clock.region
    element, weight = dtype_bytes(model.dtype), dtype_bytes(clock.weights_dtype)
    programs = [
        list(lower(model, Task(layer, 1, min(chunk, tile), 0, last_chunk=head)).operations())
        for layer in range(model.layers)
    ]
    shapes = list(memory.weight_shapes())
    activations, weights = load.dealing.expand(load.activations), load.dealing.expand(load.weights)
    buffers = load.dealing.expand(load.buffers)
    for row in range(region.rows):
        for column in range(region.columns):

            def height(total: int, row: int = row) -> int:
                return int(naive_work.placed(naive_work.deal(total, region.rows))[row])

            def width(total: int, column: int = column) -> int:
                return int(naive_work.placed(naive_work.deal(total, region.columns))[column])

            peak = 0
            for operations in programs:
                attention = next(each for each in operations if isinstance(each, Attention))
                sizes = {
                    "rows": region.rows,
                    "columns": region.columns,
                    "element": element,
                    "weight": weight,
                    "tilings": [
                        {
                            "query_tiles": math.ceil(
                                min(attention.chunk, region.rows * tiling.block_row_tokens)
                                / tiling.query_tile
                            ),
                            "query_tile": tiling.query_tile,
                            "key_buffer": tiling.key_buffer_bytes,
                            "query": tiling.query_bytes,
                        }
                        for tiling in clock.ring_attention(attention).tilings(attention.chunk)
                    ],
                }
                peak = max(peak, naive.peak_bytes(operations, height, width, sizes))
            beyond, arriving = max(0, chunk - tile), handoff
            if clock.tiers.activations == "dram":  # in SRAM only a second buffer of one tile
                beyond, arriving = min(beyond, tile), 0
            rest = height(beyond) * width(model.hidden_size) * element
            assert activations[row, column] == peak + rest
            resident = sum(
                (height(shape[1]) if len(shape) == 2 else 1) * width(shape[0]) for shape in shapes
            )
            waiting = height(arriving) * width(model.hidden_size) * element
            if clock.tiers.weights == "sram":
                assert weights[row, column] == resident * weight
                assert buffers[row, column] == waiting
            else:
                assert weights[row, column] == 0
                largest = max((s for s in shapes if len(s) == 2), key=math.prod)
                piece = height(largest[1]) * width(largest[0]) * weight
                limit = clock.wafer.core.sram_bytes // 16
                assert buffers[row, column] == waiting + 2 * min(piece, limit)


@few
@given(clocks(), st.booleans(), st.booleans())
def test_weights_are_each_counted_once(clock: Clock, embedding: bool, head: bool) -> None:
    memory, model = memory_of(clock, 8, 0, embedding=embedding, head=head), clock.model
    elements = sum(model.layer_weight_elements(layer) for layer in range(model.layers))
    elements += embedding * model.vocab_size * model.hidden_size
    elements += head * (model.vocab_size + 1) * model.hidden_size
    assert memory.weight_bytes == elements * dtype_bytes(model.dtype)


def test_a_tied_table_is_held_once() -> None:
    model = Model.from_hf({**LLAMA, "tie_word_embeddings": True})
    clock, table = clock_of(TINY, model, 2, 2), 50 * 24 * 2
    neither = memory_of(clock, 8, 0).weight_bytes
    embedding = memory_of(clock, 8, 0, embedding=True).weight_bytes
    head = memory_of(clock, 8, 0, head=True).weight_bytes
    both = memory_of(clock, 8, 0, embedding=True, head=True).weight_bytes
    assert embedding == neither + table
    assert head == neither + table + 24 * 2
    assert both == head


@few
@given(clocks(), chunks, st.sampled_from([None, 0, 999, 10**6]))
def test_room_for_kv_is_whole_quanta_of_every_place(
    clock: Clock, chunk: int, budget: int | None
) -> None:
    memory = replace(memory_of(clock, chunk, chunk), budget_bytes=budget)
    quantum = kv_quantum_bytes(clock)
    room = memory.kv_room(chunk)
    assert memory.kv_quanta(chunk) == sum(max(0, int(each)) // quantum for each in room)
    if budget is not None:
        assert memory.kv_quanta(chunk) == budget // quantum
        assert memory.shortage(chunk) == 0
        assert memory.load(chunk).total.max() == 0
    elif clock.tiers.kv == "sram":
        load = memory.load(chunk)
        used = load.dealing.expand(load.total).ravel()
        assert np.array_equal(room + used, np.full(clock.region.cores, clock.wafer.core.sram_bytes))


@few
@given(clocks(), chunks, st.integers(1, 30))
def test_longer_chunks_leave_less_room(clock: Clock, chunk: int, more: int) -> None:
    memory = memory_of(clock, 10**6, 0)
    shorter, longer = memory.load(chunk).activations, memory.load(chunk + more).activations
    assert longer.max() >= shorter.max()


@few
@given(clocks(), chunks, chunks, st.integers(0, 20), st.integers(1, 20))
def test_die_memories_hold_each_byte_once(
    clock: Clock, chunk: int, tile: int, handoff: int, more: int
) -> None:
    memory, tiers = memory_of(clock, tile, handoff), clock.tiers
    width = clock.model.hidden_size * dtype_bytes(clock.model.dtype)
    if not tiers.in_die_memory:
        assert memory.die_places.size == 0
        return
    passing = chunk if chunk > tile else 0
    held = {
        "weights": memory.weight_bytes if tiers.weights == "dram" else 0,
        "activations": passing * width if tiers.activations == "dram" else 0,
        "buffers": handoff * width if tiers.activations == "dram" else 0,
    }
    assert memory.die_weights.sum() == held["weights"]
    assert memory.die_activations(chunk).sum() == held["activations"]
    assert memory.die_buffers.sum() == held["buffers"]
    assert memory.die_load(chunk).sum() == sum(held.values())
    assert (memory.die_load(chunk + more) >= memory.die_load(chunk)).all()
    if tiers.kv == "dram":
        room = memory.kv_room(chunk)
        assert np.array_equal(room + memory.die_load(chunk), memory.die_places)


@few
@given(clocks(), chunks, chunks, st.integers(0, 20))
def test_activations_in_die_memory_leave_the_cores_more_room(
    clock: Clock, chunk: int, tile: int, handoff: int
) -> None:
    clock = replace(clock, tiers=replace(clock.tiers, activations="sram"), _memo={})
    there = replace(clock, tiers=replace(clock.tiers, activations="dram"), _memo={})
    on_cores = memory_of(clock, tile, handoff).load(chunk).total.sum()
    in_dies = memory_of(there, tile, handoff).load(chunk).total.sum()
    assert in_dies <= on_cores


def test_what_a_die_lacks_is_a_shortage_too() -> None:
    model, tiers = Model.from_hf(LLAMA), Tiers("sram", "sram", "dram")
    memory = memory_of(clock_of(DIES, model, 6, 3, tiers), 8, 4)
    need = int(memory.die_load(100).max())
    assert need == (100 + 4) * 24 * 2 // 2
    assert memory.shortage(100) < 0
    full = DIES.replace({"dram.capacity_bytes": need - 7})
    assert memory_of(clock_of(full, model, 6, 3, tiers), 8, 4).shortage(100) == 7


def test_kv_of_one_token_in_quanta() -> None:
    clock = clock_of(TINY, Model.from_hf(LLAMA), 2, 2)
    assert (kv_quantum_bytes(clock), kv_quanta_per_token(clock)) == (6 * 2, 2 * 2)
    model = Model.from_hf(DEEPSEEK)
    clock = clock_of(TINY, model, 2, 2)
    assert (kv_quantum_bytes(clock), kv_quanta_per_token(clock)) == (12 * 2, 1)


@few
@given(clocks())
def test_quanta_are_the_bytes_of_a_token(clock: Clock) -> None:
    per_layer = kv_quantum_bytes(clock) * kv_quanta_per_token(clock)
    assert per_layer * clock.model.layers == clock.model.kv_bytes_per_token()


def test_shortage_is_what_the_fullest_core_lacks() -> None:
    model = Model.from_hf(LLAMA)
    roomy = memory_of(clock_of(TINY, model, 2, 2), 8, 8)
    total = int(roomy.load(8).total.max())
    assert roomy.shortage(8) == total - 1_048_576 < 0
    tight = TINY.replace({"core.sram_bytes": total - 100})
    clock = Clock(tight, model, roomy.clock.region, Tiers(), 524_288, "bfloat16", "bfloat16")
    assert memory_of(clock, 8, 8).shortage(8) == 100
    assert memory_of(clock, 8, 8).kv_room(8).min() == -100


def test_die_memories_hold_kv_beside_weights() -> None:
    model = Model.from_hf(LLAMA)
    memory = memory_of(clock_of(DIES, model, 6, 3, Tiers("dram", "dram")), 8, 8)
    room = memory.kv_room(8)
    assert room.size == 2
    assert room.sum() == 2 * 64_000_000_000 - memory.weight_bytes
    assert not memory.kv_among_cores
    full = DIES.replace({"dram.capacity_bytes": memory.weight_bytes // 2 - 7})
    crowded = memory_of(clock_of(full, model, 6, 3, Tiers("dram", "dram")), 8, 8)
    assert crowded.shortage(8) == pytest.approx(7, abs=1)
    beside = memory_of(clock_of(DIES, model, 6, 3, Tiers("sram", "dram")), 8, 8)
    assert beside.kv_room(8).tolist() == [64_000_000_000] * 2
