"""What a policy is: what it is told (`Setting`), what it answers, and how it is found by name.

A policy decides how a prompt is cut into chunks and where the KV of each chunk lives. It knows
tokens, chunks, stages, bytes and cycles; regions are numbered like the stages that they run.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_origin, get_type_hints

import msgspec

from wafer_kernels.errors import ConfigError, UsageError

__all__ = [
    "Move",
    "Policy",
    "Request",
    "Setting",
    "cut",
    "get",
    "most_chunks",
    "move",
    "names",
    "register",
]

ENTRY_POINT_GROUP = "mocap.policies"
SHIPPED = {
    "gpipe": "mocap.gpipe:Gpipe",
    "uniform": "mocap.uniform:Uniform",
    "terapipe": "mocap.terapipe:Terapipe",
    "lbcp": "mocap.lbcp:Lbcp",
    "mbkr": "mocap.mbkr:Mbkr",
    "mocap": "mocap.mocap:Mocap",
    "layerwise": "mocap.layerwise:Layerwise",
    "prefill-only": "mocap.prefill_only:PrefillOnly",
    "sglang": "mocap.sglang:Sglang",
    "vllm-ascend": "mocap.vllm_ascend:VllmAscend",
    "atom": "mocap.atom:Atom",
    "seq1f1b": "mocap.seq1f1b:Seq1F1B",
}


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of `tokens`, of which the first `prefix_tokens` are already resident."""

    index: int
    tokens: int
    prefix_tokens: int = 0
    arrival_cycle: int = 0

    @property
    def new_tokens(self) -> int:
        """Tokens to compute: what the chunks sum to."""
        return self.tokens - self.prefix_tokens


@dataclass(frozen=True, slots=True)
class Move:
    """KV of `tokens` tokens of one chunk that lives in region `host`, from when it is written.

    The KV is that of the layers of stage `stage`, its home. A chunk may have several moves, to
    different hosts and at different times; what they leave stays at home. With `pushed` the KV is
    written at home and pushed to its host while the home works on that later chunk of the request.
    """

    request: int
    stage: int
    chunk: int
    tokens: int
    host: int
    pushed: int | None = None

    @property
    def leaves(self) -> int:
        """Chunk of the request with which the KV leaves its home."""
        return self.chunk if self.pushed is None else self.pushed


@dataclass(frozen=True, slots=True)
class Setting:
    """What a policy is told about the machine, the model and the user's wishes.

    Attributes
    ----------
    stages
        Pipeline stages, and regions.
    chunks
        Chunks wanted for a request; an upper bound for dynamic programs.
    page_tokens
        Chunks and moves are multiples of this, remainders apart [tokens].
    cost
        Cycles of the slowest stage on (chunk tokens, prefix tokens), without moves. It may have
        an attribute ``table(chunks, prefixes)`` that does the same for two int64 arrays of one
        shape; tables are then filled by one call.
    stage_cost
        Cycles of one stage on (stage, chunk tokens, prefix tokens).
    kv_bytes_per_token
        KV of all layers of each stage (stage,) [B].
    kv_capacity_bytes
        Room for KV in the region of each stage, resident prefixes deducted (stage,) [B].
    hops
        Distance between regions (stage, stage) [hops].
    link_bytes_per_cycle
        Bandwidth between two regions [B/cycle].
    chunk_tokens
        Chunk size wanted instead of a count [tokens].
    chunk_vector
        The chunks themselves, wanted instead of a count [tokens].
    layers
        Layers of each stage (stage,), for policies that free KV layer by layer; empty: unknown,
        and a stage is taken as one layer.
    """

    stages: int
    chunks: int
    page_tokens: int
    cost: Callable[[int, int], int]
    stage_cost: Callable[[int, int, int], int]
    kv_bytes_per_token: tuple[int, ...]
    kv_capacity_bytes: tuple[int, ...]
    hops: tuple[tuple[int, ...], ...]
    link_bytes_per_cycle: int
    chunk_tokens: int | None = None
    chunk_vector: tuple[int, ...] | None = None
    layers: tuple[int, ...] = ()

    def chunk_count(self, tokens: int) -> int:
        """Chunks wanted for `tokens`: as many as `chunk_tokens` needs, else `chunks`."""
        return -(-tokens // self.chunk_tokens) if self.chunk_tokens else self.chunks

    def base_tokens(self, tokens: int) -> int:
        """First chunk wanted by rules that start from a size: `chunk_tokens`, else the mean."""
        return min(tokens, self.chunk_tokens or -(-tokens // self.chunks))

    @property
    def local_tokens(self) -> int:
        """Longest request whose KV fits at home on every stage [tokens]."""
        return min(
            capacity // size if size else capacity
            for capacity, size in zip(self.kv_capacity_bytes, self.kv_bytes_per_token, strict=True)
        )


class Policy:
    """Base of all policies; a subclass overrides what it decides.

    The engine reads the declarations below and never a name. Every other annotated attribute is
    an option: a user sets it by name, and its annotation is enforced.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    stage_count: ClassVar[int | None] = None
    kv_lifetime: ClassVar[Literal["request", "layer"]] = "request"
    streams_tokens: ClassVar[bool] = False  # an uncut request passes a stage by token tiles
    uses: ClassVar[frozenset[str]] = frozenset({"chunks", "chunk_tokens"})
    rivals: ClassVar[tuple[str, ...]] = ()  # taken instead by a joint search, where faster

    def order(self, requests: Sequence[Request]) -> list[Request]:
        """Waiting requests in the order of service: first come, first served."""
        return sorted(requests, key=lambda request: (request.arrival_cycle, request.index))

    def partition(self, request: Request, setting: Setting) -> list[int]:
        """Chunk sizes, which sum to ``request.new_tokens``: the whole request by default."""
        return [request.new_tokens]

    def reallocate(self, cuts: Sequence[Sequence[int]], setting: Setting) -> list[Move]:
        """KV that lives away from home, for chunk sizes `cuts` (request, chunk): none."""
        return []

    def most_chunks(self, wanted: int) -> int | None:
        """Chunks that :meth:`partition` makes at most where so many are wanted; None: no bound.

        A joint search rules plans out by it. What a class says holds for its own `partition`, not
        for one that a subclass puts in its place.
        """
        return 1 if type(self).partition is Policy.partition else None

    def frees_by_layer(self) -> bool:
        """Whether KV is taken and freed layer by layer, instead of a whole task's at once."""
        return self.kv_lifetime == "layer"

    def attends_remotely(self) -> bool:
        """Whether queries go to KV that lives away from home, instead of the KV to them."""
        return False

    def asked_tile(self) -> int | None:
        """Longest token tile of a request that streams, where one is asked for [tokens]."""
        return None

    @classmethod
    def option_types(cls) -> dict[str, Any]:
        """Type of every option of this policy, by name."""
        declared = Policy.__annotations__
        return {
            name: hint
            for name, hint in get_type_hints(cls, include_extras=True).items()
            if name not in declared and not name.startswith("_") and get_origin(hint) != ClassVar
        }

    def options(self) -> dict[str, object]:
        """Value of every option of this policy, by name."""
        return {name: getattr(self, name) for name in self.option_types()}


PolicyClass = TypeVar("PolicyClass", bound=type[Policy])
_registered: dict[str, type[Policy]] = {}


def register(policy: PolicyClass) -> PolicyClass:
    """Make a policy class known under its `name`; usable as a decorator.

    Raises
    ------
    ConfigError
        If it has no name, or the name of another policy.
    """
    if not policy.name:
        raise ConfigError(f"policy {policy.__qualname__} has no name: set the attribute `name`")
    if policy.name in SHIPPED or _registered.get(policy.name, policy) is not policy:
        raise ConfigError(f"policy {policy.name!r} exists already: choose another name")
    _registered[policy.name] = policy
    return policy


def names() -> list[str]:
    """Names of all policies: shipped, registered, installed by other distributions."""
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return list(dict.fromkeys([*SHIPPED, *_registered, *sorted(point.name for point in found)]))


def get(name: str, options: Mapping[str, object] | None = None) -> Policy:
    """Return a new policy of this name, with `options` set.

    Raises
    ------
    UsageError
        If no policy has this name.
    ConfigError
        If it has no such option, or the option no such value.
    """
    policy_class = _class_of(name)
    hints = policy_class.option_types()
    values = {}
    for option, value in (options or {}).items():
        if option not in hints:
            raise ConfigError(
                f"policy {name!r} has no option {option!r}{_instead(option, hints)}",
                policy=name,
                option=option,
            )
        try:
            values[option] = msgspec.convert(value, hints[option])
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"policy.{option}={value!r} is not possible for {name!r}: {error}"
                f"{_choices(hints[option])}",
                policy=name,
                option=option,
            ) from error
    if is_dataclass(policy_class):
        return policy_class(**values)
    policy = policy_class()
    for option, value in values.items():
        setattr(policy, option, value)
    return policy


def cut(policy: Policy, request: Request, setting: Setting) -> list[int]:
    """Chunk sizes of a request under a policy, checked.

    Raises
    ------
    ConfigError
        If the policy's answer is not a list of positive integers that sum to the new tokens.
    """
    try:
        chunks = [operator.index(size) for size in policy.partition(request, setting)]
    except TypeError as error:
        raise ConfigError(
            f"policy {policy.name!r} cuts into what is no integer: {error}"
        ) from error
    if min(chunks, default=0) < 1 or sum(chunks) != request.new_tokens:
        raise ConfigError(
            f"policy {policy.name!r} cuts request {request.index} of {request.new_tokens} new "
            f"tokens into {chunks} (sum {sum(chunks)}): sizes must be positive and sum to it",
            policy=policy.name,
            request=request.index,
            chunk_tokens=chunks,
        )
    return chunks


def most_chunks(policy: Policy, wanted: int) -> int | None:
    """Chunks of a request at most; what a policy says of another's `partition` is void."""
    says, does = (
        next(index for index, each in enumerate(type(policy).__mro__) if name in vars(each))
        for name in ("most_chunks", "partition")
    )
    return policy.most_chunks(wanted) if says <= does else Policy.most_chunks(policy, wanted)


def move(policy: Policy, cuts: Sequence[Sequence[int]], setting: Setting) -> list[Move]:
    """KV that lives away from home under a policy, checked.

    Raises
    ------
    ConfigError
        If a move names what does not exist, stays at home, or moves more tokens than there are.
    """
    moves = list(policy.reallocate(cuts, setting))
    moved: dict[tuple[int, int, int], int] = {}
    for one in moves:
        block = (one.request, one.stage, one.chunk)
        exists = 0 <= one.request < len(cuts) and 0 <= one.chunk < len(cuts[one.request])
        regions = 0 <= one.stage < setting.stages and 0 <= one.host < setting.stages
        moved[block] = moved.get(block, 0) + one.tokens
        if not (exists and regions and one.host != one.stage and one.tokens > 0) or (
            moved[block] > cuts[one.request][one.chunk]
            or not one.chunk <= one.leaves < len(cuts[one.request])
        ):
            raise ConfigError(f"policy {policy.name!r} makes an impossible move: {one}")
    return moves


def _class_of(name: str) -> type[Policy]:
    if name in SHIPPED:
        module, _, attribute = SHIPPED[name].partition(":")
        shipped: type[Policy] = getattr(importlib.import_module(module), attribute)
        return shipped
    if name in _registered:
        return _registered[name]
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            loaded = point.load()
            if not (isinstance(loaded, type) and issubclass(loaded, Policy)):
                raise ConfigError(f"entry point {point.value!r} is not a subclass of mocap.Policy")
            return loaded
    known = names()
    raise UsageError(f"there is no policy {name!r}{_instead(name, known)}", policy=name)


def _instead(word: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(word, known)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; there are {', '.join(known)}" if known else "; it has none"


def _choices(hint: Any) -> str:
    values = getattr(hint, "__args__", ()) if get_origin(hint) is Literal else ()
    return f"; choose from {', '.join(map(str, values))}" if values else ""
