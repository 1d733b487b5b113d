"""Layer by layer on all cores: the alternative to any pipeline."""

from __future__ import annotations

from mocap.policy import Policy

__all__ = ["Layerwise"]


class Layerwise(Policy):
    """One stage owns the whole wafer and runs a request layer by layer."""

    name = "layerwise"
    summary = "the whole wafer as one stage, layer by layer"
    stage_count = 1
    streams_tokens = True
    uses = frozenset()
