"""What numbers start from and come to: tokens and resident prefixes in, logits and KV out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from wafer_emu.dense import forward
from wafer_emu.plan import Plan
from wafer_emu.routing import UNKNOWN, Routing
from wafer_kernels.errors import UsageError

__all__ = ["Numbers", "Prompt", "Values", "prompts"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


@dataclass
class Values:
    """What one request came to.

    Attributes
    ----------
    logits
        Of the last token (1, vocabulary), or of all computed tokens (tokens, vocabulary).
    hidden
        States after the final norm, of the same tokens (tokens, hidden).
    kv
        What each layer kept of every token, prefix included: keys, then values, head by head, or
        latents (tokens, elements).
    """

    logits: Float32
    hidden: Float32
    kv: list[Float32]


@dataclass
class Numbers:
    """Values of all requests, and what the run did to the memories.

    Attributes
    ----------
    values
        Of each request.
    routing
        Of each request, the experts that its tokens chose; empty if the model has none.
    peak_bytes
        Most bytes that each core of each stage ever held (core,).
    activation_bytes
        Most bytes of live activations on each core of each stage (core,).
    compactions
        How often live activations had to be moved together for lack of an undivided gap.
    """

    values: list[Values]
    routing: list[Routing]
    peak_bytes: list[Int64]
    activation_bytes: list[Int64]
    compactions: int


@dataclass
class Prompt:
    """A request on its way: its tokens, the KV of its resident prefix, and results so far."""

    tokens: Int64
    prefix_kv: Sequence[Float32]
    logits: list[Float32] = field(default_factory=list)
    hidden: list[Float32] = field(default_factory=list)
    kv: dict[int, Float32] = field(default_factory=dict)
    chosen: dict[int, Int64] = field(default_factory=dict)

    @property
    def prefix(self) -> int:
        """Tokens whose KV is resident."""
        return len(self.prefix_kv[0]) if self.prefix_kv else 0

    def choose(self, layer: int, first: int, chosen: Int64) -> None:
        """Note the experts (token, choice) of tokens from ``first`` on in a layer."""
        if layer not in self.chosen:
            self.chosen[layer] = np.full((self.tokens.size, chosen.shape[1]), UNKNOWN)
        self.chosen[layer][first : first + len(chosen)] = chosen

    def values(self) -> Values:
        """Results of all chunks together."""
        return Values(
            np.concatenate(self.logits),
            np.concatenate(self.hidden),
            [self.kv[layer] for layer in sorted(self.kv)],
        )


def prompts(
    plan: Plan,
    weights: Mapping[str, Float32],
    token_ids: Sequence[Sequence[int]],
    prefix_kv: Sequence[Sequence[Float32]] | None,
) -> list[Prompt]:
    """Tokens and prefixes in the order of service.

    Raises
    ------
    UsageError
        If there are too few or too many, or a token is none of the vocabulary.
    """
    model, result = plan.deployment.model, []
    if len(token_ids) and np.ndim(token_ids[0]) == 0:
        token_ids = [token_ids]  # type: ignore[list-item]
    if len(token_ids) != len(plan.requests):
        raise UsageError(f"token_ids of {len(token_ids)} requests, there are {len(plan.requests)}")
    for request in plan.requests:
        tokens = np.asarray(token_ids[request.index], np.int64)
        if tokens.size != request.tokens or tokens.min() < 0 or tokens.max() >= model.vocab_size:
            raise UsageError(
                f"request {request.index} has {request.tokens} tokens from 0 to "
                f"{model.vocab_size - 1}, its token_ids are {tokens.size} from {tokens.min()} to "
                f"{tokens.max()}"
            )
        resident: Sequence[Float32] = ()
        if request.prefix_tokens and prefix_kv is None:
            resident = forward(model, weights, tokens[: request.prefix_tokens].tolist()).kv
        elif request.prefix_tokens and prefix_kv is not None:
            resident = [layer[: request.prefix_tokens] for layer in prefix_kv[request.index]]
        kept = [np.ascontiguousarray(layer, np.float32) for layer in resident]
        result.append(Prompt(tokens, kept))
    return result
