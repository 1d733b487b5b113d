"""Commands that emulate a prefill, and the one that looks at a kept run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from wafer_emu.cli_options import Job, Memory, Output, Pipeline, Prompt, Subject
from wafer_emu.cli_values import Name, Natural, Policies, require_writable
from wafer_emu.terminal import Answer, Ui
from wafer_kernels.errors import CapacityError, FileError

__all__ = ["compare", "max_length", "report", "run"]

Terminal = Annotated[Ui, Parameter(parse=False)]


def run(
    subject: Subject,
    prompt: Prompt | None = None,
    pipeline: Pipeline | None = None,
    memory: Memory | None = None,
    output: Output | None = None,
    *,
    policy: Name = "mocap",
    out: Annotated[Path | None, Parameter(name="-o", metavar="FILE")] = None,
    frames: Natural = 64,
    ui: Terminal,
) -> Answer:
    """Emulate one prefill under one policy.

    Parameters
    ----------
    policy
        How the prompt is cut and where KV lives (show policies).
    out
        Keep the full state in this HDF5 file.
    frames
        Instants at which the kept state shows every core.
    """
    if out is not None:
        require_writable(out)
    job, workload = Job.load(subject, pipeline, memory), (prompt or Prompt()).load()
    _require_policies([policy])
    job.warn_beyond_positions(workload, ui)
    ui.progress(f"starting {policy}", 0.0)

    from wafer_emu.emulation import emulate
    from wafer_emu.pipeline_offer import pipeline_offer
    from wafer_emu.report import run_report

    done = emulate(
        job.wafer,
        job.model,
        workload,
        policy,
        options=job.options,
        record=out,
        frames=frames,
        progress=ui.progress,
    )
    offer = pipeline_offer(job.wafer, job.model, workload, job.options, done.summary, ui.progress)
    result = done.summary if offer is None else {**done.summary, "pipeline_offer": offer}
    return Answer(result, lambda: run_report(done.summary, job.wafer, offer))


def compare(
    subject: Subject,
    prompt: Prompt | None = None,
    pipeline: Pipeline | None = None,
    memory: Memory | None = None,
    output: Output | None = None,
    *,
    policies: Policies,
    out: Annotated[Path | None, Parameter(name="-o", metavar="FOLDER")] = None,
    frames: Natural = 64,
    ui: Terminal,
) -> Answer:
    """Emulate the same work under several policies, side by side.

    Parameters
    ----------
    policies
        Names separated by commas; ratios are over the first.
    out
        Keep the full state of every policy in this folder, as POLICY.h5.
    frames
        Instants at which the kept state shows every core.
    """
    if out is not None:
        require_writable(out / f"{policies[0]}.h5")
    job, workload = Job.load(subject, pipeline, memory), (prompt or Prompt()).load()
    _require_policies(policies)
    job.warn_beyond_positions(workload, ui)
    ui.progress(f"starting {policies[0]}", 0.0)

    from wafer_emu.emulation import compare as emulate_each
    from wafer_emu.report_compare import compare_report
    from wafer_emu.whole_wafer import whole_wafer

    rows = emulate_each(
        job.wafer,
        job.model,
        workload,
        policies,
        options=job.options,
        record=None if out is None else lambda policy: out / f"{policy}.h5",
        frames=frames,
        progress=ui.progress,
    )
    refused = [row for row in rows if "error" in row]
    if len(refused) == len(rows):
        reasons = "; ".join(f"{row['policy']}: {row['error']['message']}" for row in refused)
        nothing = CapacityError(f"no policy ran: {reasons}")
        return Answer({"rows": rows}, lambda: compare_report(rows, job.wafer), nothing)
    whole = whole_wafer(job.wafer, job.model, workload, job.options, rows, ui.progress)
    result = {"rows": rows, "whole_wafer": whole}
    return Answer(result, lambda: compare_report(rows, job.wafer, whole))


def max_length(
    subject: Subject,
    prompt: Prompt | None = None,
    pipeline: Pipeline | None = None,
    memory: Memory | None = None,
    output: Output | None = None,
    *,
    policies: Policies,
    ui: Terminal,
) -> Answer:
    """Find the longest prompt that fits, per policy, and what limits it.

    Parameters
    ----------
    policies
        Names separated by commas; ratios are over the first.
    """
    job, prompt = Job.load(subject, pipeline, memory), prompt or Prompt()
    _require_policies(policies)
    if prompt.tokens is not None or prompt.workload is not None or prompt.requests != 1:
        ui.warn("max-length finds the length of one prompt: of the prompt options it uses only "
                "--prefix-tokens")  # fmt: skip
    ui.progress(f"starting {policies[0]}", 0.0)

    from wafer_emu.emulation import max_length as find_longest
    from wafer_emu.report_compare import max_length_report

    rows = find_longest(
        job.wafer,
        job.model,
        policies,
        options=job.options,
        prefix_tokens=prompt.prefix_tokens,
        progress=ui.progress,
    )
    return Answer({"rows": rows}, lambda: max_length_report(rows))


def report(file: Path, /, output: Output | None = None, *, ui: Terminal) -> Answer:
    """Show the report of a kept run.

    Parameters
    ----------
    file
        HDF5 file that run -o, compare -o or demo wrote.
    """
    ui.progress("reading", 0.0)

    from wafer_emu.report import run_report
    from wafer_emu.state import open_run
    from wafer_emu.wafer import Wafer

    with open_run(file) as tree:
        summary, configuration = tree.attrs.get("summary"), tree.attrs.get("configuration")
    if summary is None or configuration is None:
        raise FileError(
            f"{file} holds no summary, its run was interrupted: read its tables with xarray, or "
            "repeat the run",
            file=str(file),
        )
    result, wafer = json.loads(summary), Wafer.from_dict(json.loads(configuration)["wafer"])
    return Answer(result, lambda: run_report(result, wafer))


def _require_policies(names: Policies | list[str]) -> None:
    """UsageError with near names, before any work, if a policy does not exist."""
    import mocap.policy

    for name in names:
        mocap.policy.get(name)
