"""Exact counts of what a tile program does: multiply-accumulates and bytes moved, by class of tile.

Balanced dealing cuts a size into parts of at most two lengths, so that all tile products of an
operation fall into a few classes, each counted once and multiplied by how many cores and steps
meet it. No count uses the closed form of the operation it belongs to: that is what it is held
against.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_emu.block_attention import BlockAttention
from wafer_emu.busy import busy_map
from wafer_emu.clock import Clock, vector_shape
from wafer_emu.model import dtype_bytes
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
    layer_operations,
)
from wafer_emu.routing import Routing
from wafer_emu.tiling import FLOAT_BYTES
from wafer_kernels import attention, attention_count
from wafer_kernels.mesh import slice_starts
from wafer_kernels.systolic import CoreCost, padded_macs, sram_elements

__all__ = ["Counter", "Work", "busy_map", "counter_of", "operation_work"]

Parts = list[tuple[int, int]]  # (size, how many)
_Part = tuple[int, int, int | None, bool, bool, Routing | None]
KEPT_PLANES = 64  # of busy cycles: one of 375 x 248 cores takes 0.7 MB


class Work(NamedTuple):
    """What operations do, summed over all cores of a region.

    ``macs`` that the result needs, and ``padded_macs`` of the cells and lanes that they occupy, the
    idle ones included; ``sram_bytes`` read and written by tile products and vector instructions;
    ``hop_bytes``, bytes times the mesh hops that they cross, and ``die_hop_bytes``, the part of
    them that leaves a die; ``dram_bytes`` of die memory.
    """

    macs: int = 0
    padded_macs: int = 0
    sram_bytes: int = 0
    hop_bytes: int = 0
    die_hop_bytes: int = 0
    dram_bytes: int = 0

    def plus(self, other: Work) -> Work:
        """Both."""
        return Work(*(mine + its for mine, its in zip(self, other, strict=True)))

    def times(self, count: int) -> Work:
        """The same work ``count`` times."""
        return Work(*(count * each for each in self))


def _sum(works: Iterable[Work]) -> Work:
    total = Work()
    for work in works:
        total = total.plus(work)
    return total


def operation_work(clock: Clock, operation: Operation) -> Work:
    """Work of one operation on the clock's region.

    Hand-offs between regions and moves of KV blocks are flows of the engine, not work of an
    operation.
    """
    match operation:
        case Attention():
            return _attention_work(clock, operation)
        case Product():
            m, n, k = operation.shape
            return _product_work(clock, m, k, n)
        case Experts():
            return _experts_work(clock, operation)
        case Norm():
            groups, cores = operation.groups, clock.norm_cores(operation)
            payload = operation.source.rows * groups * FLOAT_BYTES
            return _vector_work(clock, operation).plus(_sum_along_row(clock, payload, cores))
        case Rotary() | Gate() | Route() | Add():
            return _vector_work(clock, operation)
        case Append():
            return _append_work(clock, operation)
        case Lookup(target=tensor):
            moved = tensor.rows * tensor.columns * clock.grid.element_bytes
            return Work(sram_bytes=2 * moved).plus(_scattered(clock, moved))
        case Embed():
            return Work()
    raise TypeError(f"no count for {operation}")


# -- bytes on the mesh -----------------------------------------------------------------------------
def _around(moved: int, places: int, length: int, dies: int) -> Work:
    """Bytes times turns on a folded ring of ``length`` cores; ``places`` turns are a round.

    A round crosses 2 (L - 1) hops, of which 2 (d - 1) lie between the d dies.
    """
    return Work(
        hop_bytes=moved * 2 * (length - 1) // places,
        die_hop_bytes=moved * 2 * (dies - 1) // places,
    )


def _along(byte_hops: int, length: int, dies: int) -> Work:
    """Bytes times hops, spread evenly over the links of lines of ``length`` cores."""
    crossing = byte_hops * (dies - 1) // (length - 1) if length > 1 else 0
    return Work(hop_bytes=byte_hops, die_hop_bytes=crossing)


def _summing_hops(cores: int) -> int:
    """Hops of a payload that a line of cores adds up in two phases and gets back as a sum.

    Chains in groups of about sqrt(P), a chain of their leaders (Luczynski et al., arXiv
    2404.15888), then a broadcast.
    """
    group = math.isqrt(cores - 1) + 1
    groups = -(-cores // group)
    return (cores - groups) + group * (groups - 1) + (cores - 1)


def _sum_along_row(clock: Clock, payload_bytes: int, cores: int) -> Work:
    """Sums over lines of ``cores`` that lie in rows of the region."""
    byte_hops = payload_bytes * _summing_hops(cores)
    return _along(byte_hops, clock.region.columns, clock.region.dies(clock.wafer)[1])


def _scattered(clock: Clock, moved_bytes: int) -> Work:
    """Rows of a matrix that go from any row of cores to any: (R^2 - 1) / 3R hops on average."""
    rows = clock.region.rows
    byte_hops = moved_bytes * (rows * rows - 1) // (3 * rows)
    return _along(byte_hops, rows, clock.region.dies(clock.wafer)[0])


# -- products --------------------------------------------------------------------------------------
def _parts(total: int, lines: int) -> Parts:
    """Balanced parts that are not empty."""
    size, larger = divmod(total, lines)
    parts = ((size + 1, larger), (size, lines - larger))
    return [(size, count) for size, count in parts if size and count]


def _tile_work(core: CoreCost, m: int, k: int, n: int, element_bytes: int) -> Work:
    reads, writes = sram_elements(core, m, k, n)
    return Work(m * k * n, padded_macs(core, m, k, n), (reads + writes) * element_bytes)


def _tiles(core: CoreCost, m_parts: Parts, k_parts: Parts, n_parts: Parts, element: int) -> Work:
    return _sum(
        _tile_work(core, m, k, n, element).times(rows * slices * columns)
        for (m, rows), (k, slices), (n, columns) in product(m_parts, k_parts, n_parts)
    )


def _product_work(clock: Clock, m: int, k: int, n: int) -> Work:
    form = _row_vector_work if clock.weights_stay(m, k, n) else _compute_shift_work
    streamed = k * n * dtype_bytes(clock.weights_dtype) if clock.tiers.weights == "dram" else 0
    return form(clock, m, k, n).plus(Work(dram_bytes=streamed))


def _row_vector_work(clock: Clock, m: int, k: int, n: int) -> Work:
    """Each core multiplies its block; columns of cores add up the parts and get the sum back."""
    rows, columns = clock.region.rows, clock.region.columns
    tiles = _tiles(
        clock.row_vector_core,
        [(1, 1)],
        _parts(k, rows),
        _parts(n, columns),
        clock.grid.element_bytes,
    )
    byte_hops = n * FLOAT_BYTES * _summing_hops(rows)
    return tiles.plus(_along(byte_hops, rows, clock.region.dies(clock.wafer)[0])).times(m)


def _compute_shift_work(clock: Clock, m: int, k: int, n: int) -> Work:
    """Slices of both operands go once around and end where they began; A is skewed before.

    The skew turns row i by floor(i S / R) of the S slices, the shorter way.
    """
    rows, columns = clock.region.rows, clock.region.columns
    down, across = clock.region.dies(clock.wafer)
    slices, element = max(rows, columns), clock.grid.element_bytes
    tiles = _tiles(clock.grid.core, _parts(m, rows), _parts(k, slices), _parts(n, columns), element)
    turns = slice_starts(slices, rows)
    heights = m // rows + (np.arange(rows) < m % rows)
    skew = int(heights @ np.minimum(turns, slices - turns))
    around_row = _around((m * slices + skew) * k * element, slices, columns, across)
    around_column = _around(n * slices * k * element, slices, rows, down)
    return tiles.plus(around_row).plus(around_column)


def _experts_work(clock: Clock, operation: Experts) -> Work:
    """Products of all experts; rows travel to their expert's layout, or back from it."""
    n, k = operation.target.columns, operation.source.columns
    products = _sum(
        _product_work(clock, rows, k, n).times(times)
        for rows, times in clock.expert_rows(operation)
    )
    width = n if operation.combine else k
    moved = operation.choices * width * clock.grid.element_bytes
    return products.plus(_scattered(clock, moved))


# -- vectors and KV --------------------------------------------------------------------------------
def _vector_work(clock: Clock, operation: Operation) -> Work:
    """Every vector instruction reads and writes its elements once (assumed)."""
    rows, columns, instructions = vector_shape(operation)
    return Work(sram_bytes=2 * instructions * rows * columns * clock.grid.element_bytes)


def _append_work(clock: Clock, operation: Append) -> Work:
    elements = operation.sources[0].rows * operation.elements_per_token
    read, written = elements * clock.grid.element_bytes, elements * dtype_bytes(clock.kv_dtype)
    if clock.tiers.kv == "dram":
        return Work(sram_bytes=read, dram_bytes=written)
    return Work(sram_bytes=read + written)


# -- attention -------------------------------------------------------------------------------------
def _attention_work(clock: Clock, operation: Attention) -> Work:
    """Steps of all query blocks, key tiles around the rows, queries gathered, splits merged.

    The splits of a head lie on neighbouring columns: its queries go from each to all of them, and
    partial results, with a maximum and a sum each, are added up along them.
    """
    if clock.wafer.attention == "products":
        return _block_attention_work(clock, operation)
    cost, chunk = clock.attention_cost(operation), operation.chunk
    blocks = clock.tiling(operation).query_blocks(clock.region.rows, chunk)
    prefix = np.array(operation.prefix)
    work = _sum(
        _block_work(
            clock, operation, cost, size, int(clock.earlier_keys(operation, prefix, size, before))
        )
        for size, before in blocks
    )
    if operation.expand is not None:
        work = work.plus(_product_work(clock, *clock.expansion_shape(operation)))
    rows, spanned = chunk * operation.heads, -(-cost.splits // cost.units)
    gathered = rows * operation.key_width * clock.grid.element_bytes * (spanned - 1)
    merged = rows * (operation.value_width + 2) * FLOAT_BYTES
    columns, across = clock.region.columns, clock.region.dies(clock.wafer)[1]
    work = work.plus(_along(gathered, columns, across))
    return work.plus(_sum_along_row(clock, merged, spanned))


def _block_work(
    clock: Clock, operation: Attention, cost: attention.AttentionCost, block: int, earlier: int
) -> Work:
    """Work of one query block: every head does the same steps, over all its key splits."""
    element, width = clock.grid.element_bytes, operation.key_width + operation.value_width
    tiles = attention_count.key_tiles(cost, block, earlier)
    steps: defaultdict[tuple[int, int], int] = defaultdict(int)
    for queries, keys, times in attention_count.block_steps(cost, block, tiles).tolist():
        steps[queries, keys] += times
    of_a_head = _sum(_step_work(cost, *shape).times(times) for shape, times in steps.items())
    pairs = attention_count.block_pairs(cost, block, tiles)
    shifted = int(tiles[:, 1].sum()) * operation.heads * width * element * (cost.rows - 1)
    work = of_a_head.times(operation.heads)._replace(macs=pairs * operation.heads * width)
    work = work.plus(_around(shifted, cost.rows, cost.rows, clock.region.dies(clock.wafer)[0]))
    if clock.tiers.kv == "dram":
        work = work.plus(Work(dram_bytes=clock.kv_bytes(operation, earlier + block)))
    return work


def _step_work(cost: attention.AttentionCost, queries: int, keys: int) -> Work:
    """Work of one ring step of one head; masked pairs of a tile are multiplied, but not useful."""
    element = cost.element_bytes
    softmax = queries * keys * attention.SCORE_OPERATIONS
    rescale = queries * cost.value_width * attention.RESCALE_OPERATIONS
    return _sum(
        (
            _tile_work(cost.core, queries, cost.key_width, keys, element),
            _tile_work(cost.core, queries, keys, cost.value_width, element),
            Work(sram_bytes=2 * (softmax + rescale) * FLOAT_BYTES),
        )
    )


def _block_attention_work(clock: Clock, operation: Attention) -> Work:
    """All key blocks as products of every head on its columns; keys spread to all that share them.

    Masked pairs are multiplied, but not useful.
    """
    blocks, chunk = clock.block_attention(operation), operation.chunk
    earlier = int(clock.earlier_keys(operation, np.array(operation.prefix), chunk, 0))
    work = _key_block_work(blocks, chunk)
    for keys, times in blocks.blocks(earlier):
        work = work.plus(_key_block_work(blocks, keys).times(times))
    width = operation.key_width + operation.value_width
    cost = clock.attention_cost(operation)
    pairs = attention_count.visible_pairs(cost, chunk, -earlier, chunk - 1)
    work = work.times(operation.heads)._replace(macs=pairs * operation.heads * width)
    if blocks.sharing_columns > blocks.width:
        spread = (earlier + chunk) * operation.kv_heads * width * clock.grid.element_bytes
        columns, across = clock.region.columns, clock.region.dies(clock.wafer)[1]
        work = work.plus(_along(spread * (blocks.sharing_columns - 1), columns, across))
    if operation.expand is not None:
        work = work.plus(_product_work(clock, *clock.expansion_shape(operation)))
    if clock.tiers.kv == "dram":
        work = work.plus(Work(dram_bytes=clock.kv_bytes(operation, earlier + chunk)))
    return work


@lru_cache(maxsize=KEPT_PLANES)
def _key_block_work(blocks: BlockAttention, keys: int) -> Work:
    """Work of one head on one block of keys: Q K^T with its sums, softmax, P V."""
    head, operation, width = blocks.head, blocks.operation, blocks.width
    chunk, element, rows = operation.chunk, head.grid.element_bytes, head.region.rows
    down, across = head.region.dies(head.wafer)
    scores = _tiles(
        head.grid.core,
        _parts(chunk, rows),
        _parts(operation.key_width, width),
        _parts(keys, blocks.slices),
        element,
    )
    softmax = chunk * keys * attention.SCORE_OPERATIONS
    rescale = chunk * operation.value_width * attention.RESCALE_OPERATIONS
    return _sum(
        (
            scores,
            _around(keys * operation.key_width * element, 1, rows, down),
            _along(chunk * keys * element * (width - 1), width, across),
            Work(sram_bytes=2 * (softmax + rescale) * FLOAT_BYTES),
            _sum_along_row(head, 2 * chunk * FLOAT_BYTES, width),
            _compute_shift_work(head, chunk, keys, operation.value_width),
        )
    )


class Counter:
    """Work and busy cycles of the layers on one clock's region, counted once for layers alike."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        layers = reversed(range(clock.model.layers))
        self._first = {clock.layer_kind(layer): layer for layer in layers}
        self._work = lru_cache(maxsize=None)(self._count_work)
        self._busy = lru_cache(maxsize=KEPT_PLANES)(self._count_busy)

    def layer_work(
        self,
        layer: int,
        chunk: int,
        prefix: int,
        causal_skip: bool = True,
        routing: Routing | None = None,
    ) -> Work:
        """Work of a layer on ``chunk`` tokens after ``prefix`` tokens."""
        fixed, changing = self._parts(layer, chunk, prefix, causal_skip, routing)
        return self._work(*fixed).plus(self._work(*changing))

    def layer_busy(
        self,
        layer: int,
        chunk: int,
        prefix: int,
        causal_skip: bool = True,
        routing: Routing | None = None,
    ) -> npt.NDArray[np.int64]:
        """Busy cycles of every core (rows, columns) of a layer, in physical places."""
        fixed, changing = self._parts(layer, chunk, prefix, causal_skip, routing)
        return self._busy(*fixed) + self._busy(*changing)

    def _parts(
        self, layer: int, chunk: int, prefix: int, causal_skip: bool, routing: Routing | None
    ) -> tuple[_Part, _Part]:
        """What of a layer knows no prefix, and what changes with it: alike layers share both.

        A routing makes the experts of every layer and prefix differ.
        """
        first = self._first[self._clock.layer_kind(layer)]
        alike = first if routing is None else layer
        skips = (causal_skip, routing is not None)
        return (first, chunk, None, *skips, None), (alike, chunk, prefix, *skips, routing)

    def _operations(
        self,
        layer: int,
        chunk: int,
        prefix: int | None,
        causal_skip: bool,
        routed: bool,
        routing: Routing | None,
    ) -> list[Operation]:
        """What changes with the prefix, or without one all else."""
        operations = layer_operations(
            self._clock.model, layer, chunk, prefix or 0, causal_skip, routing
        )
        changing = Attention | Experts if routed else Attention
        return [each for each in operations if isinstance(each, changing) == (prefix is not None)]

    def _count_work(self, *part: *_Part) -> Work:
        return _sum(operation_work(self._clock, each) for each in self._operations(*part))

    def _count_busy(self, *part: *_Part) -> npt.NDArray[np.int64]:
        return busy_map(self._clock, self._operations(*part))


@lru_cache(maxsize=64)
def counter_of(clock: Clock) -> Counter:
    """The counter of a clock, so that runs that share a clock count alike layers once."""
    return Counter(clock)
