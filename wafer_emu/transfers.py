"""What moves between the host, the stages and their KV hosts for every task."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wafer_emu.memory import kv_quanta_per_token, kv_quantum_bytes
from wafer_emu.model import Model, dtype_bytes
from wafer_emu.order import Order
from wafer_kernels.noc import Links
from wafer_kernels.pipeline import Traffic

__all__ = ["Transfers", "arrivals", "handoff_latency", "kv_transfers", "no_transfers", "traffic"]

Int64 = npt.NDArray[np.int64]
TOKEN_ID_BYTES = 4
PARTIAL_BYTES = 4


@dataclass(frozen=True)
class Transfers:
    """KV that tasks move for every layer of their stage (stage, host, task) [bytes].

    ``read`` from hosts and ``write`` to them; ``ask``: queries, where what is read are their
    partial results. ``layers`` (N,) of the stages and ``hops`` (stage, host).
    """

    read: Int64
    write: Int64
    ask: Int64
    layers: Int64
    hops: Int64

    def _of_tasks(self, moved: Int64) -> Int64:
        return np.asarray(moved.sum(axis=1) * self.layers[:, np.newaxis])

    @property
    def written_bytes(self) -> Int64:
        """KV written to other stages (stage, task)."""
        return self._of_tasks(self.write)

    @property
    def read_bytes(self) -> Int64:
        """KV, or queries and partial results, that come from there and go there (stage, task)."""
        return self._of_tasks(self.read + self.ask)

    @property
    def byte_hops(self) -> Int64:
        """All of it times the distance between the regions (stage, task)."""
        return self._of_tasks((self.read + self.write + self.ask) * self.hops[:, :, np.newaxis])


def no_transfers(order: Order) -> Transfers:
    """All KV stays where it is made."""
    stages, count = order.compute.shape
    none = np.zeros((stages, 1, count), np.int64)
    layers = np.array([stage.layers for stage in order.deployment.stages], np.int64)
    return Transfers(none, none, none, layers, none[:, :, 0])


def kv_transfers(order: Order, host: Int64, coming: Int64) -> Transfers:
    """KV transfers of every task.

    ``coming`` (stage, host, task) tokens reach each ``host`` (stage, host) with a task, be they new
    or of earlier chunks. What came with earlier tasks of the request is read again by each; a
    policy that attends remotely sends queries and gets partial results instead.
    """
    deployment = order.deployment
    of_a_token = np.array(
        [kv_quanta_per_token(clock) * kv_quantum_bytes(clock) for clock in deployment.clocks]
    )[:, np.newaxis, np.newaxis]
    first = np.maximum.accumulate(np.where(order.chunk == 0, np.arange(order.chunk.size), 0))
    before = np.cumsum(coming, axis=2) - coming
    remote = before - before[:, :, first]
    moved = coming * of_a_token
    read, ask = remote * of_a_token, np.zeros_like(remote)
    if order.policy.attends_remotely():
        query_bytes, partial_bytes = _exchange_bytes_per_token(deployment.model)
        ask = np.where(remote > 0, order.tokens * query_bytes, 0)
        read = np.where(remote > 0, order.tokens * partial_bytes, 0)
    for home in (moved, read, ask):
        home[:, 0] = 0
    hops = np.array(deployment.placement.hops(), np.int64)
    layers = np.array([stage.layers for stage in deployment.stages], np.int64)
    return Transfers(read, moved, ask, layers, np.take_along_axis(hops, host, axis=1))


def traffic(order: Order, transfers: Transfers) -> tuple[Traffic, Links]:
    """Hand-offs and KV transfers as the engine has them, and the links that they share."""
    handed = _handoff_bytes(order)
    most = max(int(each.max()) for each in (handed, transfers.read, transfers.write, transfers.ask))
    deployment = order.deployment
    links, grains = deployment.links.shared(max(most, 1), deployment.options.contention)
    return Traffic(
        handed * grains,
        transfers.layers,
        transfers.read * grains,
        transfers.write * grains,
        transfers.ask * grains,
    ), links


def _exchange_bytes_per_token(model: Model) -> tuple[int, int]:
    """Bytes of a token's queries, and of what comes back: weighted values, maximum and sum a head.

    Latent attention exchanges absorbed queries and latents. Partial results are float32.
    """
    query, value = model.head_dim, model.head_dim
    if model.mla is not None:
        query, value = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim, model.mla.kv_lora_rank
    return model.heads * query * dtype_bytes(model.dtype), model.heads * (value + 2) * PARTIAL_BYTES


def _handoff_bytes(order: Order) -> Int64:
    """Bytes that leave for the next stage as a task has ended (stage, task).

    A request that streams by tiles hands its tiles on as the last layer ends with them, so that
    only the last one remains.
    """
    deployment = order.deployment
    tokens = order.tokens
    if order.policy.streams_tokens:
        tokens = np.minimum(tokens, deployment.tile_tokens)
    width = deployment.model.hidden_size * dtype_bytes(deployment.model.dtype)
    handed = np.tile(tokens * width, (order.compute.shape[0], 1))
    handed[-1] = 0
    return handed


def handoff_latency(order: Order) -> Int64:
    """Cycles from a hand-off's last byte to its arrival at the next stage (stage, task)."""
    stages = len(order.deployment.stages)
    latency = [order.deployment.links.latency(k, min(k + 1, stages - 1)) for k in range(stages)]
    return np.tile(np.array(latency, np.int64)[:, np.newaxis], (1, order.tokens.size))


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
