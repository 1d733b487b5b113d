"""What passes between a region and its die memories: the residual stream beside weights and KV.

A chunk that is longer than the tile in work waits in die memory, if the plan keeps activations
there: each layer reads every tile of its residual stream once and writes it once, while it
computes.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from wafer_emu.clock import Clock
from wafer_emu.model import dtype_bytes
from wafer_emu.program import (
    Append,
    Attention,
    Experts,
    Operation,
    Product,
    layer_operations,
)
from wafer_emu.routing import Routing

__all__ = ["arrival_cycles", "layer_dram_bytes", "passing_layers", "stream_bytes"]

Int64 = npt.NDArray[np.int64]


def stream_bytes(clock: Clock, tokens: int) -> int:
    """Bytes of the residual stream of so many tokens."""
    return tokens * clock.model.hidden_size * dtype_bytes(clock.model.dtype)


def arrival_cycles(clock: Clock, tokens: int) -> int:
    """Cycles until the first tile of a chunk has come from die memory: nothing hides them."""
    assert clock.wafer.dram is not None
    waited = math.ceil(clock.wafer.dram.latency_seconds * clock.wafer.core.clock_hz)
    return waited + clock.dram_cycles(stream_bytes(clock, tokens))


def passing_layers(
    clock: Clock,
    layer: int,
    tile: int,
    prefixes: Int64,
    causal_skip: bool = True,
    routing: Routing | None = None,
) -> Int64:
    """:meth:`Clock.layers` (P,) on one tile of a residual stream that passes through die memory.

    The last tile leaves and the next one comes, through a second buffer, in whatever time the die
    memories have left beside weights and KV (roofline over the whole layer).
    """
    cycles = clock.layers(layer, tile, prefixes, causal_skip, routing)
    moved = layer_dram_bytes(clock, layer, tile, prefixes, causal_skip, routing)
    moved += 2 * stream_bytes(clock, tile)
    streamed = np.ceil(moved / clock.dram_bytes_per_cycle).astype(np.int64)
    return np.maximum(cycles, streamed)


def layer_dram_bytes(
    clock: Clock,
    layer: int,
    tile: int,
    prefixes: Int64,
    causal_skip: bool = True,
    routing: Routing | None = None,
) -> Int64:
    """Bytes (P,) of weights and KV that a layer moves from and to die memory, after prefixes.

    Weights of experts that a ``routing`` leaves idle stay where they are.
    """

    def fixed(prefix: int) -> int:
        operations = layer_operations(clock.model, layer, tile, prefix, causal_skip, routing)
        return sum(_fixed_bytes(clock, each) for each in operations)

    if routing is None:
        key = ("die memory", clock.layer_kind(layer), tile, causal_skip)
        moved = np.full(prefixes.shape, clock.remember(key, fixed, 0), np.int64)
    else:
        moved = np.array([fixed(int(prefix)) for prefix in prefixes], np.int64)
    if clock.tiers.kv == "dram":
        attention = clock.layer_attention(layer, tile, causal_skip)
        if clock.wafer.attention == "ring":
            met = clock.ring_attention(attention).keys_met(attention, prefixes)
        else:
            met = clock.earlier_keys(attention, prefixes, tile, 0) + tile
        moved += met * clock.kv_bytes(attention, 1)
    return moved


def _fixed_bytes(clock: Clock, operation: Operation) -> int:
    """Bytes of an operation besides old KV: weights that come, new KV that goes."""
    weight = dtype_bytes(clock.weights_dtype) if clock.tiers.weights == "dram" else 0
    match operation:
        case Product():
            _, n, k = operation.shape
            return k * n * weight
        case Experts():
            experts = sum(times for _, times in clock.expert_rows(operation))
            return experts * operation.source.columns * operation.target.columns * weight
        case Attention() if operation.expand is not None:
            _, k, n = clock.expansion_shape(operation)
            return k * n * weight
        case Append() if clock.tiers.kv == "dram":
            written = operation.sources[0].rows * operation.elements_per_token
            return written * dtype_bytes(clock.kv_dtype)
    return 0
