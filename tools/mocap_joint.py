"""Stages and chunks chosen together, beside every rival at its own best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mocap.policy
from tools.mocap_bench import Bench
from tools.tables import Row, binds
from wafer_emu.options import Options
from wafer_emu.search import search
from wafer_emu.workload import Workload
from wafer_kernels.errors import CapacityError

__all__ = ["joint"]

ASKED = "mocap"
PATIENCE = 8  # times as long as the policy asked for a rival may search


def joint(bench: Bench, lengths: Sequence[int], options: Options | None = None) -> Iterator[Row]:
    """What `--stages auto --chunks auto` finds for mocap, and for each rival asked for alone.

    Mocap has the search time of ``options``, rivals have more. ``left``: candidates for which time
    was out, 0 where the answer is proven the best of the family.
    """
    quick = options or Options(stages="auto", chunks="auto")
    patient = replace(quick, search_seconds=PATIENCE * quick.search_seconds)
    for tokens in lengths:
        workload, reference = Workload.single(tokens), None
        for name in (ASKED, *mocap.policy.get(ASKED).rivals):
            policy = mocap.policy.get(name)
            row: Row = {"model": bench.model.name, "tokens": tokens, "asked for": name}
            asked = quick if name == ASKED else patient
            try:
                found = search(bench.wafer, bench.model, workload, policy, asked, {}).tried
            except CapacityError as error:
                yield {**row, "binds": binds(error)}
                continue
            chosen, seconds = found["chosen"], found["chosen"]["cycles"] / bench.wafer.core.clock_hz
            reference = seconds if name == ASKED else reference
            yield {
                **row,
                "plan of": chosen["policy"],
                "N": chosen["stages"],
                "M": chosen["chunks"],
                "latency [s]": seconds,
                "over mocap": seconds / reference if reference else None,
                "ran": len(found["tried"]),
                "ruled out": sum(found["ruled_out"].values()),
                "left": sum(found["left"].values()),
            }
