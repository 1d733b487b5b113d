"""What a pipeline would buy where one stage over the whole wafer is the fastest answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mocap.policy
from wafer_emu.emulation import Progress, emulate
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.wafer import Wafer
from wafer_emu.ways import most_tokens
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError

__all__ = ["pipeline_offer"]

STREAM = 4  # requests back to back that throughput is taken from


def pipeline_offer(
    wafer: Wafer,
    model: Model,
    workload: Workload,
    options: Options,
    summary: Mapping[str, Any],
    progress: Progress,
) -> dict[str, Any] | None:
    """Throughput, longest prompt and traffic of the best pipeline tried, beside those of one stage.

    Parameters
    ----------
    wafer, model, workload, options
        What was asked.
    summary
        The run that a search chose.
    progress
        Told what is being done.

    Returns
    -------
    dict or None
        ``one_stage`` and ``pipeline``, each with ``policy``, ``stages``, ``chunks``,
        ``makespan_cycles`` of the workload, ``noc_byte_hops`` of it, ``stream_requests_per_second``
        of equal requests back to back, ``most_tokens`` whose KV there is room for. None if no
        search was made, more than one stage won, or no pipeline fits.
    """
    found = summary["settings"].get("search")
    if found is None or found["chosen"]["stages"] > 1:
        return None
    pipelines = [one for one in found["tried"] if one["stages"] > 1 and "error" not in one]
    if not pipelines:
        return None
    best = min(pipelines, key=lambda one: one["cycles"])
    request = max(workload.requests, key=lambda one: one.tokens)
    stream = Workload.equal(STREAM, request.tokens, request.prefix_tokens)

    def figures(one: Mapping[str, Any]) -> dict[str, Any]:
        own = options.policy if one["policy"] == found["asked_policy"] else {}
        layout = replace(options, stages=one["stages"], chunks=one["chunks"], policy=own)
        run = emulate(wafer, model, workload, one["policy"], options=layout).summary
        try:
            many = emulate(wafer, model, stream, one["policy"], options=layout).summary
        except CapacityError:
            many = None
        return {
            "policy": one["policy"],
            "stages": one["stages"],
            "chunks": one["chunks"],
            "makespan_cycles": run["makespan_cycles"],
            "noc_byte_hops": run["noc_byte_hops"],
            "stream_requests_per_second": many and many["requests_per_second"],
            "most_tokens": most_tokens(
                wafer, model, mocap.policy.get(one["policy"], own), layout, {}
            ),
        }

    progress("what a pipeline would buy", 1.0)
    return {"one_stage": figures(found["chosen"]), "pipeline": figures(best)}
