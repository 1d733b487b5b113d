"""KV vectors in slots of the cores' memories: tagged when written, checked when read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wafer_kernels._jit import kernel
from wafer_kernels.numeric import Float32, Int64
from wafer_kernels.region import Bytes, Grid, Kind, Matrix, load, load_span, store

__all__ = [
    "ABSENT",
    "EARLY",
    "STALE",
    "Cache",
    "append",
    "erase",
    "read_cache",
    "read_vector",
    "relocate",
    "write_cache",
]

ABSENT, STALE, EARLY = 1, 2, 3


class Cache(NamedTuple):
    """Where the KV of one request and layer lies: ``vectors`` equal vectors a token.

    Slots of ``width`` elements are counted from ``top`` downwards. A slot is tagged with ``tag``
    plus the token whose vector it holds; 0 is an empty one.
    """

    kind: int
    width: int
    tag: int
    core: Int64
    """Core that holds each vector (token, vector)."""
    slot: Int64
    """Its slot there (token, vector)."""
    arrived: Int64
    """Cycle at which each token's vectors are there (token,)."""
    top: Int64
    """Byte behind the first slot of every core (core,)."""
    tags: Int64
    """What every slot holds (core, slot)."""


@kernel()
def read_vector(
    vector: Float32, arena: Bytes, cache: Cache, token: int, index: int, now: int, fault: Int64
) -> None:
    """Read one cached vector, or name what is wrong with it in ``fault``."""
    core, slot = cache.core[token, index], cache.slot[token, index]
    code = 0
    if cache.tags[core, slot] == 0:
        code = ABSENT
    elif cache.tags[core, slot] != cache.tag + token:
        code = STALE
    elif cache.arrived[token] > now:
        code = EARLY
    if code != 0:
        fault[0], fault[1], fault[2], fault[3] = code, core, token, slot
    size = cache.width * (4 if cache.kind == Kind.FLOAT32 else 2)
    load(vector, arena[core], cache.top[core] - (slot + 1) * size, cache.kind)


@kernel()
def _write(arena: Bytes, cache: Cache, token: int, index: int, vector: Float32) -> None:
    """Write one vector of a token to its slot, and tag it."""
    core, slot = cache.core[token, index], cache.slot[token, index]
    size = cache.width * (4 if cache.kind == Kind.FLOAT32 else 2)
    store(arena[core], cache.top[core] - (slot + 1) * size, cache.kind, vector)
    cache.tags[core, slot] = cache.tag + token


@kernel()
def append(
    arena: Bytes, grid: Grid, source: Matrix, first_token: int, cache: Cache, low: int, high: int,
    vector: int,
) -> None:  # fmt: skip
    """Write tokens ``low`` to ``high - 1`` of a matrix of keys, values or latents to their slots.

    Parameters
    ----------
    arena, grid, source, first_token
        Memories, the region, the matrix, and the token that its first row is.
    cache, low, high
        Where the vectors go, and of which tokens.
    vector
        Index of the first vector that a row is cut into.
    """
    one = np.empty(cache.width, np.float32)
    for token in range(low, high):
        for part in range(source.bounds[-1] // cache.width):
            load_span(one, arena, grid, source, token - first_token, part * cache.width)
            _write(arena, cache, token, vector + part, one)


@kernel()
def write_cache(arena: Bytes, cache: Cache, values: Float32) -> None:
    """Write the KV of a request's first tokens (token, vectors x width) from outside."""
    for token in range(values.shape[0]):
        for index in range(cache.core.shape[1]):
            first = index * cache.width
            _write(arena, cache, token, index, values[token, first : first + cache.width])


@kernel()
def read_cache(values: Float32, arena: Bytes, cache: Cache, now: int, fault: Int64) -> None:
    """Read all KV of a request's layer (token, vectors x width); ``fault`` as in ``ring_pass``."""
    for token in range(values.shape[0]):
        for index in range(cache.core.shape[1]):
            first = index * cache.width
            read_vector(
                values[token, first : first + cache.width], arena, cache, token, index, now, fault
            )


@kernel()
def erase(
    arena: Bytes, core: Int64, slot: Int64, top: Int64, tags: Int64, size: int, byte: int
) -> None:
    """Fill slots of ``size`` bytes (slot,) with a byte and take their tags away."""
    for i in range(core.size):
        bottom = top[core[i]] - (slot[i] + 1) * size
        for at in range(bottom, bottom + size):
            arena[core[i], at] = byte
        tags[core[i], slot[i]] = 0


@kernel()
def relocate(
    arena: Bytes, core: Int64, slot: Int64, to_core: Int64, to_slot: Int64, top: Int64,
    tags: Int64, size: int,
) -> None:  # fmt: skip
    """Copy slots of ``size`` bytes, with their tags, to other slots (slot,)."""
    for i in range(core.size):
        source = top[core[i]] - (slot[i] + 1) * size
        target = top[to_core[i]] - (to_slot[i] + 1) * size
        for at in range(size):
            arena[to_core[i], target + at] = arena[core[i], source + at]
        tags[to_core[i], to_slot[i]] = tags[core[i], slot[i]]
