"""The work: prompts with their lengths, resident prefixes and arrivals, made up or from a trace."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from wafer_emu.workload_file import Row, rows_of_file
from wafer_kernels.errors import ConfigError

__all__ = ["MAX_REQUESTS", "MAX_TOKENS", "Request", "Workload"]

MAX_TOKENS = 16_777_216
MAX_REQUESTS = 1_000_000


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt.

    Attributes
    ----------
    index
        Place in the workload, by arrival.
    tokens
        Length of the whole prompt.
    prefix_tokens
        Leading tokens whose KV is resident; the others are computed.
    arrival_seconds
        Since the start of the workload [s].
    prefix_blocks
        Identities of the prompt's token blocks; equal identities mean equal prompts up to there.
    """

    index: int
    tokens: int
    prefix_tokens: int = 0
    arrival_seconds: float = 0.0
    prefix_blocks: tuple[int, ...] = ()

    @property
    def computed_tokens(self) -> int:
        """Tokens that the prefill computes."""
        return self.tokens - self.prefix_tokens


class Workload(msgspec.Struct, frozen=True):
    """Requests in order of arrival, and where they come from.

    Examples
    --------
    >>> Workload.equal(3, tokens=4096).requests[2].tokens
    4096
    """

    requests: tuple[Request, ...]
    source: str

    @classmethod
    def single(cls, tokens: int, prefix_tokens: int = 0) -> Workload:
        """One request at time 0."""
        return cls.equal(1, tokens, prefix_tokens)

    @classmethod
    def equal(cls, requests: int, tokens: int, prefix_tokens: int = 0) -> Workload:
        """Equal requests, all there at time 0.

        Raises
        ------
        ConfigError
            If a count is out of its range.
        """
        if not 1 <= requests <= MAX_REQUESTS:
            raise ConfigError(f"requests = {requests}: expected 1 to {MAX_REQUESTS:,}")
        fault = _length_fault(tokens, prefix_tokens)
        if fault:
            raise ConfigError(fault)
        return cls(
            tuple(
                Request(index=index, tokens=tokens, prefix_tokens=prefix_tokens)
                for index in range(requests)
            ),
            f"{requests} x {tokens} tokens",
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Workload:
        """Requests of a trace.

        The content tells the form: Mooncake JSON lines (``timestamp`` [ms], ``input_length``,
        ``hash_ids``), an Azure LLM trace in CSV (``TIMESTAMP``, ``ContextTokens``), or a CSV with
        ``tokens`` and, if wanted, ``prefix_tokens`` and ``arrival_seconds``. Azure's times count
        from its first request.

        Raises
        ------
        FileError
            If the file cannot be read.
        ConfigError
            Names file and line of the first row that is wrong.
        """
        requests = [_request(row, f"{path}:{line}") for line, row in rows_of_file(Path(path))]
        if not 1 <= len(requests) <= MAX_REQUESTS:
            raise ConfigError(f"{path}: {len(requests)} requests: expected 1 to {MAX_REQUESTS:,}")
        return cls(_by_arrival(requests), str(path))

    def compressed(self, factor: float) -> Workload:
        """The same requests arriving ``factor`` times as fast."""
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"compression factor {factor}: expected a number above 0")
        return Workload(
            tuple(
                msgspec.structs.replace(one, arrival_seconds=one.arrival_seconds / factor)
                for one in self.requests
            ),
            f"{self.source}, arrivals {factor:g}x as fast",
        )

    def head(self, count: int) -> Workload:
        """The first ``count`` requests."""
        if not 1 <= count <= len(self.requests):
            raise ConfigError(f"first {count} requests: there are 1 to {len(self.requests)}")
        return Workload(self.requests[:count], f"{self.source}, first {count}")

    def with_prefix_reuse(self, block_tokens: int = 512) -> Workload:
        """Requests whose leading blocks an earlier request had do not compute them again.

        All KV stays resident for ever, which bounds what reuse can give. One token at least
        remains to compute, since its hidden state is the answer.
        """
        seen: set[int] = set()
        requests = []
        for one in self.requests:
            hits = next(
                (k for k, block in enumerate(one.prefix_blocks) if block not in seen),
                len(one.prefix_blocks),
            )
            seen.update(one.prefix_blocks)
            resident = min(hits * block_tokens, one.tokens - 1)
            requests.append(
                msgspec.structs.replace(one, prefix_tokens=max(one.prefix_tokens, resident))
            )
        return Workload(tuple(requests), f"{self.source}, prefixes reused")


def _by_arrival(requests: list[Request]) -> tuple[Request, ...]:
    ordered = sorted(requests, key=lambda one: one.arrival_seconds)
    return tuple(msgspec.structs.replace(one, index=index) for index, one in enumerate(ordered))


def _request(row: Row, where: str) -> Request:
    fault = _length_fault(row.tokens, row.prefix_tokens)
    if not fault and not (math.isfinite(row.arrival_seconds) and row.arrival_seconds >= 0):
        fault = f"arrival_seconds = {row.arrival_seconds}: expected 0 or later"
    if fault:
        raise ConfigError(f"{where}: {fault}")
    return Request(index=0, **row._asdict())


def _length_fault(tokens: int, prefix_tokens: int) -> str | None:
    if not 1 <= tokens <= MAX_TOKENS:
        return f"tokens = {tokens}: expected 1 to {MAX_TOKENS:,}"
    if not 0 <= prefix_tokens < tokens:
        return f"prefix_tokens = {prefix_tokens}: expected 0 to {tokens - 1}, below tokens"
    return None
