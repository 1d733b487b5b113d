"""TeraPipe: the exact dynamic program over chunk boundaries (arXiv 2102.07988)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from mocap import partition
from mocap.chunked import Chunked
from mocap.policy import Request, Setting

__all__ = ["Terapipe"]


class Terapipe(Chunked):
    """Chunks that minimise ``sum t + (stages - 1) max t``.

    `max_chunks` bounds their number: None takes the number wanted by the user, 0 is no bound.
    `step_tokens` is the grid of the boundaries: None lays at most 128 steps over the request and
    then refines them down to a page.
    """

    name = "terapipe"
    summary = "chunks of least makespan, by dynamic program"
    uses = frozenset({"chunks", "chunk_tokens"})

    max_chunks: Annotated[int, msgspec.Meta(ge=0)] | None = None
    step_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def partition(self, request: Request, setting: Setting) -> list[int]:
        """Solve the dynamic program on the emulator's own chunk cost."""
        tokens = request.new_tokens
        bound = setting.chunk_count(tokens) if self.max_chunks is None else self.max_chunks
        return partition.terapipe(
            tokens,
            setting.stages,
            setting.cost,
            self.step_tokens,
            bound or None,
            request.prefix_tokens,
            setting.page_tokens,
        )

    def most_chunks(self, wanted: int) -> int | None:
        """As many as are wanted, or as `max_chunks` says."""
        return (wanted if self.max_chunks is None else self.max_chunks) or None
