"""The comparison that a pipeline owes: the whole wafer as one stage, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wafer_emu.emulation import Progress, emulate
from wafer_emu.model import Model
from wafer_emu.options import CHUNK_OPTIONS, Options
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError

__all__ = ["whole_wafer"]

POLICY = "layerwise"
KEYS = ("policy", "makespan_cycles", "makespan_seconds", "requests_per_second", "tokens_per_second")


def whole_wafer(
    wafer: Wafer,
    model: Model,
    workload: Workload,
    options: Options,
    rows: Sequence[Mapping[str, Any]] = (),
    progress: Progress = lambda what, share: None,
) -> dict[str, Any] | None:
    """Time of the same work on one stage over the whole wafer; None if it does not fit there.

    Parameters
    ----------
    wafer, model, workload, options
        What the pipelines were asked; how they are cut and laid out does not apply.
    rows
        Results of the policies that were compared: a policy of one stage among them is taken as
        it is.
    progress
        Told that this is being done.
    """
    for row in rows:
        if "error" not in row and row["settings"]["stages"] == 1:
            return {key: row[key] for key in KEYS}
    progress("the whole wafer as one stage", 1.0)
    uncut: dict[str, Any] = dict.fromkeys(CHUNK_OPTIONS)
    one = replace(options, stages=None, region=None, policy={}, **uncut)
    try:
        summary = emulate(wafer, model, workload, POLICY, options=one).summary
    except CapacityError:
        return None
    return {key: summary[key] for key in KEYS}
