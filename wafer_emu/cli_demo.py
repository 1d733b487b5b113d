"""The command that runs the main job: one real model and prompt under six policies."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from wafer_emu.cli_options import Output
from wafer_emu.cli_values import require_writable
from wafer_emu.terminal import Answer, Ui
from wafer_kernels.errors import FileError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wafer_emu.wafer import Wafer

__all__ = ["demo"]

WAFER, MODEL, TOKENS, STAGES, FRAMES = "wse-2", "llama-3-8b", 32_768, 8, 24
POLICIES = ("gpipe", "uniform", "terapipe", "lbcp", "mbkr", "mocap")
LONG_POLICIES = ("terapipe", "mbkr", "mocap")
LONG_STEP_TOKENS = 1024


def demo(
    output: Output | None = None,
    *,
    folder: Annotated[Path, Parameter(name="-o", metavar="FOLDER")] = Path("runs/demo"),
    ui: Annotated[Ui, Parameter(parse=False)],
) -> Answer:
    """Run the main job: Llama-3-8B, 32,768 tokens, WSE-2, 8 stages, six policies.

    Then one prompt longer than what terapipe can hold.

    Parameters
    ----------
    folder
        Where the run files go, one a policy.
    """
    _make(folder)
    require_writable(folder / f"{POLICIES[0]}.h5")
    ui.progress("starting", 0.0)

    from wafer_emu.emulation import compare, max_length
    from wafer_emu.model import Model
    from wafer_emu.options import Options
    from wafer_emu.wafer import Wafer
    from wafer_emu.whole_wafer import whole_wafer
    from wafer_emu.workload import Workload

    wafer, model, options = Wafer.preset(WAFER), Model.preset(MODEL), Options(stages=STAGES)
    workload = Workload.single(TOKENS)
    files = {policy: folder / f"{policy}.h5" for policy in POLICIES}
    # Spawned, not forked: a fork hangs after a parallel kernel.
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool,
        ThreadPoolExecutor(2) as beside,
    ):
        whole = beside.submit(whole_wafer, wafer, model, workload, options)
        ui.progress("longest prompt of every policy", 0.0)
        lengths = max_length(
            wafer,
            model,
            POLICIES,
            options=options,
            pool=pool,
            grain_tokens=LONG_STEP_TOKENS,
            progress=_part(ui, 0.0, 0.3),
        )
        longest = {row["policy"]: row["max_tokens"] for row in lengths}
        tokens = _between(longest["terapipe"], longest["mocap"])
        # The long prompt goes first: the others fill the pool beside its slowest plan.
        run = partial(compare, wafer, model, options=options, pool=pool)
        long_rows: Future[list[dict[str, Any]]] | None = None
        if tokens is not None:
            long_rows = beside.submit(run, Workload.single(tokens), LONG_POLICIES)
        rows = run(
            workload,
            POLICIES,
            record=files.__getitem__,
            frames=FRAMES,
            progress=_part(ui, 0.3, 1.0),
        )
    result = {
        "rows": rows,
        "whole_wafer": whole.result(),
        "max_length": lengths,
        "long_prompt": {"tokens": tokens, "rows": long_rows.result() if long_rows else []},
        "files": files,
    }
    return Answer(result, lambda: _report(result, wafer))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"the folder {folder} cannot be made: {error.strerror or error}", file=str(folder)
        ) from error


def _between(shorter: int, longer: int) -> int | None:
    """Length that ``longer`` holds and ``shorter`` does not, about midway; None without one."""
    middle = (shorter + longer) // 2 // LONG_STEP_TOKENS * LONG_STEP_TOKENS
    chosen = middle if middle > shorter else longer
    return chosen if chosen > shorter else None


def _part(ui: Ui, begin: float, end: float) -> Callable[[str, float], None]:
    """Progress of a part of the job."""
    return lambda doing, fraction: ui.progress(doing, begin + (end - begin) * fraction)


def _report(result: Mapping[str, Any], wafer: Wafer) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from wafer_emu.report import heading, stage_picture
    from wafer_emu.report_compare import compare_report, max_length_report, policy_table, refusals

    rows, long_prompt = result["rows"], result["long_prompt"]
    longest = {row["policy"]: row["max_tokens"] for row in result["max_length"]}
    parts: list[RenderableType] = [compare_report(rows, wafer, result["whole_wafer"], longest)]
    ran: Sequence[Mapping[str, Any]] = [row for row in rows if "error" not in row]
    if ran:
        parts += [heading(f"The wafer under {ran[-1]['policy']}"), stage_picture(ran[-1], wafer)]
    parts.append(max_length_report(result["max_length"]))
    if long_prompt["rows"]:
        parts += [
            heading(f"A prompt that terapipe cannot hold: {long_prompt['tokens']:,} tokens"),
            policy_table(long_prompt["rows"]),
            refusals(long_prompt["rows"]),
        ]
    else:
        parts.append(Text("No prompt fits under mocap that does not fit under terapipe.", "yellow"))
    folder = result["files"][POLICIES[0]].parent
    parts += [
        heading("What is kept"),
        Text(
            f"  {folder}/POLICY.h5: tasks, KV blocks and the SRAM of every core over time\n"
            f"  wafer-emu report {folder}/mocap.h5\n"
            f'  in Python: xarray.open_datatree("{folder}/mocap.h5")'
        ),
    ]
    return Group(*parts)
