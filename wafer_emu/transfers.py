"""What moves between the host, the stages and their KV hosts for every task, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wafer_emu.memory import kv_quanta_per_token, kv_quantum_bytes
from wafer_emu.model import Model, dtype_bytes
from wafer_emu.order import Order

__all__ = ["Transfers", "arrivals", "handoffs", "stage_transfers"]

Int64 = npt.NDArray[np.int64]
TOKEN_ID_BYTES = 4
PARTIAL_BYTES = 4


@dataclass(frozen=True)
class Transfers:
    """KV that one task moves: bytes written to and read from other stages, and their cost."""

    written_bytes: int = 0
    read_bytes: int = 0
    byte_hops: int = 0
    stall_cycles: int = 0


def stage_transfers(order: Order, stage: int, hosts: list[int], coming: Int64) -> list[Transfers]:
    """KV transfers of every task of a stage, one layer ahead of the computation.

    ``coming`` (host, task) tokens reach each host with a task, be they new or of earlier chunks.

    While a layer computes, the remote KV of the next layer is read and the layer's own share of
    what goes to hosts is written. What does not fit behind a layer's computation stalls the task;
    so does the first layer's read, which nothing hides. A policy that attends remotely sends
    queries and gets partial results instead, of every layer in turn: nothing hides them.
    """
    nothing = Transfers()
    if len(hosts) == 1:
        return [nothing] * order.tokens.size
    deployment = order.deployment
    layers = deployment.stages[stage].layers
    clock = deployment.clocks[stage]
    layer_bytes = kv_quanta_per_token(clock) * kv_quantum_bytes(clock)
    hops = deployment.placement.hops()[stage]
    attends = order.policy.attends_remotely()
    query_bytes, partial_bytes = _exchange_bytes_per_token(deployment.model)
    remote = np.zeros(len(hosts), np.int64)
    result = []
    for task in range(order.tokens.size):
        if order.chunk[task] == 0:
            remote[:] = 0
        read = write = read_bytes = byte_hops = 0
        for part in range(1, len(hosts)):
            to_read = int(remote[part]) * layer_bytes
            to_write = int(coming[part, task]) * layer_bytes
            if attends and to_read:
                asked = int(order.tokens[task]) * query_bytes
                read += deployment.transfer_cycles(asked, stage, hosts[part])
                to_read = int(order.tokens[task]) * partial_bytes
                read_bytes += asked
                byte_hops += asked * layers * hops[hosts[part]]
            read += deployment.transfer_cycles(to_read, hosts[part], stage)
            read_bytes += to_read
            write += deployment.transfer_cycles(to_write, stage, hosts[part])
            byte_hops += (to_read + to_write) * layers * hops[hosts[part]]
        cycles = int(order.compute[stage, task]) // layers
        if attends:
            stall = layers * (read + max(0, write - cycles))
        else:
            stall = read + (layers - 1) * max(0, read + write - cycles) + max(0, write - cycles)
        result.append(
            Transfers(
                written_bytes=int(coming[1:, task].sum()) * layer_bytes * layers,
                read_bytes=read_bytes * layers,
                byte_hops=byte_hops,
                stall_cycles=stall,
            )
            if read or write
            else nothing
        )
        remote += coming[: len(hosts), task]
    return result


def _exchange_bytes_per_token(model: Model) -> tuple[int, int]:
    """Bytes of a token's queries, and of what comes back: weighted values, maximum and sum a head.

    Latent attention exchanges absorbed queries and latents. Partial results are float32.
    """
    query, value = model.head_dim, model.head_dim
    if model.mla is not None:
        query, value = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim, model.mla.kv_lora_rank
    return model.heads * query * dtype_bytes(model.dtype), model.heads * (value + 2) * PARTIAL_BYTES


def handoffs(order: Order) -> Int64:
    """Cycles from the end of each task to its arrival at the next stage (stage, task).

    A request that streams by tiles hands its tiles on as the last layer ends with them, so that
    only the last one remains.
    """
    deployment = order.deployment
    width = deployment.model.hidden_size * dtype_bytes(deployment.model.dtype)
    tokens = order.tokens
    if order.policy.streams_tokens:
        tokens = np.minimum(tokens, deployment.tile_tokens)
    handoff = np.zeros(order.compute.shape, np.int64)
    for stage in range(order.compute.shape[0] - 1):
        for size in np.unique(tokens):
            cycles = deployment.transfer_cycles(int(size) * width, stage, stage + 1)
            handoff[stage, tokens == size] = cycles
    return handoff


def arrivals(order: Order) -> Int64:
    """Cycle at which each task's embedding rows (or token ids) have come from the host."""
    deployment = order.deployment
    off_wafer, clock_hz = deployment.wafer.off_wafer, deployment.wafer.core.clock_hz
    width = deployment.model.hidden_size * dtype_bytes(deployment.model.dtype)
    if deployment.options.embedding == "first-stage":
        width = TOKEN_ID_BYTES
    latency = math.ceil(off_wafer.latency_seconds * clock_hz) + deployment.wafer.request_cycles
    ready = np.zeros(order.tokens.size, np.int64)
    free = 0
    for task in range(order.tokens.size):
        arrived = order.requests[order.request[task]].arrival_cycle + latency
        first = int(order.tokens[task])
        if order.policy.streams_tokens:
            first = min(first, deployment.tile_tokens)
        begin = max(arrived, free)
        ready[task] = begin + -(-first * width * clock_hz // off_wafer.bytes_per_second)
        free = begin + -(-int(order.tokens[task]) * width * clock_hz // off_wafer.bytes_per_second)
    return ready
