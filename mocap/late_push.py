"""Pushing KV to its hosts as late as possible, instead of as it is written (reconstructed)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mocap.policy import Move, Setting
from mocap.timeline import Block, Occupancy, blocks

__all__ = ["postpone"]


def postpone(
    moves: Sequence[Move],
    cuts: Sequence[Sequence[int]],
    setting: Setting,
    layers: Sequence[int] = (),
) -> list[Move]:
    """Push KV to its hosts as late as the room at home allows, for moves at write that fit.

    A move's tokens stay at home, in whole pages, for as long as nothing there overflows: they are
    pushed in the slot before their room is needed, and not at all if it never is. A host then holds
    KV for a part of the time that the moves at write give it, so that its room is there. Moves are
    taken by slot of writing, then by stage, again and again until none can wait any longer.

    Parameters
    ----------
    moves
        What is moved as it is written, within the capacities.
    cuts, setting, layers
        As in `plan`.
    """
    alive = {(b.request, b.stage, b.chunk): b for b in blocks(cuts, setting.stages)}
    held = Occupancy(cuts, setting.kv_bytes_per_token, layers)
    for block in alive.values():
        held.put(block.stage, block.stage, block.tokens, block.start, block.end - 1)

    def block_of(one: Move) -> Block:
        return alive[one.request, one.stage, one.chunk]

    planned = sorted(moves, key=lambda one: (block_of(one).start, one.stage, one.host))
    for one in planned:
        held.put_away(block_of(one), one)
    waiting = True
    while waiting:
        waiting, postponed = False, []
        for one in planned:
            later = _later(one, block_of(one), held, setting)
            waiting = waiting or later != [one]
            postponed += later
        planned = postponed
    return planned


def _later(one: Move, block: Block, held: Occupancy, setting: Setting) -> list[Move]:
    """The move, split by the slots through which its tokens can stay at home; booked in `held`."""
    size, page = setting.kv_bytes_per_token[block.stage], setting.page_tokens
    held.put_away(block, one, -1)
    held.put(block.stage, block.stage, -one.tokens, block.start, block.end - 1)
    stay = []  # tokens that can stay to the end of each slot after the one of writing
    for slot in range(min(block.start + 1, block.end - 1), block.end):
        room = int(held.room(block, setting.kv_capacity_bytes, slot)[block.stage])
        tokens = min(one.tokens, room // size if size else one.tokens)
        stay.append(tokens if tokens == one.tokens else tokens - tokens % page)
    held.put(block.stage, block.stage, one.tokens, block.start, block.end - 1)
    split = []
    for after, (most, least) in enumerate(zip([one.tokens, *stay], stay, strict=False)):
        if most > least:
            pushed = block.chunk + after if after else None
            split.append(replace(one, tokens=most - least, pushed=pushed))
    for each in split:
        held.put_away(block, each)
    return split
