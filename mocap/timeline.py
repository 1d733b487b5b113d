"""The slot timeline of a chunk pipeline: who holds KV when, before any cycle is known.

Chunks of all requests follow each other without gaps. Stage k works on chunk i at slot i + k. The
KV of a chunk is allocated at the start of that slot and freed at the end of the slot in which the
stage works on the last chunk of the same request; so at equal slots frees precede allocations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mocap.policy import Move

__all__ = ["Block", "blocks", "occupancy"]


@dataclass(frozen=True, slots=True)
class Block:
    """KV of one chunk on the layers of one stage, alive in slots ``start <= slot < end``."""

    request: int
    stage: int
    chunk: int
    tokens: int
    start: int
    end: int


def blocks(cuts: Sequence[Sequence[int]], stages: int) -> Iterator[Block]:
    """Yield all KV blocks by slot of allocation, then by stage."""
    chunks = [(r, j, size) for r, sizes in enumerate(cuts) for j, size in enumerate(sizes)]
    ends = np.cumsum([len(sizes) for sizes in cuts]).tolist()
    for slot in range(len(chunks) + stages - 1):
        for stage in range(max(0, slot - len(chunks) + 1), min(stages, slot + 1)):
            request, chunk, tokens = chunks[slot - stage]
            yield Block(request, stage, chunk, tokens, slot, ends[request] + stage)


def occupancy(
    cuts: Sequence[Sequence[int]], moves: Sequence[Move], kv_bytes_per_token: Sequence[int]
) -> NDArray[np.int64]:
    """KV in every region at every slot, own and hosted (stage, slot) [B].

    Parameters
    ----------
    cuts
        Chunk sizes of each request in order of service [tokens].
    moves
        KV that lives away from home.
    kv_bytes_per_token
        KV of the layers of each stage (stage,) [B]; ones give tokens.
    """
    stages = len(kv_bytes_per_token)
    slots = sum(map(len, cuts)) + stages
    change = np.zeros((stages, slots), np.int64)
    alive = {}
    for block in blocks(cuts, stages):
        size = block.tokens * kv_bytes_per_token[block.stage]
        change[block.stage, block.start] += size
        change[block.stage, block.end] -= size
        alive[block.request, block.stage, block.chunk] = block
    for move in moves:
        block = alive[move.request, move.stage, move.chunk]
        size = move.tokens * kv_bytes_per_token[move.stage]
        for region, sign in ((move.stage, -1), (move.host, 1)):
            change[region, block.start] += sign * size
            change[region, block.end] -= sign * size
    return change.cumsum(axis=1)[:, :-1]
