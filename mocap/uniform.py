"""Uniform chunks: fixed chunked prefill through a pipeline."""

from __future__ import annotations

from mocap import partition
from mocap.chunked import Chunked
from mocap.policy import Request, Setting
from wafer_kernels.errors import ConfigError

__all__ = ["Uniform"]


class Uniform(Chunked):
    """Chunks of one size, or of the size or the sizes that the user gives."""

    name = "uniform"
    summary = "equal chunks"
    uses = frozenset({"chunks", "chunk_tokens", "chunk_vector"})

    def partition(self, request: Request, setting: Setting) -> list[int]:
        """Deal the request into equal chunks."""
        tokens = request.new_tokens
        if setting.chunk_vector is not None:
            if sum(setting.chunk_vector) != tokens:
                raise ConfigError(
                    f"the given chunks sum to {sum(setting.chunk_vector)} tokens, but request "
                    f"{request.index} has {tokens} to compute: make them sum to it"
                )
            return list(setting.chunk_vector)
        if setting.chunk_tokens is not None:
            return partition.fixed(tokens, setting.chunk_tokens)
        return partition.uniform(tokens, setting.chunks, setting.page_tokens)

    def most_chunks(self, wanted: int) -> int | None:
        """As many as are wanted."""
        return wanted
