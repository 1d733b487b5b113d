"""LBCP alone: load-balanced chunks, no KV moved (MOCAP, arXiv 2606.22968; reconstructed)."""

from __future__ import annotations

from mocap import partition
from mocap.chunked import Chunked
from mocap.policy import Request, Setting

__all__ = ["Lbcp"]


class Lbcp(Chunked):
    """Chunks of equal time, or equal chunks where these are faster."""

    name = "lbcp"
    summary = "chunks of equal time"
    uses = frozenset({"chunks", "chunk_tokens"})

    def partition(self, request: Request, setting: Setting) -> list[int]:
        """Balance chunk times by bisection on their maximum."""
        return partition.lbcp(
            request.new_tokens,
            setting.chunk_count(request.new_tokens),
            setting.cost,
            setting.page_tokens,
            request.prefix_tokens,
            setting.stages,
        )

    def most_chunks(self, wanted: int) -> int | None:
        """As many as are wanted."""
        return wanted
