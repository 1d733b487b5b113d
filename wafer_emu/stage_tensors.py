"""What one stage keeps in its cores' memories: weights, live tensors, the hand-off buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wafer_emu.arena import Area, Arena, storage_kind
from wafer_emu.clock import Clock
from wafer_emu.kv_cache import KvCache, Part
from wafer_emu.layout import Layout, Rows, element_bytes
from wafer_emu.memory import StageMemory
from wafer_emu.placement import Stage
from wafer_emu.program import Tensor
from wafer_kernels.region import Matrix, read_columns, read_rows, write_rows

__all__ = ["Job", "StageTensors"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Job:
    """What the operations of one layer on one token tile belong to."""

    request: int
    layer: int
    cycle: int
    stream: Matrix
    kv: KvCache
    kept: int
    """The layer's place among the stage's layers."""
    parts: Sequence[Part]
    """What each host keeps of the chunk, home first."""


class StageTensors:
    """Weights and activations of one stage, dealt to its cores.

    Parameters
    ----------
    arena, stage, clock, memory
        The cores' memories, the stage, and the rules that the ledger counts its bytes by.
    weights
        Tensors (out, in) under the names of Hugging Face checkpoints.
    names
        Which of them live here.
    """

    def __init__(
        self,
        arena: Arena,
        stage: Stage,
        clock: Clock,
        memory: StageMemory,
        weights: Mapping[str, Float32],
        names: Sequence[str],
    ) -> None:
        self.arena, self.clock, self.memory, self.model = arena, clock, memory, clock.model
        self.area = Area(arena, stage.index, clock.wafer.core.code_bytes)
        self.layout = Layout(stage.region, self.area.first_core)
        self.kind = storage_kind(clock.model.dtype)
        self.held: dict[Tensor, Matrix] = {}
        """Tensors of the running program that are in memory."""
        self._weights = {name: self._place(weights[name]) for name in names}
        tokens, width = self.layout.rows(memory.handoff_tokens), self.model.hidden_size
        size = self.layout.size(tokens, width, element_bytes(self.kind))
        self._handoff = self.area.place(size)

    def _place(self, weight: Float32) -> Matrix:
        """Deal a weight (out, in) as (in, out), or a vector to every row of cores."""
        kind = storage_kind(self.clock.weights_dtype)
        if weight.ndim == 2:
            rows, values = self.layout.rows(weight.shape[1]), np.ascontiguousarray(weight.T)
        else:
            rows = self.layout.copies
            values = np.ascontiguousarray(np.broadcast_to(weight, (rows.line.size, weight.size)))
        address = self.area.place(self.layout.size(rows, weight.shape[0], element_bytes(kind)))
        matrix = self.layout.matrix(kind, rows, weight.shape[0], address)
        write_rows(self.arena.bytes, self.layout.grid, matrix, values)
        return matrix

    def stream(self, chunk: int, tile: int, cycle: int) -> Matrix:
        """Allocate a chunk's residual stream; its first tile and the rest are dealt apart."""
        rows = self.layout.stacked(min(tile, chunk), max(0, chunk - tile))
        return self.allocate("stream", rows, self.model.hidden_size, cycle)

    def handoff(self, tokens: int) -> Matrix:
        """Buffer in which the next chunk's residual stream arrives."""
        rows = self.layout.rows(tokens)
        return self.layout.matrix(self.kind, rows, self.model.hidden_size, self._handoff)

    def allocate(
        self, name: str, rows: Rows, columns: int, cycle: int, beside: Int64 | int = 0
    ) -> Matrix:
        """Allocate an activation; ``area.free(name)`` ends its life.

        Bytes ``beside`` it (core,) follow its own until ``shrink``.
        """
        size = self.layout.size(rows, columns, element_bytes(self.kind)) + beside
        address = self.area.allocate(name, size, cycle)
        return self.layout.matrix(self.kind, rows, columns, address)

    def shrink(self, name: str, rows: Rows, columns: int) -> None:
        """Free the bytes beside an activation."""
        self.area.shrink(name, self.layout.size(rows, columns, element_bytes(self.kind)))

    def read(self, matrix: Matrix) -> Float32:
        """Values of a matrix (rows, columns)."""
        values = np.empty((matrix.line.size, int(matrix.bounds[-1])), np.float32)
        read_rows(values, self.arena.bytes, self.layout.grid, matrix)
        return values

    def write(self, matrix: Matrix, values: Float32) -> None:
        """Write values (rows, columns) into a matrix."""
        write_rows(self.arena.bytes, self.layout.grid, matrix, values)

    def look_up(self, tokens: Int64, name: str) -> Float32:
        """Rows of the embedding table that the stage holds (token, hidden)."""
        table = self._weights[name]
        values = np.empty((tokens.size, table.line.size), np.float32)
        read_columns(values, self.arena.bytes, self.layout.grid, table, tokens)
        return values

    def weight(self, name: str, layer: int) -> Matrix:
        """Return a weight by its name in the layer, or by its whole name."""
        inside = f"model.layers.{layer}.{name}"
        return self._weights[inside if inside in self._weights else name]
