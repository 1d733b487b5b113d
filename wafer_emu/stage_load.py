"""What fills a stage's cores besides KV: what rests there, and what attention works with.

Only attention's working memory depends on how much of a core it may use, so that all the rest is
worked out once and loads for many such bytes cost little.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_emu.clock import Clock
from wafer_emu.dealing import Dealing, groups_on_core
from wafer_emu.model import dtype_bytes
from wafer_emu.program import Attention, Experts, Norm, Operation, Product, Program, Tensor
from wafer_emu.tiling import FLOAT_BYTES

__all__ = ["LayerPeak", "Load", "Resting", "attention_tiles", "layer_peak"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """Bytes of every kind of core of a stage while tasks of one chunk size run."""

    dealing: Dealing
    code: Int64
    weights: Int64
    activations: Int64
    buffers: Int64

    @cached_property
    def total(self) -> Int64:
        """All of it (row kind, column kind)."""
        return self.code + self.weights + self.activations + self.buffers


class LayerPeak(NamedTuple):
    """Most bytes of every kind of core over a layer: live beside its attention, and otherwise."""

    attention: Attention
    beside: Int64
    otherwise: Int64


@dataclass(frozen=True)
class Resting:
    """A load but for what attention works with, the same however much it may use."""

    dealing: Dealing
    code: Int64
    weights: Int64
    waiting: Int64
    buffers: Int64
    layers: tuple[LayerPeak, ...]

    def with_attention(self, clock: Clock) -> Load:
        """The load where attention uses what a clock says."""
        peak = np.zeros_like(self.waiting)
        for layer in self.layers:
            attending = layer.beside + _attention_bytes(clock, layer.attention, self.dealing)
            peak = np.maximum(peak, np.maximum(layer.otherwise, attending))
        return Load(self.dealing, self.code, self.weights, peak + self.waiting, self.buffers)


def layer_peak(clock: Clock, program: Program, dealing: Dealing) -> LayerPeak:
    """Live tensors and working buffers over a program of one layer.

    A tensor lives from the first to the last operation that names it; the residual stream
    always.
    """
    operations = list(program.operations())
    spans: dict[Tensor, tuple[int, int]] = {}
    for index, operation in enumerate(operations):
        for tensor in operation.tensors():
            spans[tensor] = (spans.get(tensor, (index, index))[0], index)
    otherwise = np.zeros_like(dealing.counts)
    element = clock.grid.element_bytes
    found: tuple[Attention, Int64] | None = None
    for index, operation in enumerate(operations):
        live = np.zeros_like(dealing.counts)
        for tensor, (first, last) in spans.items():
            if first <= index <= last or tensor.name == "stream":
                live += dealing.matrix(tensor.rows, tensor.columns) * element
        if isinstance(operation, Attention):
            found = operation, live
        else:
            otherwise = np.maximum(otherwise, live + _working_bytes(clock, operation, dealing))
    assert found is not None
    return LayerPeak(*found, otherwise)


def attention_tiles(clock: Clock, program: Program) -> set[int]:
    """Query tiles that a row may hold, under whichever tiling."""
    if clock.wafer.attention == "products":
        return set()
    attention = next(each for each in program.operations() if isinstance(each, Attention))
    tilings = clock.ring_attention(attention).known_tilings
    return {one.held_query_tiles(clock.region.rows, attention.chunk) for one in tilings}


def _attention_bytes(clock: Clock, operation: Attention, dealing: Dealing) -> Int64:
    """Bytes of key tiles that arrive and of the softmax state a core, of whatever tilings fit."""
    most = np.zeros_like(dealing.counts)
    if clock.wafer.attention == "products":
        blocks = clock.block_attention(operation)
        return most + blocks.slice_bytes + dealing.rows(operation.chunk) * blocks.row_bytes
    for tiles, query_tile_bytes, key_buffer_bytes in clock.ring_attention(operation).space(
        operation.chunk
    ):
        most = np.maximum(most, key_buffer_bytes + dealing.rows(tiles) * query_tile_bytes)
    return most


def _working_bytes(clock: Clock, operation: Operation, dealing: Dealing) -> Int64:
    """Bytes of an operation's own buffers a core: slices that arrive, sums."""
    if isinstance(operation, Product | Experts):
        return _product_buffers(clock, operation, dealing)
    if isinstance(operation, Norm):
        width, groups = operation.source.columns, operation.groups
        sums = groups_on_core(dealing.columns(width), groups, width)
        return dealing.rows(operation.source.rows) * sums * FLOAT_BYTES
    return np.zeros_like(dealing.counts)


def _product_buffers(clock: Clock, operation: Product | Experts, dealing: Dealing) -> Int64:
    """Bytes of a product's slices that arrive and of its float32 sums a core.

    The target's own bytes hold as much of the sums as they can; products of experts lie
    elsewhere than the rows that they go to. Room for the sums of a row vector's product is kept
    in any case, since few rows are multiplied so.
    """
    region, element = clock.region, clock.grid.element_bytes
    rows, width = operation.most_rows, operation.target.columns
    row_sums = np.zeros_like(dealing.counts) + dealing.columns(width) * FLOAT_BYTES
    if isinstance(operation, Product) and operation.last_row:
        return row_sums
    depth = -(-operation.source.columns // max(region.rows, region.columns))
    arriving_a = dealing.rows(rows) * depth * element
    arriving_b = dealing.columns(width) * depth * dtype_bytes(clock.weights_dtype)
    beside = FLOAT_BYTES - (element if isinstance(operation, Product) else 0)
    sums = dealing.matrix(rows, width) * beside
    return np.maximum(arriving_a + arriving_b + sums, row_sums)
