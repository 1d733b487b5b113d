"""SGLang's dynamic chunking."""

from __future__ import annotations

from typing import Annotated

import msgspec

from mocap import serving
from mocap.chunked import Chunked
from mocap.policy import Request, Setting

__all__ = ["Sglang"]


class Sglang(Chunked):
    """Chunks of equal time after a quadratic fitted on whole prefills, smoothed by `smooth`."""

    name = "sglang"
    summary = "SGLang's dynamic chunks"
    uses = frozenset({"chunks", "chunk_tokens"})

    smooth: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.75

    def partition(self, request: Request, setting: Setting) -> list[int]:
        """Profile, fit and cut as SGLang's scheduler does."""
        base = setting.base_tokens(request.new_tokens)
        model = serving.fit_quadratic(setting.cost, serving.profile_sizes(base, 128)[1:] or [base])
        return serving.sglang(
            request.new_tokens, base, model, setting.page_tokens, self.smooth, request.prefix_tokens
        )
