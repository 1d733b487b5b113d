"""GPipe: requests are the micro-batches."""

from __future__ import annotations

from mocap.policy import Policy

__all__ = ["Gpipe"]


class Gpipe(Policy):
    """A request passes each stage whole, streamed by token tiles inside every layer."""

    name = "gpipe"
    summary = "whole requests as micro-batches"
    streams_tokens = True
    uses = frozenset()
