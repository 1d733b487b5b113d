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
    """The move, split by the slots through which its tokens can stay at home; booked in `held`.

    From the last slot on, as many tokens wait until then as leave room for the others to wait as
    long as they do already: so none leaves earlier than before.
    """
    page, capacity = setting.page_tokens, setting.kv_capacity_bytes[block.stage]
    life = block.end - block.start
    now = one.leaves - block.chunk + 1 if one.leaves > block.chunk else 0  # slots at home
    left, split = one.tokens, []
    for slots in range(life, now, -1):
        if slots == 1 < life:
            continue  # what leaves in the slot of writing is never at home
        free = capacity - held.bytes[block.stage, held.span(block.start, block.end - 1)]
        more = held.bytes_at_home(block, slots) - held.bytes_at_home(block, now)
        tokens = int(min(left, (free[more > 0] // more[more > 0]).min(initial=left)))
        tokens = tokens if tokens == left else tokens - tokens % page
        if tokens > 0:
            held.put_away(block, replace(one, tokens=tokens), -1)
            if slots < life:  # else it is never pushed
                split.append(replace(one, tokens=tokens, pushed=block.chunk + slots - 1))
                held.put_away(block, split[-1])
            left -= tokens
    return [*([replace(one, tokens=left)] if left else []), *reversed(split)]
