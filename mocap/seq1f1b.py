"""Seq1F1B's chunks of equal work (arXiv 2406.03488)."""

from __future__ import annotations

from mocap import serving
from mocap.chunked import Chunked
from mocap.policy import Request, Setting

__all__ = ["Seq1F1B"]


class Seq1F1B(Chunked):
    """Chunks of equal work: a linear part, and attention over all earlier tokens."""

    name = "seq1f1b"
    summary = "Seq1F1B's chunks of equal work"

    def partition(self, request: Request, setting: Setting) -> list[int]:
        """Take the work from the growth of chunk time with chunk and prefix, and cut.

        With F(s, E) from position 0, ``t(s, p) = linear s + causal (s p + s^2 / 2)``.
        """
        tokens = request.new_tokens
        chunks = min(setting.chunk_count(tokens), tokens)
        base = setting.base_tokens(tokens)
        prefixes = [request.prefix_tokens + base * i for i in range(chunks)]
        model = serving.fit_chunk_model(
            setting.cost,
            [(size, p) for size in {max(1, base // 2), base} for p in prefixes],
        )
        causal = max(0.0, 2 * model.square)
        # the prefix adds the same to each chunk as more linear work
        linear = max(1e-9, model.linear) + causal * request.prefix_tokens
        page = setting.page_tokens if tokens >= chunks * setting.page_tokens else 1
        return serving.seq1f1b(tokens, chunks, linear, causal, page)
