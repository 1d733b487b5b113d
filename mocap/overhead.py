"""The price of moves as LBCP sees it: the three-case overhead o(s, c).

MOCAP (arXiv 2606.22968) writes the cases ``s < p1``, ``p1 <= s < p2`` and ``s >= p2``; what s and
the thresholds are is not public. Here s is the position after the chunk, and three readings are
offered:

``a``
    None; write to the partner what the home cannot hold; write it and read back what is there.
``b``
    None; the link is shared with what the partner sends here; own writes and reads as in ``a``.
``c``
    Phases of the pair: fill, when the partner has not begun; steady, write; drain, write and read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from mocap.partition import Cost
from mocap.policy import Setting
from mocap.reallocation import Trigger

__all__ = ["Overhead", "Reading", "expected", "three_case", "with_overhead"]

Reading = Literal["a", "b", "c"]
Overhead = Callable[[int, int], int]  # (prefix tokens, chunk tokens) -> cycles


def with_overhead(cost: Cost, overhead: Overhead) -> Cost:
    """Chunk cost with the price of moves: ``t(c, p) + o(p, c)``."""
    return lambda chunk, prefix: cost(chunk, prefix) + overhead(prefix, chunk)


def three_case(
    first: int, second: int, remote_from: int, kv_bytes_per_token: int, link_bytes_per_cycle: int
) -> Overhead:
    """Price of a chunk of `c` tokens after `p`, with s = p + c [cycles].

    ==============  =================================================
    s < p1          0
    p1 <= s < p2    min(c, s - p1) tokens over the link
    s >= p2         the same, and max(0, p - remote_from) tokens back
    ==============  =================================================

    Parameters
    ----------
    first, second
        Thresholds p1 <= p2 [tokens].
    remote_from
        Position from which KV lives with the partner [tokens].
    kv_bytes_per_token
        KV of a token on one stage [B].
    link_bytes_per_cycle
        Bandwidth between partners [B/cycle].
    """

    def overhead(prefix: int, chunk: int) -> int:
        position = prefix + chunk
        tokens = 0
        if position >= first:
            tokens += min(chunk, position - first)
        if position >= second:
            tokens += max(0, prefix - remote_from)
        return -(-tokens * kv_bytes_per_token // link_bytes_per_cycle)

    return overhead


def expected(
    tokens: int,
    chunks: int,
    setting: Setting,
    reading: Reading = "a",
    trigger: Trigger = "overflow",
) -> Overhead | None:
    """Price of the moves that a request will need between stages N/2 apart; None if none.

    What a stage holds at home is the smallest capacity over its KV per token. A balanced pair
    moves half of every chunk, whether or not it would fit.
    """
    size = max(setting.kv_bytes_per_token)
    if trigger == "balance":
        return three_case(0, 0, 0, -(-size // 2), setting.link_bytes_per_cycle)
    local = setting.local_tokens
    if tokens <= local:
        return None
    lag = tokens * (setting.stages // 2) // chunks
    first, second, remote_from = {
        "a": (local, local, local),
        "b": (max(0, local + lag - tokens), local, local),
        "c": (lag, max(lag, tokens - lag), lag),
    }[reading]
    return three_case(first, second, remote_from, size, setting.link_bytes_per_cycle)
