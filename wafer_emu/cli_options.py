"""Options that commands share, and the job that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from cyclopts import Group, Parameter

from wafer_emu.cli_values import (
    Bytes,
    Count,
    CountOrAuto,
    Dtype,
    File,
    Grid,
    Name,
    Natural,
    Positive,
    Requests,
    Sizes,
    Switch,
    Tier,
)
from wafer_kernels.errors import UsageError

if TYPE_CHECKING:
    from wafer_emu.model import Model
    from wafer_emu.options import Options
    from wafer_emu.terminal import Ui
    from wafer_emu.wafer import Wafer
    from wafer_emu.workload import Workload

__all__ = ["Job", "Memory", "Output", "Pipeline", "Prompt", "Subject"]


def _group(name: str, place: int) -> Parameter:
    """Options that stand together, and at one place, in every ``--help``."""
    return Parameter(name="*", group=Group(name, sort_key=place))


@_group("Subject", 1)
@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is emulated.

    Parameters
    ----------
    wafer
        Name of a preset (show wafers), or FILE.toml.
    model
        Name of a preset (show models), a Hugging Face config.json, or its folder.
    set
        Changes wafer.PATH, model.PATH or policy.PATH to a TOML value. Repeatable.
    seed
        Seed of whatever is drawn at random.
    """

    wafer: Name
    model: Name
    set: Annotated[
        tuple[str, ...], Parameter(negative=(), show_default=False, metavar="PATH=VALUE")
    ] = ()
    seed: Natural = 0

    def changes(self, subject: str) -> dict[str, str]:
        """TOML texts by path that ``--set`` gives for ``wafer``, ``model`` or ``policy``.

        Raises
        ------
        UsageError
            If a ``--set`` names none of the three, or no value.
        """
        found = {}
        for change in self.set:
            path, equals, value = change.partition("=")
            owner, dot, inner = path.partition(".")
            if owner not in {"wafer", "model", "policy"} or not (equals and dot and inner):
                raise UsageError(
                    f"--set {change}: expected wafer.PATH=VALUE, model.PATH=VALUE or "
                    "policy.PATH=VALUE, such as --set wafer.core.sram_bytes=65536"
                )
            if owner == subject:
                found[inner] = value
        return found


@_group("Prompt", 2)
@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the model is asked.

    Parameters
    ----------
    tokens
        Length of the whole prompt.
    prefix_tokens
        Leading tokens whose KV is already resident; the others are computed.
    requests
        Number of equal requests.
    workload
        Trace of requests: CSV or JSON lines, instead of --tokens.
    head
        Only the first N requests of the trace.
    compress
        The trace's requests arrive X times as fast.
    prefix_reuse
        Token blocks that an earlier request of the trace had are not computed again.
    """

    tokens: Count | None = None
    prefix_tokens: Natural = 0
    requests: Requests = 1
    workload: File | None = None
    head: Count | None = None
    compress: Positive = 1.0
    prefix_reuse: Switch = False

    def load(self) -> Workload:
        """Read or make the requests; UsageError if both or neither way is given."""
        from wafer_emu.workload import Workload

        if (self.tokens is None) == (self.workload is None):
            both = "not both" if self.tokens else "and neither was given"
            raise UsageError(f"the prompt is given by --tokens or by --workload, {both}")
        if self.tokens is not None:
            if self.head is not None or self.compress != 1 or self.prefix_reuse:
                raise UsageError(
                    "--head, --compress and --prefix-reuse belong to --workload, not to --tokens"
                )
            return Workload.equal(self.requests, self.tokens, self.prefix_tokens)
        if self.requests != 1 or self.prefix_tokens:
            raise UsageError("--requests and --prefix-tokens belong to --tokens, not to --workload")
        assert self.workload is not None
        requests = Workload.from_file(self.workload)
        if self.head is not None:
            requests = requests.head(self.head)
        if self.compress != 1:
            requests = requests.compressed(self.compress)
        return requests.with_prefix_reuse() if self.prefix_reuse else requests


@_group("Pipeline", 3)
@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How the wafer is shared out, and the prompt cut.

    Parameters
    ----------
    stages
        Pipeline stages. Default: the policy's own count, else 16, capped by layers and fabric.
        auto: the best that a search with the emulator itself finds.
    region
        Cores of a stage, ROWSxCOLUMNS. Default: the fabric cut into near-equal regions.
    chunks
        Chunks of a request; for terapipe an upper bound. Default: as many as stages. auto: the
        best that a search finds.
    chunk_tokens
        Size of a chunk, instead of --chunks.
    chunk_vector
        Sizes of all chunks, instead of --chunks: 4096,3072,1024.
    layers
        Emulate the first K layers and scale to the whole model.
    placement
        Order of the regions on the wafer.
    no_causal_skip
        Charge the masked half of attention too.
    no_contention
        Give every hand-off and KV move the links between regions alone.
    objective
        What auto is for: least time to first token, or most requests per second.
    search_seconds
        Time after which auto tries no further plan [s].
    """

    stages: CountOrAuto | None = None
    region: Grid | None = None
    chunks: CountOrAuto | None = None
    chunk_tokens: Count | None = None
    chunk_vector: Sizes | None = None
    layers: Count | None = None
    placement: Literal["serpentine", "folded-ring"] = "serpentine"
    no_causal_skip: Switch = False
    no_contention: Switch = False
    objective: Literal["latency", "throughput"] = "latency"
    search_seconds: Positive = 20.0


@_group("Memory", 4)
@dataclass(frozen=True, kw_only=True)
class Memory:
    """Where weights, KV and waiting activations live.

    Parameters
    ----------
    weights_tier
        Memory of the weights; auto: SRAM if they fit, else die DRAM if there is any.
    kv_tier
        Memory of the KV.
    activations_tier
        Memory of activations that wait: hand-off buffers, and what a chunk has beyond the tile in
        work.
    weights_dtype
        Type of the stored weights. Default: the model's.
    kv_dtype
        Type of the stored KV. Default: the model's.
    kv_budget
        KV capacity per stage [bytes]; weights and activations are then ignored.
    embedding
        Where embedding rows come from.
    """

    weights_tier: Tier = "auto"
    kv_tier: Tier = "auto"
    activations_tier: Tier = "auto"
    weights_dtype: Dtype | None = None
    kv_dtype: Dtype | None = None
    kv_budget: Bytes | None = None
    embedding: Literal["host", "first-stage"] = "host"


@_group("Output", 5)
@dataclass(frozen=True, kw_only=True)
class Output:
    """How the answer is given; the command line itself reads both.

    Parameters
    ----------
    json
        Print one JSON document instead of a report.
    quiet
        No progress and no warnings on stderr.
    """

    json: Switch = False
    quiet: Switch = False


class Job(NamedTuple):
    """Wafer, model and options of a command line, read and checked."""

    wafer: Wafer
    model: Model
    options: Options

    @classmethod
    def load(cls, subject: Subject, pipeline: Pipeline | None, memory: Memory | None) -> Job:
        """Read wafer and model and apply ``--set`` (errors as their own readers')."""
        from wafer_emu.model import Model
        from wafer_emu.options import Options
        from wafer_emu.strict import toml_values
        from wafer_emu.wafer import Wafer

        wafer, model = Wafer.load(subject.wafer), Model.load(subject.model)
        if changes := subject.changes("wafer"):
            wafer = wafer.with_overrides(changes)
        if changes := subject.changes("model"):
            model = model.with_overrides(changes)
        policy = toml_values(subject.changes("policy"), "--set policy")
        asked = {**vars(pipeline or Pipeline()), **vars(memory or Memory())}
        skip, share = not asked.pop("no_causal_skip"), not asked.pop("no_contention")
        options = Options(
            **asked, causal_skip=skip, contention=share, seed=subject.seed, policy=policy
        )
        return cls(wafer, model, options)

    def warn_beyond_positions(self, workload: Workload, ui: Ui) -> None:
        """Say if a prompt is longer than the model was made for."""
        longest = max(request.tokens for request in workload.requests)
        if longest > self.model.max_positions:
            ui.warn(
                f"{longest:,} tokens are more than the {self.model.max_positions:,} positions "
                f"that {self.model.name} was made for"
            )
