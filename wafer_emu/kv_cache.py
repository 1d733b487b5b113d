"""KV of one request on one stage: which vector lies in which slot of which core, home or host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_emu.arena import Arena
from wafer_emu.workload import MAX_TOKENS
from wafer_kernels.errors import KernelError
from wafer_kernels.region import Kind
from wafer_kernels.region_cache import ABSENT, EARLY, STALE, Cache, relocate

__all__ = ["KvCache", "Part", "refuse_fault"]

Int64 = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max
WRONG = {
    ABSENT: "was never written there or freed since: its migration was skipped or it is stale",
    STALE: "was overwritten: the slot holds another block, the reader's table is stale",
    EARLY: "has not arrived yet",
}


class Part(NamedTuple):
    """Tokens of a chunk whose KV one stage hosts, or is to host."""

    host: int
    first: int
    tokens: int


class KvCache:
    """KV of the stage's layers; ``shape`` is (layers, tokens, vectors a token).

    Tables change for a range of layers at a time: ``layers`` of the methods.
    """

    def __init__(
        self, arena: Arena, kind: Kind, width: int, request: int, shape: tuple[int, int, int]
    ) -> None:
        self.arena, self.request = arena, request
        self._kind, self._width = kind, width
        self.core = np.zeros(shape, np.int64)
        self.slot = np.zeros(shape, np.int64)
        self.arrived = np.full(shape[:2], NEVER, np.int64)
        self._placed = np.zeros(shape[:2], np.bool_)

    def take(self, layers: slice, part: Part, taken: Int64, floor: Int64) -> tuple[Int64, Int64]:
        """Core and slot of the part's vectors (layer, token, vector), as the ledger took them."""
        core, slot = self.arena.take_slots(part.host, taken, floor)
        shape = (layers.stop - layers.start, part.tokens, self.core.shape[2])
        return core.reshape(shape), slot.reshape(shape)

    def place(self, layers: slice, part: Part, taken: Int64, floor: Int64) -> None:
        """Give the part's vectors the slots that the ledger took on the host's cores (core,)."""
        tokens = slice(part.first, part.first + part.tokens)
        self.core[layers, tokens], self.slot[layers, tokens] = self.take(layers, part, taken, floor)
        self._placed[layers, tokens] = True

    def push(self, layers: slice, part: Part, core: Int64, slot: Int64, cycle: int) -> None:
        """Bring the part's vectors to slots taken on its host, and free those at home."""
        tokens, arena = slice(part.first, part.first + part.tokens), self.arena
        at_home = self.core[layers, tokens].ravel(), self.slot[layers, tokens].ravel()
        relocate(
            arena.bytes, *at_home, core.ravel(), slot.ravel(), arena.top, arena.tags,
            arena.quantum_bytes,
        )  # fmt: skip
        arena.free_slots(*at_home)
        self.core[layers, tokens], self.slot[layers, tokens] = core, slot
        self.arrived[layers, tokens] = cycle

    def free(self, layers: slice) -> None:
        """Empty all slots."""
        placed = self._placed[layers]
        self.arena.free_slots(self.core[layers][placed].ravel(), self.slot[layers][placed].ravel())

    def layer(self, layer: int, kept: int) -> Cache:
        """KV of a layer of the model, the ``kept``-th of the stage's."""
        tag = 1 + ((self.request << 16) + layer) * (MAX_TOKENS + 1)
        return Cache(
            int(self._kind), self._width, tag, self.core[kept], self.slot[kept],
            self.arrived[kept], self.arena.top, self.arena.tags,
        )  # fmt: skip


def refuse_fault(arena: Arena, faults: Int64, request: int, layer: int, cycle: int) -> None:
    """KernelError if a read of KV went wrong: names core, block and cycle."""
    wrong = faults.reshape(-1, 4)
    wrong = wrong[wrong[:, 0] != 0]
    if wrong.size == 0:
        return
    code, core, token, slot = (int(each) for each in wrong[0])
    raise KernelError(
        f"{arena.label(core)} at cycle {cycle:,}: KV block (request {request}, layer {layer}, "
        f"token {token}) in slot {slot} {WRONG[code]}",
        core=core,
        block=[request, layer, token],
        cycle=cycle,
    )
