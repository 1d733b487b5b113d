"""vLLM-Ascend's profiling-based dynamic chunks."""

from __future__ import annotations

from typing import Annotated

import msgspec

from mocap import serving
from mocap.chunked import Chunked
from mocap.policy import Request, Setting

__all__ = ["VllmAscend"]


class VllmAscend(Chunked):
    """Chunks of equal time after a model that is fitted again on the chunks already served."""

    name = "vllm-ascend"
    summary = "vLLM-Ascend's dynamic chunks"
    uses = frozenset({"chunks", "chunk_tokens"})

    smooth: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.8
    least_tokens: Annotated[int, msgspec.Meta(ge=1)] = 4096

    def partition(self, request: Request, setting: Setting) -> list[int]:
        """Profile, fit and cut as vLLM-Ascend's scheduler does."""
        base = setting.base_tokens(request.new_tokens)
        return serving.vllm_ascend(
            request.new_tokens,
            base,
            serving.fit_quadratic(setting.cost, serving.profile_sizes(base, 64)),
            setting.cost,
            setting.page_tokens,
            self.smooth,
            self.least_tokens,
            request.prefix_tokens,
        )
