"""The slot timeline of a chunk pipeline: who holds KV when, before any cycle is known.

Chunks of all requests follow each other without gaps. Stage k works on chunk i at slot i + k. The
KV of a chunk is allocated at the start of that slot and freed at the end of the slot in which the
stage works on the last chunk of the same request; so at equal slots frees precede allocations.

Where KV is freed layer by layer, a slot has as many *steps* as the deepest stage has layers. Layer
j of L is worked on from step ``floor(j * steps / L)`` on; its KV is allocated as it begins and
freed as it ends in the slot of the last chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from mocap.policy import Move
from wafer_kernels.errors import ConfigError

__all__ = ["Block", "Occupancy", "blocks", "layers_held", "occupancy"]

Int64 = NDArray[np.int64]


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


@cache
def layers_held(layers: int, steps: int, slots: int) -> Int64:
    """Layers that hold a chunk's KV, at every step of the ``slots`` slots that it stays (step,).

    The first slot is the one in which the KV comes, the last the one in which it goes.
    """
    held = np.zeros(slots * steps, np.int64)
    for layer in range(layers):
        begin, end = layer * steps // layers, (layer + 1) * steps // layers
        held[begin : (slots - 1) * steps + end] += 1
    held.setflags(write=False)
    return held


class Occupancy:
    """KV in every region at every step of every slot, own and hosted.

    Parameters
    ----------
    cuts
        Chunk sizes of each request in order of service [tokens].
    kv_bytes_per_token
        KV of the layers of each stage (stage,) [B]; ones give tokens.
    layers
        Layers of each stage if KV is freed layer by layer (stage,); empty: task by task.

    Raises
    ------
    ConfigError
        If the KV of a stage is no multiple of its layers.
    """

    def __init__(
        self,
        cuts: Sequence[Sequence[int]],
        kv_bytes_per_token: Sequence[int],
        layers: Sequence[int] = (),
    ) -> None:
        self.layers = tuple(layers) or (1,) * len(kv_bytes_per_token)
        self.steps = max(self.layers)
        self._sizes = kv_bytes_per_token
        for stage, (size, count) in enumerate(zip(kv_bytes_per_token, self.layers, strict=True)):
            if size % count:
                raise ConfigError(
                    f"stage {stage} has {size} bytes of KV a token, which {count} equal layers "
                    "cannot share: give the KV of whole layers"
                )
        slots = sum(map(len, cuts)) + len(kv_bytes_per_token) - 1
        self.bytes: Int64 = np.zeros((len(kv_bytes_per_token), slots * self.steps), np.int64)

    def span(self, first: int, last: int) -> slice:
        """Steps of the slots from ``first`` to ``last``."""
        return slice(first * self.steps, (last + 1) * self.steps)

    def put(self, region: int, home: int, tokens: int, first: int, last: int) -> None:
        """Keep tokens of stage ``home`` in a region, from slot ``first`` to slot ``last``.

        Negative tokens are taken away.
        """
        self.bytes[region, self.span(first, last)] += tokens * self._a_token(home, last + 1 - first)

    def _a_token(self, home: int, slots: int) -> Int64:
        """Bytes a token of stage ``home`` takes at every step of so many slots (step,)."""
        layers = self.layers[home]
        return layers_held(layers, self.steps, slots) * (self._sizes[home] // layers)

    def put_away(self, block: Block, move: Move, sign: int = 1) -> None:
        """Move KV of a block from home, where it is all counted, to its host; or back (-1)."""
        pushed = block.start + move.leaves - move.chunk
        self.put(block.stage, block.stage, -sign * move.tokens, block.start, block.end - 1)
        if pushed > block.start:
            self.put(block.stage, block.stage, sign * move.tokens, block.start, pushed)
        self.put(move.host, block.stage, sign * move.tokens, pushed, block.end - 1)

    def bytes_at_home(self, block: Block, slots: int) -> Int64:
        """Bytes a token takes at home at every step of a block's life, of so many slots (step,)."""
        taken = np.zeros((block.end - block.start) * self.steps, np.int64)
        if slots > 0:
            taken[: slots * self.steps] = self._a_token(block.stage, slots)
        return taken

    def room(self, block: Block, capacity: Sequence[int], last: int) -> Int64:
        """Most bytes of a block that each region can hold from its start to slot ``last`` (stage,).

        Bytes of all its layers; where they come and go one by one, the fullest step counts.
        """
        layers = self.layers[block.stage]
        held = layers_held(layers, self.steps, last + 1 - block.start)
        free = np.array(capacity, np.int64)[:, np.newaxis]
        free = free - self.bytes[:, self.span(block.start, last)]
        room: Int64 = (free[:, held > 0] * layers // held[held > 0]).min(axis=1)
        return room


def occupancy(
    cuts: Sequence[Sequence[int]],
    moves: Sequence[Move],
    kv_bytes_per_token: Sequence[int],
    layers: Sequence[int] = (),
) -> Int64:
    """KV in every region at every slot, own and hosted (stage, slot) [B].

    What is pushed to a host is counted in both regions during the slot of the push.

    Parameters
    ----------
    cuts
        Chunk sizes of each request in order of service [tokens].
    moves
        KV that lives away from home.
    kv_bytes_per_token
        KV of the layers of each stage (stage,) [B]; ones give tokens.
    layers
        Layers of each stage if KV is freed layer by layer (stage,); there is then a column for
        every step of every slot, as many as the deepest stage has layers.
    """
    held = Occupancy(cuts, kv_bytes_per_token, layers)
    alive = {}
    for block in blocks(cuts, len(kv_bytes_per_token)):
        held.put(block.stage, block.stage, block.tokens, block.start, block.end - 1)
        alive[block.request, block.stage, block.chunk] = block
    for move in moves:
        held.put_away(alive[move.request, move.stage, move.chunk], move)
    return held.bytes
