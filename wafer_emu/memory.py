"""What fills the memory of a stage: bytes of every core for code, weights, activations and buffers.

The rest is room for KV, counted in quanta: one vector of one head (or one latent) of one token.
Balanced dealing gives few distinct kinds of rows and columns, so that a region of 10^5 cores is
described by a small table of core kinds and how many cores are of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from wafer_emu.clock import Clock
from wafer_emu.dealing import Dealing, dealt
from wafer_emu.die_memory import stream_bytes
from wafer_emu.model import dtype_bytes
from wafer_emu.placement import Stage
from wafer_emu.program import Program, Task, lower
from wafer_emu.stage_load import Load, Resting, attention_tiles, layer_peak

__all__ = [
    "CLASSES",
    "StageMemory",
    "kv_quanta_per_token",
    "kv_quantum_bytes",
]

Int64 = npt.NDArray[np.int64]
CLASSES = ("code", "weights", "activations", "own_kv", "hosted_kv", "buffers")
STREAM_SHARE = 16  # of a core's memory for one piece of streamed weights (assumed)


def kv_quantum_bytes(clock: Clock) -> int:
    """Bytes of one key or value vector of one head and token, or of one latent."""
    model = clock.model
    width = model.head_dim if model.mla is None else model.kv_elements_per_token(0)
    return width * dtype_bytes(clock.kv_dtype)


def kv_quanta_per_token(clock: Clock) -> int:
    """Quanta that one layer keeps of one token."""
    return 1 if clock.model.mla is not None else 2 * clock.model.kv_heads


@dataclass
class StageMemory:
    """Memory of one stage.

    A chunk passes every layer in tiles of at most ``tile_tokens``; its residual stream stays in
    place whole: in SRAM, or in die memory but for the tile in work and a second buffer.
    ``handoff_tokens`` of the next chunk may arrive meanwhile. ``budget_bytes`` replaces the cores'
    memory by a KV budget for the stage.
    """

    clock: Clock
    stage: Stage
    holds_embedding: bool
    holds_head: bool
    tile_tokens: int
    handoff_tokens: int
    budget_bytes: int | None = None

    def weight_shapes(self) -> Iterator[tuple[int, ...]]:
        """Shapes (out, in) of all weights that live on the stage."""
        model = self.clock.model
        for layer in range(self.stage.first_layer, self.stage.first_layer + self.stage.layers):
            yield from model.layer_weight_shapes(layer).values()
        if self.holds_embedding:
            yield model.embedding_shape
        if self.holds_head:
            yield model.final_norm_shape
            if not (model.tied_embeddings and self.holds_embedding):
                yield model.head_shape

    @cached_property
    def _shape_counts(self) -> dict[tuple[int, ...], int]:
        counts: dict[tuple[int, ...], int] = {}
        for shape in self.weight_shapes():
            counts[shape] = counts.get(shape, 0) + 1
        return counts

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the stage's weights, each counted once."""
        elements = sum(math.prod(shape) * count for shape, count in self._shape_counts.items())
        return elements * dtype_bytes(self.clock.weights_dtype)

    def load(self, chunk: int) -> Load:
        """What fills the stage's cores, KV apart, while tasks of ``chunk`` tokens run."""
        loads, resting, key = self.clock.loads, self.clock.resting, (*self._alike, chunk)
        asked = (self.clock.attention_bytes, *key)
        if asked not in loads:
            if key not in resting:
                resting[key] = self._rests(chunk)
            loads[asked] = resting[key].with_attention(self.clock)
        return loads[asked]

    @cached_property
    def _alike(self) -> tuple[object, ...]:
        """What stages of one model have to share to be loaded alike, attention apart."""
        region = self.stage.region
        return (
            (region.rows, region.columns, self.clock.tiers),
            tuple((kind, len(layers)) for kind, layers in self._kinds.items()),
            self.holds_embedding,
            self.holds_head,
            self.tile_tokens,
            self.handoff_tokens,
            self.budget_bytes,
        )

    @cached_property
    def _kinds(self) -> dict[tuple[object, ...], list[int]]:
        """Layers of every kind on the stage."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for layer in range(self.stage.first_layer, self.stage.first_layer + self.stage.layers):
            kinds.setdefault(self.clock.layer_kind(layer), []).append(layer)
        return kinds

    def _programs(self, chunk: int) -> list[Program]:
        """A program of one layer of every kind on the stage."""
        return [
            lower(self.clock.model, Task(layers[-1], 1, chunk, 0, last_chunk=self.holds_head))
            for layers in self._kinds.values()
        ]

    def _rests(self, chunk: int) -> Resting:
        model, region, clock = self.clock.model, self.stage.region, self.clock
        programs = self._programs(min(chunk, self.tile_tokens))
        tensors = [t for p in programs for operation in p.operations() for t in operation.tensors()]
        shapes = self._shape_counts
        rest = self._waiting_in_sram(chunk)
        dealing = Dealing(
            region.rows,
            region.columns,
            {shape[-1] for shape in shapes}
            | {tensor.rows for tensor in tensors}
            | {tiles for program in programs for tiles in attention_tiles(clock, program)}
            | {rest, self._arriving_in_sram},
            {shape[0] for shape in shapes}
            | {tensor.columns for tensor in tensors}
            | {model.hidden_size},
        )
        zero = np.zeros_like(dealing.counts)
        if self.budget_bytes is not None:
            return Resting(dealing, zero, zero, zero, zero, ())
        return Resting(
            dealing,
            zero + clock.wafer.core.code_bytes,
            self._weights(dealing),
            dealing.matrix(rest, model.hidden_size) * dtype_bytes(model.dtype),
            self._buffers(dealing),
            tuple(layer_peak(clock, program, dealing) for program in programs),
        )

    def _waiting_in_sram(self, chunk: int) -> int:
        """Tokens of the residual stream that the cores hold besides the tile in work.

        From die memory at most one more tile comes, into the place that the last one has left.
        """
        rest = max(0, chunk - self.tile_tokens)
        return min(rest, self.tile_tokens) if self.clock.tiers.activations == "dram" else rest

    @property
    def _arriving_in_sram(self) -> int:
        return 0 if self.clock.tiers.activations == "dram" else self.handoff_tokens

    def _weights(self, dealing: Dealing) -> Int64:
        """Bytes of weights a core; vectors stand on every row of cores."""
        total = np.zeros_like(dealing.counts)
        if self.clock.tiers.weights == "dram":
            return total
        for shape, count in self._shape_counts.items():
            matrix = dealing.columns(shape[0])
            if len(shape) == 2:
                matrix = dealing.matrix(shape[1], shape[0])
            total = total + count * matrix * dtype_bytes(self.clock.weights_dtype)
        return total

    def _buffers(self, dealing: Dealing) -> Int64:
        """Bytes of transfer buffers a core: the next chunk's input, weights on their way in.

        Streamed weights pass through two buffers, each of the largest matrix or of
        ``1 / STREAM_SHARE`` of the core's memory; a larger matrix comes in pieces.
        """
        model = self.clock.model
        arriving = dealing.matrix(self._arriving_in_sram, model.hidden_size)
        total = arriving * dtype_bytes(model.dtype)
        if self.clock.tiers.weights == "dram":
            largest = max((shape for shape in self._shape_counts if len(shape) == 2), key=math.prod)
            streamed = dealing.matrix(largest[1], largest[0])
            # both at once, so that a byte more of memory never leaves less beside them
            most = 2 * self.clock.wafer.core.sram_bytes // STREAM_SHARE
            total = total + np.minimum(2 * streamed * dtype_bytes(self.clock.weights_dtype), most)
        return total

    @cached_property
    def kv_places(self) -> Int64:
        """Memory of every KV place [bytes]: cores, or the region's dies for KV in die memory."""
        wafer, region = self.clock.wafer, self.stage.region
        if self.budget_bytes is not None:
            quantum = kv_quantum_bytes(self.clock)
            return dealt(self.budget_bytes // quantum, region.cores) * quantum
        if self.clock.tiers.kv == "sram":
            return np.full(region.cores, wafer.core.sram_bytes, np.int64)
        return self.die_places

    @cached_property
    def die_places(self) -> Int64:
        """Die memory under the region [bytes a die]; empty if the stage uses none."""
        wafer = self.clock.wafer
        if self.budget_bytes is not None or not self.clock.tiers.in_die_memory:
            return np.zeros(0, np.int64)
        assert wafer.dram is not None
        dies = math.prod(self.stage.region.dies(wafer))
        return np.full(dies, wafer.dram.capacity_bytes, np.int64)

    @cached_property
    def die_weights(self) -> Int64:
        """Weights in die memory [bytes a die], spread evenly."""
        weights = self.weight_bytes if self.clock.tiers.weights == "dram" else 0
        return dealt(weights, self.die_places.size)

    @cached_property
    def die_buffers(self) -> Int64:
        """Hand-off buffer in die memory [bytes a die], spread evenly."""
        arriving = self.handoff_tokens - self._arriving_in_sram
        return dealt(stream_bytes(self.clock, arriving), self.die_places.size)

    def die_activations(self, chunk: int) -> Int64:
        """Residual stream in die memory while a task of ``chunk`` tokens runs [bytes a die].

        All of it, tile in work included, unless it is one tile, which stays in SRAM.
        """
        passes = self.clock.tiers.activations == "dram" and chunk > self.tile_tokens
        return dealt(stream_bytes(self.clock, chunk if passes else 0), self.die_places.size)

    def die_load(self, chunk: int) -> Int64:
        """What fills the die memories, KV apart, while tasks of ``chunk`` tokens run."""
        return self.die_weights + self.die_buffers + self.die_activations(chunk)

    @property
    def kv_among_cores(self) -> bool:
        """Whether KV shares the cores' memory with everything else."""
        return self.budget_bytes is None and self.clock.tiers.kv == "sram"

    def kv_room(self, chunk: int) -> Int64:
        """Room for KV of every KV place while tasks of ``chunk`` tokens run [bytes]."""
        if self.budget_bytes is not None:
            return self.kv_places
        if not self.kv_among_cores:
            return self.kv_places - self.die_load(chunk)
        load = self.load(chunk)
        return self.kv_places - load.dealing.expand(load.total).ravel()

    def kv_quanta(self, chunk: int) -> int:
        """KV quanta that the stage holds while tasks of ``chunk`` tokens run."""
        quantum = kv_quantum_bytes(self.clock)
        if not self.kv_among_cores:
            return int(np.sum(np.maximum(self.kv_room(chunk), 0) // quantum))
        load = self.load(chunk)
        room = self.clock.wafer.core.sram_bytes - load.total
        return int(np.sum(np.maximum(room, 0) // quantum * load.dealing.counts))

    def shortage(self, chunk: int) -> int:
        """Bytes that the fullest core, or die, lacks before any KV is stored; 0 or less if none."""
        if self.budget_bytes is not None:
            return 0
        short = int(self.load(chunk).total.max()) - self.clock.wafer.core.sram_bytes
        if self.die_places.size:
            short = max(short, int((self.die_load(chunk) - self.die_places).max()))
        return short
