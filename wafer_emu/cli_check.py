"""The command that carries plans out on real numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, Token

from wafer_emu.cli_options import Job, Memory, Output, Pipeline, Subject
from wafer_emu.cli_values import Count, Natural, Policies
from wafer_emu.quantities import size
from wafer_emu.terminal import Answer, Ui
from wafer_kernels.errors import CapacityError, KernelError, UsageError, WaferError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wafer_emu.model import Model

__all__ = ["check"]

SHOWN_VALUES = 8  # of an embedding


def _tokens(_: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Token ids separated by commas."""
    written = tokens[0].value
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", written):
        raise ValueError(f"{written!r} is not a list of token ids, such as 17,42")
    return tuple(int(word) for word in written.split(","))


def check(
    subject: Subject,
    pipeline: Pipeline | None = None,
    memory: Memory | None = None,
    output: Output | None = None,
    *,
    tokens: Count,
    policies: Policies,
    prefix_tokens: Natural = 0,
    score: Annotated[
        tuple[int, ...],
        Parameter(converter=_tokens, n_tokens=1, negative=(), metavar="ID,ID", show_default=False),
    ] = (),
    pool: Literal["last", "mean"] | None = None,
    ui: Annotated[Ui, Parameter(parse=False)],
) -> Answer:
    """Carry out plans on real numbers and compare all logits with a dense reference.

    Weights come from the safetensors files in the model's folder; without any they are drawn at
    random. Token ids are drawn at random. Stages: 4 at most, chunks: 4, unless asked otherwise.

    Parameters
    ----------
    tokens
        Length of the whole prompt.
    policies
        Names separated by commas; those that can move KV do, and fail if nothing moved.
    prefix_tokens
        Leading tokens whose KV is already resident; the others are computed.
    score
        Print the probabilities of these next tokens (classification by next token).
    pool
        Print an embedding: the last hidden state, or the mean of all.
    """
    job = Job.load(subject, pipeline, memory)
    if prefix_tokens >= tokens:
        raise UsageError(f"--prefix-tokens {prefix_tokens} leaves nothing of --tokens {tokens}")
    ui.progress("reading weights", 0.0)

    import mocap.policy

    for name in policies:
        mocap.policy.get(name)

    import numpy as np

    from wafer_emu.check import Question
    from wafer_emu.check import check as check_plans
    from wafer_emu.workload import Workload

    job.warn_beyond_positions(Workload.single(tokens, prefix_tokens), ui)
    token_ids = np.random.default_rng(subject.seed).integers(0, job.model.vocab_size, tokens)
    question = Question(token_ids.tolist(), prefix_tokens, score, pool)
    weights = _weights(Path(subject.model), job.model, subject.seed)
    rows = list(
        check_plans(job.wafer, job.model, weights, question, policies, job.options, ui.progress)
    )
    return Answer({"rows": rows}, lambda: _report(rows), _failure(rows))


def _weights(path: Path, model: Model, seed: int) -> dict[str, Any]:
    """All tensors of a folder's checkpoint, or random ones that the model's type holds exactly."""
    from wafer_emu.arena import storage_kind
    from wafer_emu.weights import Weights

    storage_kind(model.dtype)
    if path.is_dir() and any(path.glob("*.safetensors")):
        return dict(Weights.open(path, model))
    return dict(Weights.random(model, seed, model.dtype))


def _failure(rows: Sequence[Mapping[str, Any]]) -> WaferError | None:
    """Why the command counts as failed, if a policy did."""
    failed = [row for row in rows if not row["passed"]]
    if not failed:
        return None
    if all("error" in row for row in rows):
        reasons = "; ".join(f"{row['policy']}: {row['error']['message']}" for row in rows)
        return CapacityError(f"no policy ran: {reasons}")
    return KernelError("; ".join(f"{row['policy']}: {_reason(row)}" for row in failed))


def _reason(row: Mapping[str, Any]) -> str:
    """What did not pass."""
    if "error" in row:
        return str(row["error"]["message"])
    if row["max_relative_error"] > row["tolerance"]:
        return f"relative error {row['max_relative_error']:.1e} of at most {row['tolerance']:.0e}"
    if not row["argmax_equal"]:
        return "another token is the likeliest"
    return "no KV moved, so that nothing was shown"


def _report(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One line a policy, and what was asked about the next token."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("policy", no_wrap=True)
    for title in ("largest error", "of the largest logit", "KV moved"):
        table.add_column(title, justify="right")
    table.add_column("")
    lines: list[RenderableType] = []
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['max_absolute_error']:.2e}",
            f"{row['max_relative_error']:.1e}",
            size(row["reallocated_bytes"]),
            Text("passed", "green"),
        )
        if "scores" in row:
            shares = ", ".join(f"{token}: {share:.6f}" for token, share in row["scores"].items())
            lines.append(Text(f"{row['policy']}: probability of the next token {shares}"))
        if "embedding" in row:
            values = " ".join(f"{value:.5f}" for value in row["embedding"][:SHOWN_VALUES])
            width = len(row["embedding"])
            lines.append(Text(f"{row['policy']}: embedding of {width:,} values {values} ..."))
    note = Text("All logits of all tokens, against a dense forward pass.", "dim")
    return Group(table, *lines, note)
