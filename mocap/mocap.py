"""MOCAP: chunks balanced with the price of the moves, KV reallocated (arXiv 2606.22968)."""

from __future__ import annotations

from mocap import overhead, partition
from mocap.mbkr import Reallocating
from mocap.policy import Request, Setting
from mocap.reallocation import Trigger

__all__ = ["Mocap"]


class Mocap(Reallocating):
    """LBCP cuts that count the reallocation overhead, and MBKR moves.

    `reading` says what the two thresholds of the paper's three-case overhead are; see
    `mocap.overhead`.
    """

    name = "mocap"
    summary = "chunks of equal time, moves counted; KV reallocated between stages"
    uses = frozenset({"chunks", "chunk_tokens"})
    rivals = ("layerwise", "prefill-only", "uniform", "terapipe", "gpipe")

    reading: overhead.Reading = "a"

    def partition(self, request: Request, setting: Setting) -> list[int]:
        """Balance chunk times with the overhead; keep the cuts without it where they are better."""
        tokens, prefix = request.new_tokens, request.prefix_tokens
        chunks, page = setting.chunk_count(tokens), setting.page_tokens
        plain = partition.lbcp(tokens, chunks, setting.cost, page, prefix, setting.stages)
        # What is pushed late leaves only when its room is needed, whatever the trigger.
        trigger: Trigger = "overflow" if self.push == "late" else self.trigger
        price = overhead.expected(tokens, chunks, setting, self.reading, trigger)
        if price is None:
            return plain
        cost = overhead.with_overhead(setting.cost, price)
        aware = partition.lbcp(tokens, chunks, cost, page, prefix, setting.stages)
        return min(
            aware, plain, key=lambda cuts: partition.makespan(cuts, cost, setting.stages, prefix)
        )

    def most_chunks(self, wanted: int) -> int | None:
        """As many as are wanted."""
        return wanted
