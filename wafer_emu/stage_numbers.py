"""The operations of a tile program on real tensors in the memories of one stage's cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from wafer_emu.arena import Area, Arena, storage_kind
from wafer_emu.clock import FLOAT_BYTES, Clock
from wafer_emu.kv_cache import KvCache, Part, refuse_fault
from wafer_emu.layout import Layout, Rows, element_bytes, no_matrix
from wafer_emu.memory import StageMemory
from wafer_emu.placement import Stage
from wafer_emu.program import (
    Add,
    Append,
    Attention,
    Experts,
    Gate,
    Norm,
    Operation,
    Product,
    Rotary,
    Route,
    Tensor,
)
from wafer_emu.rotary import rotary_tables
from wafer_emu.threads import share_out
from wafer_kernels import attention as attention_kernel
from wafer_kernels import region_vector
from wafer_kernels.attention import AttentionCost
from wafer_kernels.numeric import Activation
from wafer_kernels.numeric_routing import choose_by_group, choose_by_softmax, expert_rows
from wafer_kernels.region import Matrix, read_columns, read_rows, write_rows
from wafer_kernels.region_attention import Block, Cache, Heads, append, finish, gather, ring_pass
from wafer_kernels.region_product import compute_shift, row_vectors

__all__ = ["LATENT_NORM_EPSILON", "Job", "StageNumbers"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
LATENT_NORM_EPSILON = 1e-6  # of MLA's two latent norms, whatever the config says (DeepSeek-V3 code)
ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
}


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


class StageNumbers:
    """Weights, activations and operations of one stage.

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
        self.expert_tokens: dict[int, Int64] = {}
        self._routes: tuple[Int64, Float32] = (
            np.zeros((0, 0), np.int64),
            np.zeros((0, 0), np.float32),
        )
        self._tensors: dict[Tensor, Matrix] = {}
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

    # -- tensors --------------------------------------------------------------------------------
    def stream(self, chunk: int, tile: int, cycle: int) -> Matrix:
        """Allocate a chunk's residual stream; its first tile and the rest are dealt apart."""
        rows = self.layout.stacked(min(tile, chunk), max(0, chunk - tile))
        return self._allocate("stream", rows, self.model.hidden_size, cycle)

    def handoff(self, tokens: int) -> Matrix:
        """Buffer in which the next chunk's residual stream arrives."""
        rows = self.layout.rows(tokens)
        return self.layout.matrix(self.kind, rows, self.model.hidden_size, self._handoff)

    def _allocate(self, name: str, rows: Rows, columns: int, cycle: int) -> Matrix:
        size = self.layout.size(rows, columns, element_bytes(self.kind))
        address = self.area.allocate(name, size, cycle)
        return self.layout.matrix(self.kind, rows, columns, address)

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

    # -- programs -------------------------------------------------------------------------------
    def run(self, operations: Sequence[Operation], job: Job) -> None:
        """Carry out operations in order; a tensor lives from the first to the last that names it."""
        spans: dict[Tensor, tuple[int, int]] = {}
        for index, operation in enumerate(operations):
            for tensor in operation.tensors():
                spans[tensor] = (spans.get(tensor, (index, index))[0], index)
        for index, operation in enumerate(operations):
            for tensor, (first, _) in spans.items():
                if first == index:
                    self._tensors[tensor] = (
                        job.stream
                        if tensor.name == "stream"
                        else self._allocate(
                            tensor.name, self.layout.rows(tensor.rows), tensor.columns, job.cycle
                        )
                    )
            work = self.area.allocate("working buffers", self._working(operation), job.cycle)
            self._carry_out(operation, job, work)
            self.area.free("working buffers")
            for tensor, (_, last) in spans.items():
                if last == index:
                    del self._tensors[tensor]
                    if tensor.name != "stream":
                        self.area.free(tensor.name)

    def _working(self, operation: Operation) -> Int64:
        """Bytes of an operation's own buffers on every core (core,)."""
        layout, cores = self.layout, self.layout.region.cores
        element = element_bytes(self.kind)
        match operation:
            case Product() | Experts():
                return self._arriving(operation, element).sum(axis=0)
            case Attention():
                tiling = self.clock.tiling(operation)
                block = tiling.held_queries(layout.region.rows, operation.chunk)
                tiles = layout.rows(-(-block // tiling.query_tile)).sizes
                tokens = np.repeat(tiles * tiling.query_tile, layout.region.columns)
                return tiling.key_buffer_bytes + tokens * tiling.query_bytes
        return np.zeros(cores, np.int64)

    def _partial_sums(self, columns: int) -> Int64:
        """Bytes of a row vector's sums on every core (core,)."""
        return np.tile(self.layout.column_sizes(columns) * FLOAT_BYTES, self.layout.region.rows)

    def _arriving(self, operation: Product | Experts, element: int) -> Int64:
        """Bytes of the buffers for arriving slices of A and of B on every core (2, core)."""
        region = self.layout.region
        depth = -(-operation.source.columns // max(region.rows, region.columns))
        rows = self.layout.rows(operation.target.rows).sizes * depth * element
        columns = self.layout.column_sizes(operation.target.columns) * depth
        columns = columns * element_bytes(storage_kind(self.clock.weights_dtype))
        return np.stack([np.repeat(rows, region.columns), np.tile(columns, region.rows)])

    def _weight(self, name: str, job: Job) -> Matrix:
        inside = f"model.layers.{job.layer}.{name}"
        return self._weights[inside if inside in self._weights else name]

    def _carry_out(self, operation: Operation, job: Job, work: Int64) -> None:
        arena, grid, held = self.arena.bytes, self.layout.grid, self._tensors
        match operation:
            case Norm(source=source, target=target):
                latent = operation.weight.endswith("_a_layernorm.weight")
                epsilon = LATENT_NORM_EPSILON if latent else self.model.norm_epsilon
                weight = self._weight(operation.weight, job)
                region_vector.norm(
                    arena, grid, held[source], held[target], weight, operation.groups,
                    operation.width, epsilon,
                )  # fmt: skip
            case Product():
                self._product(operation, job, work)
            case Rotary(target=target):
                positions = operation.first_position + np.arange(target.rows)
                cosine, sine = rotary_tables(self.model, positions)
                region_vector.rotate(
                    arena, grid, held[target], operation.heads, cosine, sine,
                    self.model.rope.interleaved,
                )  # fmt: skip
            case Append():
                self._append(operation, job)
            case Attention():
                self._attend(operation, job, work)
            case Gate(gate=gate, up=up, target=target):
                activation = int(ACTIVATIONS[operation.activation])
                region_vector.gate(arena, grid, held[gate], held[up], held[target], activation)
            case Add(source=source, target=target):
                region_vector.add(arena, grid, held[source], held[target])
            case Route():
                self._route(operation, job)
            case Experts():
                self._experts(operation, job, work)
            case _:
                raise TypeError(f"no numbers for {operation}")

    # -- products -------------------------------------------------------------------------------
    def _product(self, operation: Product, job: Job, work: Int64) -> None:
        source, target = self._tensors[operation.source], self._tensors[operation.target]
        bias = no_matrix() if operation.bias is None else self._weight(operation.bias, job)
        rows = np.arange(operation.target.rows)
        self._multiply(
            operation, source, rows, self._weight(operation.weight, job), target, rows, bias,
            np.zeros(0, np.float32), work,
        )  # fmt: skip

    def _multiply(
        self,
        operation: Product | Experts,
        source: Matrix,
        source_rows: Int64,
        weight: Matrix,
        target: Matrix,
        target_rows: Int64,
        bias: Matrix,
        shares: Float32,
        work: Int64,
    ) -> None:
        """Multiply rows as the clock says: by shifts, or row by row with weights that stay."""
        inner, width = weight.line.size, int(weight.bounds[-1])
        if self.clock.weights_stay(source_rows.size, inner, width):
            products = self._row_vectors(source, source_rows, weight, bias)
            rows = target._replace(line=target.line[target_rows], place=target.place[target_rows])
            if shares.size:
                products = self.read(rows) + shares[:, np.newaxis] * products
            self.write(rows, products)
            return
        arriving_a, _ = self._arriving(operation, element_bytes(self.kind))
        share_out(
            compute_shift, self.layout.region.cores, source_rows.size * inner * width,
            self.arena.bytes, self.layout.grid, source, source_rows, weight, target, target_rows,
            bias, shares, work, work + arriving_a,
        )  # fmt: skip

    def _row_vectors(self, source: Matrix, rows: Int64, weight: Matrix, bias: Matrix) -> Float32:
        products = np.empty((rows.size, int(weight.bounds[-1])), np.float32)
        share_out(
            row_vectors, self.layout.region.columns, products.size * weight.line.size,
            products, self.arena.bytes, self.layout.grid, source, rows, weight, bias,
        )  # fmt: skip
        return products

    def answer(self, norm: Norm, head: Product, job: Job) -> tuple[Float32, Float32]:
        """Final norm and head of a tile's last token, or of all its tokens: (token, width) each.

        Where all are asked for, row after row passes through the one row of logits that the memory
        has room for, and leaves for the host.
        """
        tile, width = norm.source.rows, head.target.columns
        hidden = self._allocate("hidden", self.layout.rows(tile), norm.source.columns, job.cycle)
        region_vector.norm(
            self.arena.bytes, self.layout.grid, job.stream, hidden, self._weights[norm.weight], 1,
            norm.width, self.model.norm_epsilon,
        )  # fmt: skip
        one = self._allocate("logits", self.layout.rows(1), width, job.cycle)
        self.area.allocate("working buffers", self._partial_sums(width), job.cycle)
        rows = np.arange(tile - 1 if head.last_row else 0, tile)
        logits = self._row_vectors(hidden, rows, self._weights[head.weight], no_matrix())
        for row in logits:
            self.write(one, row[np.newaxis])
            row[:] = self.read(one)[0]
        values = self.read(hidden)[rows]
        for name in ("working buffers", "logits", "hidden"):
            self.area.free(name)
        return values, logits

    # -- experts --------------------------------------------------------------------------------
    def _route(self, operation: Route, job: Job) -> None:
        """Choose experts; the choices (experts, then weights) go to the cores that dispatch rows."""
        moe = self.model.moe
        assert moe is not None
        scores = self.read(self._tensors[operation.source])
        chosen = np.empty((len(scores), moe.experts_per_token), np.int64)
        shares = np.empty(chosen.shape, np.float32)
        if moe.scoring == "softmax":
            choose_by_softmax(chosen, shares, scores, moe.norm_topk_prob)
        else:
            correction = self.read(self._weight("mlp.gate.e_score_correction_bias", job))[0]
            choose_by_group(
                chosen, shares, scores, correction, moe.n_group, moe.topk_group,
                moe.norm_topk_prob, moe.routed_scaling_factor,
            )  # fmt: skip
        target = self._tensors[operation.target]
        self.write(target, np.concatenate([chosen.astype(np.float32), shares], axis=1))
        kept = self.read(target)
        self._routes = (
            kept[:, : moe.experts_per_token].astype(np.int64),
            np.ascontiguousarray(kept[:, moe.experts_per_token :]),
        )
        counts = np.bincount(chosen.ravel(), minlength=moe.experts)
        self.expert_tokens[job.layer] = self.expert_tokens.get(job.layer, 0) + counts

    def _experts(self, operation: Experts, job: Job, work: Int64) -> None:
        """One expert after another; rows travel from their token's place and back."""
        chosen, weights = self._routes
        source, target = self._tensors[operation.source], self._tensors[operation.target]
        if operation.combine:
            self.write(target, np.zeros((target.line.size, int(target.bounds[-1])), np.float32))
        tokens, shares = np.empty(len(chosen), np.int64), np.empty(len(chosen), np.float32)
        for expert in range(operation.experts):
            count = expert_rows(tokens, shares, chosen, weights, expert)
            if count == 0:
                continue
            rows = tokens[:count].copy()
            choice = np.argmax(chosen[rows] == expert, axis=1)
            pairs = rows * operation.experts_per_token + choice
            weight = self._weight(operation.weight.format(expert=expert), job)
            if operation.combine:
                self._multiply(
                    operation, source, pairs, weight, target, rows, no_matrix(),
                    shares[:count].copy(), work,
                )  # fmt: skip
            else:
                self._multiply(
                    operation, source, rows, weight, target, pairs, no_matrix(),
                    np.zeros(0, np.float32), work,
                )  # fmt: skip

    # -- attention ------------------------------------------------------------------------------
    def _append(self, operation: Append, job: Job) -> None:
        """Write the tile's keys and values to where their KV lives, home and hosts."""
        cache = job.kv.layer(job.layer, job.kept)
        first = operation.first_position
        end = first + operation.sources[0].rows
        for part in job.parts:
            low, high = max(part.first, first), min(part.first + part.tokens, end)
            if low < high:
                self.write_kv(operation, cache, part.host, low, high)

    def write_kv(self, operation: Append, cache: Cache, host: int, low: int, high: int) -> None:
        """Write keys and values of tokens ``low`` to ``high - 1`` to the cores of one host."""
        vector, first = 0, operation.first_position
        for source in operation.sources:
            matrix = self._tensors[source]
            append(self.arena.bytes, self.layout.grid, matrix, first, cache, low, high, vector)
            vector += source.columns // cache.width

    def _attend(self, operation: Attention, job: Job, work: Int64) -> None:
        """Query blocks one after another: keys in front of the block, then its own."""
        tiling, cost = self.clock.tiling(operation), self.clock.attention_cost(operation)
        mla = self.model.mla
        heads = Heads(
            operation.heads, operation.heads // operation.kv_heads, tiling.units, tiling.splits,
            operation.key_width, operation.value_width, 0 if mla is None else mla.kv_lora_rank,
            tiling.key_tile, tiling.query_tile, int(self.kind), self.model.softmax_scale,
            operation.window or 0, work,
        )  # fmt: skip
        expand = no_matrix() if operation.expand is None else self._weight(operation.expand, job)
        cache, arena, grid = job.kv.layer(job.layer, job.kept), self.arena.bytes, self.layout.grid
        for size, before in tiling.query_blocks(cost.rows, operation.chunk):
            block = Block(before, size, operation.prefix + before)
            gather(arena, grid, self._tensors[operation.query], heads, block)
            seen = block.position
            if operation.window is not None:
                seen = min(seen, operation.window - 1)
            passes = _earlier_keys(cost, block.position, seen) + _own_keys(cost, block)
            for first, count in passes:
                faults = np.zeros((self.layout.region.columns, 4), np.int64)
                share_out(
                    ring_pass, self.layout.region.columns,
                    int(count.sum()) * size * operation.heads * operation.key_width,
                    arena, grid, cache, heads, block, first, count, expand, job.cycle, faults,
                )  # fmt: skip
                refuse_fault(self.arena, faults, job.request, job.layer, job.cycle)
            finish(arena, grid, self._tensors[operation.target], heads, block)


def _earlier_keys(cost: AttentionCost, position: int, seen: int) -> list[tuple[Int64, Int64]]:
    """Passes over the ``seen`` keys in front of a block: first key and keys (row, split) of each.

    Splits hold consecutive keys; a pass deals whole granules evenly to the rows.
    """
    result = []
    full = cost.rows * cost.key_tile
    for turn in range(-(-attention_kernel.part(seen, cost.splits, 0) // full)):
        first = np.zeros((cost.rows, cost.splits), np.int64)
        count = np.zeros_like(first)
        start = position - seen
        for split in range(cost.splits):
            own = attention_kernel.part(seen, cost.splits, split)
            key, left = start + turn * full, min(full, max(0, own - turn * full))
            granules = -(-left // cost.key_granule)
            for row in range(cost.rows):
                first[row, split] = key
                count[row, split] = min(
                    left, attention_kernel.part(granules, cost.rows, row) * cost.key_granule
                )
                key += count[row, split]
                left -= count[row, split]
            start += own
        result.append((first, count))
    return result


@lru_cache(maxsize=1024)
def _own_tile(cost: AttentionCost, tokens: int) -> int:
    """Keys of a tile that the clock cuts a block's own keys into."""
    return int(attention_kernel.own_tile(cost, tokens)[0])


def _own_keys(cost: AttentionCost, block: Block) -> list[tuple[Int64, Int64]]:
    """Passes over a block's own keys: tile b goes to split b mod s, row (b div s) mod R."""
    size = _own_tile(cost, block.tokens)
    passes = -(-block.tokens // (cost.rows * cost.splits * size))
    tile = np.arange(passes * cost.rows * cost.splits).reshape(passes, cost.rows, cost.splits)
    first = block.position + tile * size
    count = np.clip(block.position + block.tokens - first, 0, size)
    return list(zip(first, count, strict=True))
