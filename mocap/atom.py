"""ROCm ATOM's dynamic chunked pipeline."""

from __future__ import annotations

from mocap import serving
from mocap.chunked import Chunked
from mocap.policy import Request, Setting

__all__ = ["Atom"]


class Atom(Chunked):
    """Chunks of equal time after a model with a fixed cost and a cost of the prefix."""

    name = "atom"
    summary = "ATOM's dynamic chunks"
    uses = frozenset({"chunks", "chunk_tokens"})

    def partition(self, request: Request, setting: Setting) -> list[int]:
        """Fit the model on a grid of chunks and prefixes, and cut."""
        tokens, prefix = request.new_tokens, request.prefix_tokens
        base = setting.base_tokens(tokens)
        sizes = sorted({max(1, base * i // 4) for i in range(1, 6)})
        prefixes = sorted({prefix + tokens * i // 8 for i in range(8)} | {0})
        grid = [(size, start) for size in sizes for start in prefixes]
        model = serving.fit_chunk_model(setting.cost, grid)
        return serving.atom(tokens, base, model, setting.page_tokens, prefix)
