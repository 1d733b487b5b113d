"""KV of one request on one stage: which vector lies in which slot of which core, home or host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_emu.arena import Arena
from wafer_emu.workload import MAX_TOKENS
from wafer_kernels.errors import KernelError
from wafer_kernels.region import Kind
from wafer_kernels.region_cache import ABSENT, EARLY, STALE, Cache

__all__ = ["KvCache", "Part", "refuse_fault"]

Int64 = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max
WRONG = {
    ABSENT: "was never written there or freed since: its migration was skipped or it is stale",
    STALE: "was overwritten: the slot holds another block, the reader's table is stale",
    EARLY: "has not arrived yet",
}


class Part(NamedTuple):
    """Tokens of a chunk whose KV one stage hosts."""

    host: int
    first: int
    tokens: int


class KvCache:
    """KV of the stage's layers; ``shape`` is (layers kept at a time, tokens, vectors a token)."""

    def __init__(
        self, arena: Arena, kind: Kind, width: int, request: int, shape: tuple[int, int, int]
    ) -> None:
        self.arena, self.request = arena, request
        self._kind, self._width = kind, width
        self.core = np.zeros(shape, np.int64)
        self.slot = np.zeros(shape, np.int64)
        self.arrived = np.full(shape[1], NEVER, np.int64)
        self._placed = np.zeros(shape[1], np.bool_)

    @property
    def quanta_per_token(self) -> int:
        """Slots that a token takes on all layers kept at a time."""
        return self.core.shape[0] * self.core.shape[2]

    def place(self, part: Part, taken: Int64, floor: Int64) -> None:
        """Give the part's vectors the slots that the ledger took on the host's cores (core,)."""
        core, slot = self.arena.take_slots(part.host, taken, floor)
        tokens = slice(part.first, part.first + part.tokens)
        shape = (self.core.shape[0], part.tokens, self.core.shape[2])
        self.core[:, tokens], self.slot[:, tokens] = core.reshape(shape), slot.reshape(shape)
        self._placed[tokens] = True

    def free(self) -> None:
        """Empty all slots."""
        self.arena.free_slots(
            self.core[:, self._placed].ravel(), self.slot[:, self._placed].ravel()
        )

    def layer(self, layer: int, kept: int) -> Cache:
        """KV of a layer of the model, the ``kept``-th of those kept at a time."""
        index = kept % self.core.shape[0]
        tag = 1 + ((self.request << 16) + layer) * (MAX_TOKENS + 1)
        return Cache(
            int(self._kind), self._width, tag, self.core[index], self.slot[index], self.arrived,
            self.arena.top, self.arena.tags,
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
