"""What policies that cut a request into chunks share."""

from __future__ import annotations

from typing import Literal

from mocap.policy import Policy

__all__ = ["Chunked"]


class Chunked(Policy):
    """A request passes the stages chunk by chunk, and its KV lives until the last one has passed.

    `kv_free` says when a stage takes and frees KV: that of all its layers as a ``task`` starts and
    as the request's last task ends, or of each ``layer`` as it begins and as the last task has
    passed it.
    """

    kv_free: Literal["task", "layer"] = "task"

    def frees_by_layer(self) -> bool:
        """Whether `kv_free` says so."""
        return self.kv_free == "layer"
