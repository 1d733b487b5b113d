"""MBKR alone: uniform chunks, KV reallocated (MOCAP, arXiv 2606.22968; reconstructed)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from mocap import reallocation
from mocap.chunked import Chunked
from mocap.policy import Move, Setting
from mocap.uniform import Uniform

__all__ = ["Mbkr", "Reallocating"]


class Reallocating(Chunked):
    """Moves KV to partners that have room: the half of MOCAP that acts on memory.

    `partner` names who may host: the stage N/2 further (``offset``), the mirrored one, the other
    members of a group of `group_size` equally lagged stages, or whoever the transport plan of
    least byte-hops (``optimal``) chooses. `trigger` moves what does not fit (``overflow``) or
    whatever evens out the room (``balance``). `moved` picks the chunks that go. `push` sends them
    as they are written (``write``), or as ``late`` as the room at home allows. Later chunks
    ``stream`` what lives away back layer by layer, or ``attend`` there: queries go, partial
    softmax results come back.
    """

    partner: Literal["offset", "mirror", "groups", "optimal"] = "offset"
    group_size: Annotated[int, msgspec.Meta(ge=2)] = 4
    trigger: reallocation.Trigger = "overflow"
    moved: reallocation.Moved = "newest"
    push: reallocation.Push = "write"
    read_back: Literal["stream", "attend"] = "stream"

    def attends_remotely(self) -> bool:
        """Whether `read_back` says so."""
        return self.read_back == "attend"

    def reallocate(self, cuts: Sequence[Sequence[int]], setting: Setting) -> list[Move]:
        """Plan where KV lives, slot by slot."""
        layers = setting.layers if self.frees_by_layer() else ()
        if self.partner == "optimal":
            moves = reallocation.optimal(cuts, setting, layers)
        else:
            moves = reallocation.plan(
                cuts, setting, self.groups(setting), self.trigger, self.moved, layers
            )
        return reallocation.postpone(moves, cuts, setting, layers) if self.push == "late" else moves

    def groups(self, setting: Setting) -> list[tuple[int, ...]]:
        """Stages that may host each other's KV."""
        match self.partner:
            case "offset":
                return list(reallocation.pairs(setting.stages))
            case "mirror":
                return list(reallocation.mirror(setting.stages))
            case "groups":
                return reallocation.groups(setting.stages, self.group_size)
            case "optimal":
                return [tuple(range(setting.stages))]


class Mbkr(Reallocating, Uniform):
    """Equal chunks, KV reallocated between paired stages."""

    name = "mbkr"
    summary = "equal chunks, KV reallocated between stages"
