"""GPipe: requests are the micro-batches."""

from __future__ import annotations

from typing import Annotated

import msgspec

from mocap.policy import Policy

__all__ = ["Gpipe"]


class Gpipe(Policy):
    """A request passes each stage whole, streamed by token tiles inside every layer.

    `tile_tokens` is the longest tile: None takes the fastest that fits, no longer than a chunk.
    """

    name = "gpipe"
    summary = "whole requests as micro-batches"
    streams_tokens = True
    uses = frozenset()

    tile_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def asked_tile(self) -> int | None:
        """The longest tile that was asked for."""
        return self.tile_tokens
