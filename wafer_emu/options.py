"""What a user may ask of a run, besides wafer, model, workload and policy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from wafer_emu.placement import Order
from wafer_kernels.errors import UsageError

__all__ = ["CHUNK_OPTIONS", "Options", "Tier"]

Tier = Literal["auto", "sram", "dram"]
CHUNK_OPTIONS = ("chunks", "chunk_tokens", "chunk_vector")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of one emulation.

    Attributes
    ----------
    stages
        Pipeline stages; None: the policy's own count, else 16, capped by layers and fabric;
        ``auto``: the best that a search finds.
    region
        Cores of a stage (rows, columns); None: the fabric cut into near-equal regions.
    chunks
        Chunks of a request; None: as many as stages; ``auto``: the best that a search finds.
    chunk_tokens
        Chunk size instead of a count [tokens].
    chunk_vector
        The chunks themselves instead of a count [tokens]; policies with cuts of their own take
        their number from it.
    layers
        Layers that are placed; the results are scaled to the whole model. None: all.
    weights_tier, kv_tier, activations_tier
        Memory of weights, of KV, and of activations that wait (hand-off buffers, the residual
        stream beyond the tile in work); ``auto``: SRAM if it fits, else die DRAM if there is any.
    weights_dtype, kv_dtype
        Stored types; None: the model's own.
    kv_budget
        KV capacity per stage instead of the ledger's; weights and activations are ignored [bytes].
    embedding
        Where embedding rows come from.
    placement
        Order of regions on the wafer.
    causal_skip
        Whether masked tiles cost nothing.
    contention
        Whether hand-offs and KV between regions share the links that they cross, or each has them
        alone.
    seed
        Kept in the run file; nothing random depends on it yet.
    objective
        What a search is for: least time to first token, or most requests per second.
    search_seconds
        Time after which a search starts no further plan [s].
    policy
        Options of the policy by name.
    """

    stages: int | Literal["auto"] | None = None
    region: tuple[int, int] | None = None
    chunks: int | Literal["auto"] | None = None
    chunk_tokens: int | None = None
    chunk_vector: tuple[int, ...] | None = None
    layers: int | None = None
    weights_tier: Tier = "auto"
    kv_tier: Tier = "auto"
    activations_tier: Tier = "auto"
    weights_dtype: str | None = None
    kv_dtype: str | None = None
    kv_budget: int | None = None
    embedding: Literal["host", "first-stage"] = "host"
    placement: Order = "serpentine"
    causal_skip: bool = True
    contention: bool = True
    seed: int = 0
    objective: Literal["latency", "throughput"] = "latency"
    search_seconds: float = 20.0
    policy: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [name for name in CHUNK_OPTIONS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are ways to ask for one thing: give one")
        if self.chunk_vector is not None and min(self.chunk_vector, default=0) < 1:
            raise UsageError(f"chunk_vector = {self.chunk_vector}: expected sizes of 1 or more")
        if not 0 < self.search_seconds < math.inf:
            raise UsageError(f"search_seconds = {self.search_seconds}: expected a number above 0")

    @property
    def given_chunks(self) -> int | None:
        """Chunks of a request, where a number or the chunks themselves were given."""
        if self.chunk_vector is not None:
            return len(self.chunk_vector)
        return self.chunks if isinstance(self.chunks, int) else None

    def usual_chunk(self, tokens: int, stages: int, uses: Collection[str]) -> int:
        """Chunk of ``tokens`` that a stage is laid out for: as given (the longest), or even."""
        if self.chunk_vector is not None and "chunk_vector" in uses:
            return min(tokens, max(self.chunk_vector))
        return min(tokens, self.chunk_tokens or -(-tokens // (self.given_chunks or stages)))

    def to_dict(self) -> dict[str, Any]:
        """Plain mapping, kept in the run file."""
        return asdict(self)
