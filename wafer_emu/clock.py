"""The first interpreter: a tile program's operations become cycles on a region of cores.

Equal shapes cost the same, so every cost is memoised by shape. Attention is a sum of memoised
passes over key tiles, so that a table t(chunk, prefix) for the policies costs seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wafer_emu.block_attention import BlockAttention
from wafer_emu.links import LinkRate, in_shares_of_a_byte, slowest_link
from wafer_emu.model import Model, dtype_bytes
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
    Product,
    Rotary,
    Route,
    Task,
    attention_operation,
    layer_operations,
    lower,
)
from wafer_emu.ring_attention import OwnBounds, OwnCycles, RingAttention
from wafer_emu.routing import Routing
from wafer_emu.tiling import FLOAT_BYTES, AttentionTiling, core_cost
from wafer_emu.wafer import Wafer
from wafer_kernels import entries, mesh
from wafer_kernels.attention import AttentionCost
from wafer_kernels.collective import TWO_PHASE_REDUCE, allreduce_cycles
from wafer_kernels.gemm import gemm
from wafer_kernels.mesh import part_size
from wafer_kernels.systolic import CoreCost, tile_cycles, vector_cycles

if TYPE_CHECKING:
    from wafer_emu.stage_load import Load, Resting

__all__ = ["NORM_OPERATIONS", "Clock", "Tiers"]

Int64 = npt.NDArray[np.int64]

# Vector instructions per element (assumed): square and add, scale, weight; rotate and blend;
# activation with its exponential and division, then the product with the up projection.
NORM_OPERATIONS = 3
ROTARY_OPERATIONS = 3
GATE_OPERATIONS = 7
ROUTE_OPERATIONS = 4


def vector_shape(operation: Operation) -> tuple[int, int, int]:
    """(rows, columns, vector instructions per element) of an element-wise operation."""
    match operation:
        case Norm(source=tensor):
            return tensor.rows, operation.width * operation.groups, NORM_OPERATIONS
        case Rotary(target=tensor):
            return tensor.rows, tensor.columns, ROTARY_OPERATIONS
        case Gate(target=tensor):
            return tensor.rows, tensor.columns, GATE_OPERATIONS
        case Route(source=tensor):
            return tensor.rows, tensor.columns, ROUTE_OPERATIONS
        case Add(target=tensor):
            return tensor.rows, tensor.columns, 1
    raise TypeError(f"not element-wise: {operation}")


def alike(pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Int64]]:
    """Pieces (size, tokens before) by size: (size, all tokens before) of each."""
    before: dict[int, list[int]] = {}
    for size, tokens in pieces:
        before.setdefault(size, []).append(tokens)
    for size, tokens_before in before.items():
        yield size, np.array(tokens_before, np.int64)


@dataclass(frozen=True)
class Tiers:
    """Which memory holds a stage's weights, KV and waiting activations: ``sram`` or ``dram``.

    Activations wait in the hand-off buffer and in the residual stream beyond the tile in work.
    """

    weights: str = "sram"
    kv: str = "sram"
    activations: str = "sram"

    @property
    def in_die_memory(self) -> bool:
        """Whether anything lives in die memory."""
        return "dram" in (self.weights, self.kv, self.activations)


@dataclass(eq=False)
class Clock:
    """Cycles of the operations of one model on one region shape.

    ``attention_bytes`` is what a core may spend on attention's working set. ``own_cycles``,
    ``own_bounds``, the ``loads`` of stages, what is ``resting`` there and the memo may be shared by
    clocks that differ in it alone.
    """

    wafer: Wafer
    model: Model
    region: Region
    tiers: Tiers
    attention_bytes: int
    weights_dtype: str
    kv_dtype: str
    own_cycles: OwnCycles = field(default_factory=dict, repr=False)
    own_bounds: OwnBounds = field(default_factory=dict, repr=False)
    loads: dict[tuple[object, ...], Load] = field(default_factory=dict, repr=False)
    resting: dict[tuple[object, ...], Resting] = field(default_factory=dict, repr=False)
    _memo: dict[tuple[object, ...], int] = field(default_factory=dict, repr=False)

    @cached_property
    def grid(self) -> mesh.GridCost:
        """The region in bytes, for counts; :attr:`timing_grid` is what kernels time."""
        return mesh.GridCost(
            self.region.rows,
            self.region.columns,
            core_cost(self.wafer),
            dtype_bytes(self.model.dtype),
            self.wafer.core.step_cycles,
            self.wafer.link.bytes_per_cycle,
            self.slowest_link.hop_cycles,
            self.wafer.link.ramp_cycles,
            0,
        )

    @cached_property
    def timing_grid(self) -> mesh.GridCost:
        """The region as the mesh kernels see it: every link is as slow as the slowest."""
        return in_shares_of_a_byte(self.grid, self.slowest_link)

    @cached_property
    def _flat_grid(self) -> tuple[Any, ...]:
        return entries.plain(self.timing_grid)

    @cached_property
    def slowest_link(self) -> LinkRate:
        """The slowest link inside the region."""
        return slowest_link(self.wafer, self.region)

    @cached_property
    def dram_bytes_per_cycle(self) -> float:
        """Bandwidth of the die memories under the region."""
        assert self.wafer.dram is not None
        down, across = self.region.dies(self.wafer)
        return down * across * self.wafer.dram.bytes_per_second / self.wafer.core.clock_hz

    def dram_cycles(self, streamed_bytes: int) -> int:
        """Cycles to stream bytes from the die memories under the region."""
        return math.ceil(streamed_bytes / self.dram_bytes_per_cycle)

    def operation(self, operation: Operation) -> int:
        """Cycles from the start of an operation to the end of its slowest core."""
        match operation:
            case Attention():
                return self.attention(operation)
            case Product():
                m, n, k = operation.shape
                return self.remember(("product", m, k, n), self.product, m, k, n)
            case Experts():
                return self.experts(operation)
            case Norm():
                return self.norm(operation)
            case Rotary() | Gate() | Route() | Add():
                return self.vector(*vector_shape(operation))
            case Append():
                return self.append(operation)
            case Lookup(target=tensor):
                moved = tensor.rows * tensor.columns * self.grid.element_bytes
                arriving = self.slowest_link.transfer_cycles(moved, self.region.columns)
                return arriving + self.region.rows * self.grid.hop_cycles
            case Embed():
                return 0  # the host's link carries it: the engine delays the input
        raise TypeError(f"no cost for {operation}")

    def remember(
        self, key: tuple[object, ...], function: Callable[..., int], *arguments: object
    ) -> int:
        """What a function says, asked once: the memo is shared where clocks are."""
        if key not in self._memo:
            self._memo[key] = function(*arguments)
        return self._memo[key]

    # -- products -------------------------------------------------------------------------------
    def product(self, m: int, k: int, n: int) -> int:
        """Cycles of an m x k by k x n product, with resident weights k x n.

        The faster of a compute-shift product and, for few rows, of m products of a row vector with
        weights that stay (each core multiplies its block, columns of cores add up the parts).
        Weights in die memory are streamed behind the computation (roofline, double buffers).
        """
        stays = self.weights_stay(m, k, n)
        cycles = m * self.row_vector(k, n) if stays else self.compute_shift(m, k, n)
        if self.tiers.weights == "dram":
            cycles = max(cycles, self.dram_cycles(k * n * dtype_bytes(self.weights_dtype)))
        return cycles

    def weights_stay(self, m: int, k: int, n: int) -> bool:
        """Whether m row-vector products are faster than a compute-shift product."""
        vectors = m * self.row_vector(k, n)
        fewest = max(self.region.rows, self.region.columns) * self.wafer.core.step_cycles
        return vectors < fewest or vectors < self.compute_shift(m, k, n)

    def compute_shift(self, m: int, k: int, n: int) -> int:
        """Cycles of a compute-shift product."""
        key = ("shift", m, k, n)
        if key not in self._memo:
            cycles = entries.compute_shift_cycles(self._flat_grid, m, k, n)
            self._memo[key] = cycles if cycles >= 0 else gemm(self.timing_grid, m, k, n).cycles
        return self._memo[key]

    def row_vector(self, k: int, n: int) -> int:
        """Cycles of a row vector times weights that stay."""
        rows, columns = self.region.rows, self.region.columns
        height, width = part_size(k, rows, 0), part_size(n, columns, 0)
        block = tile_cycles(self.row_vector_core, 1, height, width, self.grid.element_bytes)
        return block + self.grid.step_cycles + self.reduce(rows, width * FLOAT_BYTES)

    @property
    def row_vector_core(self) -> CoreCost:
        """The core as it multiplies a row vector: its own vectors lie along n."""
        return self.grid.core._replace(vector_axis=1)

    def reduce(self, cores: int, payload_bytes: int) -> int:
        """Cycles to add up a payload over a line of cores and send the sum back to all of them."""
        if cores == 1:
            return 0
        link = self.slowest_link
        wavelets = link.transfer_cycles(payload_bytes)
        ramp = self.wafer.link.ramp_cycles
        return int(allreduce_cycles(TWO_PHASE_REDUCE, cores, wavelets, ramp, link.hop_cycles))

    def experts(self, operation: Experts) -> int:
        """Cycles of one expert after another on the tokens routed to it, and of moving the rows.

        Rows travel to the expert's layout and back; half of them cross the middle of the region.
        """
        n, k = operation.target.columns, operation.source.columns
        total = 0
        for rows, times in self.expert_rows(operation):
            total += times * self.remember(("product", rows, k, n), self.product, rows, k, n)
        moved = operation.choices * (n if operation.combine else k) * self.grid.element_bytes
        across = self.slowest_link.transfer_cycles(moved, 2 * self.region.columns)
        across += self.region.rows * self.slowest_link.hop_cycles
        return total + across if self.region.rows > 1 else total

    def expert_rows(self, operation: Experts) -> Iterator[tuple[int, int]]:
        """(rows, number of experts) pairs: as the tokens are routed, or even shares."""
        loads = operation.loads
        if loads is None:
            share, more = divmod(operation.choices, operation.experts)
            loads = (share + 1,) * more + (share,) * (operation.experts - more)
        for rows, times in sorted(Counter(loads).items(), reverse=True):
            if rows:
                yield rows, times

    # -- vectors --------------------------------------------------------------------------------
    def vector(self, rows: int, columns: int, operations: int) -> int:
        """Cycles of element-wise operations on the core with the largest part of a tensor."""
        core = self.wafer.core
        elements = part_size(rows, self.region.rows, 0) * part_size(columns, self.region.columns, 0)
        return int(
            vector_cycles(core.vector_lanes, core.vector_issue_millicycles, elements, operations)
        )

    def norm(self, operation: Norm) -> int:
        """Cycles of a norm: squares, a sum along each row of cores (or of a head's), scaling."""
        payload = part_size(operation.source.rows, self.region.rows, 0) * FLOAT_BYTES
        summed = self.reduce(self.norm_cores(operation), payload)
        return self.vector(*vector_shape(operation)) + summed

    def norm_cores(self, operation: Norm) -> int:
        """Cores of a row that share the sum of one group."""
        return max(1, self.region.columns // operation.groups)

    def append(self, operation: Append) -> int:
        """Cycles to write the chunk's KV of one layer into the cores' memory, evenly spread."""
        width = operation.elements_per_token * dtype_bytes(self.kv_dtype)
        rows = operation.sources[0].rows
        if self.tiers.kv == "dram":
            return self.dram_cycles(rows * width)
        written = -(-rows * width // self.region.cores)
        return -(-written // self.wafer.core.sram_write_bytes_per_cycle)

    # -- attention ------------------------------------------------------------------------------
    def ring_attention(self, operation: Attention) -> RingAttention:
        """An attention by travelling key tiles, which remembers what it knows of its kind."""
        shape = (operation.heads, operation.kv_heads, operation.key_width, operation.value_width)
        key = (*shape, operation.window, operation.causal_skip)
        if key not in self._ring_attentions:
            self._ring_attentions[key] = RingAttention(self, operation)
        return self._ring_attentions[key]

    @cached_property
    def _ring_attentions(self) -> dict[tuple[object, ...], RingAttention]:
        return {}

    def tiling(self, operation: Attention) -> AttentionTiling:
        """How the region shares out an attention."""
        return self.ring_attention(operation).tiling(operation)

    def attention_cost(self, operation: Attention) -> AttentionCost:
        """Parameters of the attention kernels in bytes, for counts, whatever the slowest link."""
        ring = self.ring_attention(operation)
        return ring.cost(ring.tiling(operation))

    def attention(self, operation: Attention) -> int:
        """Cycles of one attention; see :meth:`attentions`."""
        return int(self.attentions(operation, np.array([operation.prefix]))[0])

    def attentions(self, operation: Attention, prefixes: Int64) -> Int64:
        """Cycles of an attention after many prefixes (P,) instead of its own.

        MLA first expands all latents so far into keys and values (a product with p + c rows). KV in
        die memory is streamed behind the computation.
        """
        chunk = operation.chunk
        if self.wafer.attention == "ring":
            total = self.ring_attention(operation).cycles(operation, prefixes)
        else:
            total = self._blocks(operation, prefixes)
        if operation.expand is not None:
            _, k, n = self.expansion_shape(operation)
            expanded = [self.product(int(prefix) + chunk, k, n) for prefix in prefixes]
            total = total + np.array(expanded, np.int64)
        return total

    def block_attention(self, operation: Attention) -> BlockAttention:
        """An attention as products, which remembers its blocks."""
        shape = (operation.heads, operation.kv_heads, operation.key_width, operation.value_width)
        key = (*shape, operation.chunk)
        if key not in self._block_attentions:
            self._block_attentions[key] = BlockAttention(self, operation)
        return self._block_attentions[key]

    @cached_property
    def _block_attentions(self) -> dict[tuple[int, ...], BlockAttention]:
        return {}

    def _blocks(self, operation: Attention, prefixes: Int64) -> Int64:
        """Matrix products, key block after key block."""
        earlier = self.earlier_keys(operation, prefixes, operation.chunk, 0)
        cycles = self.block_attention(operation).cycles(earlier)
        return self._behind_streams(operation, cycles, operation.chunk, earlier)

    def _behind_streams(
        self, operation: Attention, cycles: Int64, queries: int, earlier: Int64
    ) -> Int64:
        """Cycles of computation (P,), or of its KV's way from die memory if that is longer."""
        if self.tiers.kv == "sram":
            return cycles
        streamed = [self.dram_cycles(self.kv_bytes(operation, queries + int(e))) for e in earlier]
        return np.maximum(cycles, streamed)

    def expansion_shape(self, operation: Attention) -> tuple[int, int, int]:
        """(m, k, n) of the product that turns all latents so far into keys and values."""
        mla = self.model.mla
        assert mla is not None
        width = operation.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return operation.prefix + operation.chunk, mla.kv_lora_rank, width

    def earlier_keys(
        self, operation: Attention, prefixes: Int64, block: int | Int64, before: int | Int64
    ) -> Int64:
        """Keys besides its own that a query block meets, after ``before`` tokens of the chunk.

        Those in front of it that a window shows; all keys where the masked half is charged too.
        Arrays broadcast.
        """
        window = operation.window
        seen = prefixes + before if operation.causal_skip else prefixes
        if window is not None:
            seen = np.minimum(seen, np.int64(window - 1))
        return seen if operation.causal_skip else seen + operation.chunk - block

    def kv_bytes(self, operation: Attention, keys: int) -> int:
        """Bytes of the KV of so many tokens in the operation's layer."""
        return keys * self.model.kv_elements_per_token(operation.layer) * dtype_bytes(self.kv_dtype)

    # -- layers and tasks -----------------------------------------------------------------------
    def layer_kind(self, layer: int) -> tuple[object, ...]:
        """What distinguishes a model's layers, routed loads aside: dense or not, the window."""
        moe = self.model.moe
        return moe is None or moe.is_dense(layer), self.model.windows[layer]

    def layer(self, layer: int, chunk: int, prefix: int, causal_skip: bool = True) -> int:
        """Cycles of one transformer layer on ``chunk`` tokens after ``prefix``."""
        kind = self.layer_kind(layer)
        key = ("layer", kind, chunk, prefix, causal_skip, self.attention_bytes)
        if key not in self._memo:
            self._memo[key] = int(self.layers(layer, chunk, np.array([prefix]), causal_skip)[0])
        return self._memo[key]

    def layer_attention(self, layer: int, chunk: int, causal_skip: bool) -> Attention:
        """The attention of a layer on a chunk that nothing precedes."""
        key = layer, chunk, causal_skip
        if key not in self._layer_attentions:
            self._layer_attentions[key] = attention_operation(
                self.model, layer, chunk, 0, causal_skip
            )
        return self._layer_attentions[key]

    @cached_property
    def _layer_attentions(self) -> dict[tuple[int, int, bool], Attention]:
        return {}

    def layers(
        self,
        layer: int,
        chunk: int,
        prefixes: Int64,
        causal_skip: bool = True,
        routing: Routing | None = None,
    ) -> Int64:
        """Cycles of one transformer layer on ``chunk`` tokens after many prefixes (P,).

        Experts get the tokens that a ``routing`` says, or their even shares.
        """
        changing = Attention if routing is None else Attention | Experts
        fixed = ("fixed", self.layer_kind(layer), chunk, causal_skip, changing)
        if fixed not in self._memo:
            self._memo[fixed] = sum(
                self.operation(each)
                for each in layer_operations(self.model, layer, chunk, 0, causal_skip)
                if not isinstance(each, changing)
            )
        attention = self.layer_attention(layer, chunk, causal_skip)
        total = self.attentions(attention, prefixes) + self._memo[fixed]
        if routing is not None:
            total += [self._routed(layer, chunk, int(each), routing) for each in prefixes]
        return total

    def _routed(self, layer: int, chunk: int, prefix: int, routing: Routing) -> int:
        """Cycles of a layer's experts on the tokens that a routing gives them."""
        operations = layer_operations(self.model, layer, chunk, prefix, routing=routing)
        return sum(self.experts(each) for each in operations if isinstance(each, Experts))

    def epilogue(self, chunk: int) -> int:
        """Cycles of what follows the layers of a request's last chunk: final norm and head."""
        program = lower(self.model, Task(0, 0, chunk, 0, last_chunk=True))
        return sum(self.operation(each) for each in program.epilogue)
