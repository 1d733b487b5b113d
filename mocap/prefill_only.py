"""PrefillOnly's hybrid prefilling: KV of the current layer only (arXiv 2505.07203)."""

from __future__ import annotations

from collections.abc import Sequence

from mocap.policy import Policy, Request

__all__ = ["PrefillOnly", "ShortestFirst"]


class ShortestFirst(Policy):
    """Serves, of the requests that wait, the one with the fewest tokens left to compute."""

    def order(self, requests: Sequence[Request]) -> list[Request]:
        """Waiting requests, the shortest first."""
        return sorted(
            requests,
            key=lambda request: (request.new_tokens, request.arrival_cycle, request.index),
        )


class PrefillOnly(ShortestFirst):
    """One stage; linear layers by token tiles, attention whole, KV freed after each layer."""

    name = "prefill-only"
    summary = "the whole wafer as one stage, KV of one layer at a time, shortest request first"
    stage_count = 1
    kv_lifetime = "layer"
    streams_tokens = True
    uses = frozenset()
