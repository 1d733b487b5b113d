"""Which experts the tokens of a request choose: known only once its numbers have been computed.

Without it the clock gives every expert its even share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mocap.policy import Request
from wafer_emu.architecture import Moe
from wafer_emu.model import Model
from wafer_kernels.errors import UsageError

__all__ = ["UNKNOWN", "Routing", "refuse_routing"]

Int64 = npt.NDArray[np.int64]
UNKNOWN = -1
"""Choice of a token that was not computed: one of a resident prefix."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Experts of every token of one request, whatever chunks and tiles it passes in.

    Attributes
    ----------
    chosen
        By layer, for layers with experts: the experts of each token of the whole prompt
        (token, choice); ``UNKNOWN`` for tokens of a resident prefix.
    """

    chosen: Mapping[int, Int64]

    def loads(self, layer: int, experts: int, first: int, tokens: int) -> tuple[int, ...]:
        """Tokens that each expert of a layer gets of ``tokens`` tokens from ``first`` on."""
        rows = self.chosen[layer][first : first + tokens]
        return tuple(np.bincount(rows.ravel(), minlength=experts).tolist())


def refuse_routing(model: Model, request: Request, routing: Routing) -> None:
    """UsageError if a routing does not go with a request and the layers that are placed."""
    moe = model.moe
    if moe is None:
        raise UsageError(f"{model.name} has no experts: leave routing out")
    for layer in range(model.layers):
        if moe.is_dense(layer):
            continue
        chosen = routing.chosen.get(layer)
        shape = (request.tokens, moe.experts_per_token)
        if chosen is None or chosen.shape != shape:
            found = "nothing" if chosen is None else f"shape {chosen.shape}"
            raise UsageError(
                f"routing of request {request.index} has {found} for layer {layer}: it takes the "
                f"experts of every token and choice, shape {shape}"
            )
        _refuse_choices(moe, request, layer, chosen[request.prefix_tokens :])


def _refuse_choices(moe: Moe, request: Request, layer: int, chosen: Int64) -> None:
    """UsageError if a token chooses no expert of the layer, or one twice."""
    ordered = np.sort(chosen, axis=1)
    wrong = (ordered[:, 0] < 0) | (ordered[:, -1] >= moe.experts)
    wrong |= (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if wrong.any():
        token = int(np.argmax(wrong))
        raise UsageError(
            f"routing of request {request.index}, layer {layer}, token "
            f"{request.prefix_tokens + token}: {chosen[token].tolist()} are not "
            f"{moe.experts_per_token} different experts from 0 to {moe.experts - 1}"
        )
