"""Memory of the numbers: byte for byte the ledger's, and faults in it are seen."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocap.policy import Move
from tests.wafer_emu.numeric_cases import (
    CONFIGS,
    Case,
    Given,
    computed,
    model_of,
    moving_cases,
    prompt,
    weights_of,
)
from wafer_emu import kv_cache, stage_attention
from wafer_emu.arena import Area, Arena
from wafer_emu.kv_cache import KvCache
from wafer_emu.numbers import compute
from wafer_emu.placement import Region
from wafer_emu.values import Numbers
from wafer_kernels.errors import KernelError

TOKENS = 45
NAMED = r"core \(\d, \d\) of stage \d at cycle [\d,]+: "


def numbers_of(run: Any) -> Numbers:
    assert run.numbers is not None
    return run.numbers  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_of_every_core_is_the_ledgers(name: str, dtype: str) -> None:
    run = computed(model_of(name, dtype), TOKENS, "mocap")
    for found, book in zip(numbers_of(run).peak_bytes, run.books.cores, strict=True):
        np.testing.assert_array_equal(found, book.peak)


@settings(max_examples=25, deadline=None)
@given(case=moving_cases(), by_layer=st.booleans())
def test_peaks_of_kv_that_moves_late_and_goes_layer_by_layer(case: Case, by_layer: bool) -> None:
    cuts, moves = case
    policy = Given(cuts, moves, by_layer)
    run = computed(model_of("llama-gqa"), sum(cuts), policy, stages=2, chunks=None)
    assert all(each["holds"] for each in run.summary["invariants"])
    for found, book in zip(numbers_of(run).peak_bytes, run.books.cores, strict=True):
        np.testing.assert_array_equal(found, book.peak)


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    shape=st.sampled_from([(1, 4), (4, 1), (2, 2), (1, 3)]),
    dtype=st.sampled_from(["float32", "float16"]),
    chunk_tokens=st.integers(5, 40),
)
def test_peaks_of_ragged_chunks_and_tiles(
    cuts: list[int], shape: tuple[int, int], dtype: str, chunk_tokens: int
) -> None:
    """Chunks longer than ``chunk_tokens`` pass a layer in several tiles."""
    run = computed(
        model_of("llama-gqa", dtype, layers=2), sum(cuts), Given(cuts), stages=2, region=shape,
        chunks=None, chunk_tokens=chunk_tokens,
    )  # fmt: skip
    for found, book in zip(numbers_of(run).peak_bytes, run.books.cores, strict=True):
        np.testing.assert_array_equal(found, book.peak)


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "mixtral", "deepseek"])
def test_what_is_reserved_for_activations_is_used_to_the_last_byte(name: str) -> None:
    run = computed(model_of(name), 48, Given([48]), chunks=None, chunk_tokens=48)
    for stage, used in enumerate(numbers_of(run).activation_bytes):
        load = run.plan.memories[stage].load(48)
        np.testing.assert_array_equal(used, load.dealing.expand(load.activations).ravel())


def test_a_skipped_migration_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    write = stage_attention.write_kv

    def at_home_only(here: Any, operation: Any, cache: Any, host: int, *span: int) -> None:
        if host == here.area.stage:
            write(here, operation, cache, host, *span)

    monkeypatch.setattr(stage_attention, "write_kv", at_home_only)
    with pytest.raises(KernelError, match=NAMED + "KV block .* never written") as caught:
        computed(model_of("llama-gqa"), TOKENS, "mbkr")
    assert {"core", "block", "cycle"} <= set(caught.value.details)


def test_a_skipped_push_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "relocate", lambda *_: None)
    moves = [Move(0, 0, 0, 9, 1, pushed=1)]
    with pytest.raises(KernelError, match=NAMED + "KV block .* never written") as caught:
        computed(model_of("llama-gqa"), 45, Given([15] * 3, moves), stages=2, chunks=None)
    assert caught.value.details["block"][2] in range(6, 15)  # the last 9 of the chunk left


def test_a_layer_freed_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that go one by one, all as the first has passed."""
    free = KvCache.free

    def all_of_them(self: KvCache, layers: slice) -> None:
        if layers.start == 0:
            free(self, slice(0, self.core.shape[0]))

    monkeypatch.setattr(KvCache, "free", all_of_them)
    with pytest.raises(KernelError, match=NAMED + "KV block .* freed since"):
        computed(model_of("llama-gqa"), 45, Given([15] * 3, [], True), stages=2, chunks=None)


def test_a_read_before_arrival_is_seen() -> None:
    model = model_of("llama-gqa")
    run = computed(model, TOKENS)
    schedule = run.schedule._replace(layer_end=run.schedule.layer_end.copy())
    schedule.layer_end[3, 0] = schedule.start[3, 1] + 1  # chunk 0 ends after chunk 1 started
    with pytest.raises(KernelError, match=NAMED + "KV block .* has not arrived yet") as caught:
        _again(run, model, schedule)
    assert caught.value.details["cycle"] == schedule.start[3, 1]


def test_an_input_that_comes_too_late_is_seen() -> None:
    model = model_of("llama-gqa")
    run = computed(model, TOKENS)
    ready = run.schedule.input_ready.copy()
    ready[2, 1] = run.schedule.start[2, 1] + 1
    with pytest.raises(KernelError, match=r"stage 2 starts chunk 1 .* before its input arrives"):
        _again(run, model, run.schedule._replace(input_ready=ready))


def test_an_input_that_was_never_sent_is_seen() -> None:
    model = model_of("llama-gqa")
    run = computed(model, TOKENS)
    start = run.schedule.layer_start.copy()
    start[2, 0], run.schedule.input_ready[2, 0] = 0, 0
    with pytest.raises(KernelError, match=r"stage 2 starts chunk 0 .* nothing was sent"):
        _again(run, model, run.schedule._replace(layer_start=start))


def _again(run: Any, model: Any, schedule: Any) -> Numbers:
    return compute(run.plan, schedule, weights_of(model), [prompt(model, TOKENS)])


def test_two_live_tensors_on_one_address_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Area, "_first_fit", lambda self, size: self._base.copy())
    with pytest.raises(KernelError, match=NAMED + "hidden at byte .* lies on stream") as caught:
        computed(model_of("llama-gqa"), TOKENS)
    assert caught.value.details["block"] == "hidden"


def test_a_stale_block_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that are handed out a second time while their block is still read."""
    take = Arena.take_slots

    def forgetful(self: Arena, *asked: Any) -> Any:
        self.taken[:] = False
        return take(self, *asked)

    monkeypatch.setattr(Arena, "take_slots", forgetful)
    with pytest.raises(KernelError, match=NAMED + "KV block .* was overwritten") as caught:
        computed(model_of("llama-gqa"), TOKENS)
    assert {"core", "block", "cycle"} <= set(caught.value.details)


def test_freed_memory_holds_no_number() -> None:
    arena = Arena([Region(0, 0, 1, 2)], 4096, 64)
    area = Area(arena, 0, 128)
    assert np.isnan(arena.bytes[:, :4096].view(np.float32)).all()
    area.reserve(np.array([256, 128]), 0)
    address = area.allocate("tile", np.array([64, 32]), 0)
    arena.bytes[0, address[0] : address[0] + 64] = 0
    area.free("tile")
    assert np.isnan(arena.bytes[:, :4096].view(np.float32)).all()
    core, slot = arena.take_slots(0, np.array([64, 128]), area.floor)
    assert arena.used.tolist() == [128 + 256 + 64, 128 + 128 + 128]
    arena.bytes[0] = 0
    arena.free_slots(core, slot)
    assert np.isnan(arena.bytes[0, 4096 - 64 : 4096].view(np.float32)).all()
    assert arena.used.tolist() == [128 + 256, 128 + 128]
    assert arena.peak.tolist() == [128 + 256 + 64, 128 + 128 + 128]


def test_activations_never_reach_into_kv() -> None:
    arena = Arena([Region(2, 3, 1, 1)], 1024, 256)
    area = Area(arena, 0, 0)
    arena.take_slots(0, np.array([512]), area.floor)
    with pytest.raises(KernelError, match=re.escape("core (2, 3) of stage 0 at cycle 7")):
        area.reserve(np.array([513]), 7)
    area.reserve(np.array([512]), 7)
    with pytest.raises(KernelError, match="KV reaches byte 256"):
        arena.take_slots(0, np.array([256]), area.floor)


def test_live_blocks_move_together_when_only_pieces_are_free() -> None:
    arena = Arena([Region(0, 0, 1, 1)], 1024, 256)
    area = Area(arena, 0, 0)
    area.reserve(np.array([100]), 0)
    one = np.array([40])
    area.allocate("a", one, 0)
    b = area.allocate("b", one, 0)
    arena.bytes[0, 40:80] = np.arange(40)
    area.free("a")
    c = area.allocate("c", np.array([60]), 0)
    assert (b.tolist(), c.tolist(), area.compactions) == ([0], [40], 1)
    np.testing.assert_array_equal(arena.bytes[0, :40], np.arange(40))
    with pytest.raises(KernelError, match="d needs 1 B of activations, 1 B more"):
        area.allocate("d", np.array([1]), 0)
