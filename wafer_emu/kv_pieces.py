"""Where the KV of every chunk lies: pieces, each in one place at a time, all their life."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mocap.policy import Move
from wafer_emu.order import Order

__all__ = ["Piece", "Pieces", "pieces_of"]


@dataclass(frozen=True)
class Piece:
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
    written: list[list[list[Piece]]] = [[[] for _ in range(count)] for _ in range(stages)]
    arriving: list[list[list[tuple[Piece, int]]]] = [
        [[] for _ in range(count)] for _ in range(stages)
    ]
    leaving: list[list[list[Piece]]] = [[[] for _ in range(count)] for _ in range(stages)]
    for stage in range(stages):
        for task in range(count):
            for piece in _pieces(order, task, moved.get((stage, task), []), hosts[stage]):
                written[stage][task].append(piece)
                arriving[stage][task].append((piece, 0 if piece.late else piece.part))
                if piece.late:
                    arriving[stage][piece.pushed].append((piece, piece.part))
                    leaving[stage][piece.pushed].append(piece)
            arriving[stage][task].sort(key=lambda each: each[1])
    return Pieces(written, arriving, leaving)


def _pieces(order: Order, task: int, moves: Sequence[Move], hosts: Sequence[int]) -> list[Piece]:
    """Pieces of one chunk on one stage, in the order of their tokens."""
    tokens, first = int(order.tokens[task]), int(order.prefix[task])
    if order.chunk[task] == 0:
        prefix = order.requests[int(order.request[task])].prefix_tokens
        tokens, first = tokens + prefix, first - prefix
    stay = tokens - sum(move.tokens for move in moves)
    found = [Piece(first, stay, 0, task, task)] if stay else []
    first += stay
    for move in sorted(moves, key=lambda one: (one.leaves == one.chunk, hosts.index(one.host))):
        pushed = task + move.leaves - move.chunk
        found.append(Piece(first, move.tokens, hosts.index(move.host), task, pushed))
        first += move.tokens
    return found
