"""Where the KV of every chunk lies: pieces, each in one place at a time, all their life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mocap.policy import Move
from wafer_emu.order import Order

__all__ = ["Piece", "Pieces", "pieces_of"]


class Piece(NamedTuple):
    """KV of consecutive tokens of one chunk on one stage.

    Attributes
    ----------
    first, tokens
        Position of the first token in the prompt, and how many.
    part
        Which of the stage's hosts keeps it in the end; 0: the stage itself.
    written, pushed
        Tasks that write it and that bring it to its host: the same where it is written there, or
        stays at home.
    """

    first: int
    tokens: int
    part: int
    written: int
    pushed: int

    @property
    def late(self) -> bool:
        """Whether it is written at home and pushed to its host by a later task."""
        return self.pushed > self.written


@dataclass(frozen=True)
class Pieces:
    """Pieces by stage and task: those it writes, takes room for (with the host) and sees leave."""

    written: list[list[list[Piece]]]
    arriving: list[list[list[tuple[Piece, int]]]]
    leaving: list[list[list[Piece]]]


def pieces_of(order: Order, moves: Sequence[Move], hosts: Sequence[Sequence[int]]) -> Pieces:
    """Cut the KV of every chunk into pieces: what stays, what leaves later, what is written away.

    A request's resident prefix comes with its first chunk and stays at home.
    """
    stages, count = len(hosts), order.tokens.size
    moved: dict[tuple[int, int], list[Move]] = {}
    first_task = {int(order.request[task]): task for task in reversed(range(count))}
    for move in moves:
        moved.setdefault((move.stage, first_task[move.request] + move.chunk), []).append(move)
    chunks = [_chunk(order, task) for task in range(count)]
    written = [[[whole] for whole in chunks] for _ in range(stages)]
    arriving = [[[(whole, 0)] for whole in chunks] for _ in range(stages)]
    leaving: list[list[list[Piece]]] = [[[] for _ in range(count)] for _ in range(stages)]
    for (stage, task), some in moved.items():
        written[stage][task] = _pieces(chunks[task], some, hosts[stage])
        arriving[stage][task] = [
            (piece, 0 if piece.late else piece.part) for piece in written[stage][task]
        ]
    for stage, task in moved:
        for piece in written[stage][task]:
            if piece.late:
                arriving[stage][piece.pushed].append((piece, piece.part))
                leaving[stage][piece.pushed].append(piece)
    for by_task in arriving:
        for some_here in by_task:
            some_here.sort(key=lambda each: each[1])
    return Pieces(written, arriving, leaving)


def _chunk(order: Order, task: int) -> Piece:
    """A chunk, with the resident prefix if it is its request's first, as one piece at home."""
    tokens, first = int(order.tokens[task]), int(order.prefix[task])
    if order.chunk[task] == 0:
        prefix = order.requests[int(order.request[task])].prefix_tokens
        tokens, first = tokens + prefix, first - prefix
    return Piece(first, tokens, 0, task, task)


def _pieces(whole: Piece, moves: Sequence[Move], hosts: Sequence[int]) -> list[Piece]:
    """Pieces of one chunk on one stage, in the order of their tokens."""
    stay = whole.tokens - sum(move.tokens for move in moves)
    found = [whole._replace(tokens=stay)] if stay else []
    first = whole.first + stay
    for move in sorted(moves, key=lambda one: (one.leaves == one.chunk, hosts.index(one.host))):
        pushed = whole.written + move.leaves - move.chunk
        found.append(Piece(first, move.tokens, hosts.index(move.host), whole.written, pushed))
        first += move.tokens
    return found
