"""MBKR: which stages host each other's KV, and how much of which chunk moves.

All stages of a pipeline have the same KV peak at different times: stage k + N/2 lags stage k by
N/2 chunks, so each has room when the other needs it. MOCAP (arXiv 2606.22968) states the pairing
offset; the rest is reconstructed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mocap.late_push import postpone
from mocap.policy import Move, Policy, Request, Setting, cut, move
from mocap.timeline import Block, Occupancy, blocks, occupancy
from mocap.transport import optimal
from wafer_kernels.errors import CapacityError, ConfigError

__all__ = [
    "Moved",
    "Push",
    "Trigger",
    "groups",
    "max_tokens",
    "mirror",
    "occupancy",
    "optimal",
    "pairs",
    "plan",
    "postpone",
    "static_max_tokens",
]

Trigger = Literal["overflow", "balance"]
Moved = Literal["newest", "oldest"]
Push = Literal["write", "late"]

MOST_TOKENS = 2**24


def pairs(stages: int) -> list[tuple[int, int]]:
    """Stages N/2 apart; an odd N leaves the last one unpaired."""
    return [(k, k + stages // 2) for k in range(stages // 2)]


def mirror(stages: int) -> list[tuple[int, int]]:
    """BPipe's pairs (k, N - 1 - k): the middle ones lag by one chunk only, and gain little."""
    return [(k, stages - 1 - k) for k in range(stages // 2)]


def groups(stages: int, size: int) -> list[tuple[int, ...]]:
    """Groups of `size` stages N // size apart; what is left over stays alone.

    Raises
    ------
    ConfigError
        If there are fewer stages than one group needs.
    """
    if not 1 <= size <= stages:
        raise ConfigError(f"groups of {size} need at least {size} stages, there are {stages}")
    lag = stages // size
    return [tuple(range(k, lag * size, lag)) for k in range(lag)]


def plan(
    cuts: Sequence[Sequence[int]],
    setting: Setting,
    members: Sequence[Sequence[int]],
    trigger: Trigger = "overflow",
    moved: Moved = "newest",
    layers: Sequence[int] = (),
) -> list[Move]:
    """Place the KV of each chunk when it is written, slot by slot.

    Under ``overflow`` a chunk is written at home while own and hosted KV fit there, and what does
    not fit goes to the member of the home's group with most room. That fails only when the group
    as a whole is full, so no plan within these groups holds a longer request, pages apart. Under
    ``balance`` each page goes where there is most room. ``oldest`` sends the first chunks, as
    much as will not fit in the end and hosts have room for; all later chunks read them back.

    Parameters
    ----------
    cuts
        Chunk sizes of each request in order of service [tokens].
    setting
        Capacities, KV bytes per token and page size; regions may differ in all but the page.
    members
        Groups of stages that host for each other; a stage in none keeps its KV.
    trigger, moved
        When KV moves, and which.
    layers
        Layers of each stage if KV is freed layer by layer (stage,); empty: task by task.

    Raises
    ------
    CapacityError
        If a chunk finds no room: names its request, chunk, stage, slot and the missing bytes.
    """
    group = {stage: tuple(some) for some in members for stage in some}
    capacity, sizes = setting.kv_capacity_bytes, setting.kv_bytes_per_token
    held = Occupancy(cuts, sizes, layers)
    excess = [
        [max(0, _most_tokens(cut, depth) - most // size) if size else 0 for cut in cuts]
        for most, size, depth in zip(capacity, sizes, held.layers, strict=True)
    ]
    moves: list[Move] = []
    for block in blocks(cuts, setting.stages):
        room = held.room(block, capacity, block.end - 1).tolist()
        size = sizes[block.stage]
        hosts = [host for host in group.get(block.stage, ()) if host != block.stage]
        if trigger == "balance":
            shares = _balanced(block, hosts, room, size, setting.page_tokens)
        else:
            leave = excess[block.stage][block.request] if moved == "oldest" else 0
            shares = _overflowing(block, hosts, room, size, setting.page_tokens, leave)
            excess[block.stage][block.request] -= sum(shares.values())
        local = block.tokens - sum(shares.values())
        if local * size > room[block.stage]:
            raise _full(block, local * size - room[block.stage], setting, hosts)
        for region, tokens in ((block.stage, local), *shares.items()):
            held.put(region, block.stage, tokens, block.start, block.end - 1)
        moves += [
            Move(block.request, block.stage, block.chunk, tokens, host)
            for host, tokens in shares.items()
        ]
    return moves


def _most_tokens(chunks: Sequence[int], layers: int) -> int:
    """Tokens a request holds at its fullest, in whole stages: all but the last, and a layer of it.

    With one layer that is all of it.
    """
    return sum(chunks[:-1]) + -(-chunks[-1] // layers)


def max_tokens(policy: Policy, setting: Setting, requests: int = 1) -> int:
    """Longest request of which `requests` fit back to back, by bisection on the plan [tokens].

    Only the KV capacities of `setting` count. One request is isolated; two or more that overlap
    in the pipeline are a stream. 0 if not even one token fits.
    """
    layers = setting.layers if policy.frees_by_layer() else ()

    def fits(tokens: int) -> bool:
        cuts = [cut(policy, Request(r, tokens), setting) for r in range(requests)]
        try:
            moves = move(policy, cuts, setting)
        except CapacityError:
            return False
        peaks = occupancy(cuts, moves, setting.kv_bytes_per_token, layers).max(axis=1)
        return bool((peaks <= setting.kv_capacity_bytes).all())

    longest, too_long = 0, max(1, setting.local_tokens)
    while too_long <= MOST_TOKENS and fits(too_long):
        longest, too_long = too_long, 2 * too_long
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        longest, too_long = (middle, too_long) if fits(middle) else (longest, middle)
    return longest


def static_max_tokens(setting: Setting, members: Sequence[Sequence[int]]) -> int:
    """Longest request if all stages peaked at once and lent only permanent surplus [tokens].

    What `max_tokens` gives beyond this is the gain from the time shift of the peaks; what this
    gives beyond ``setting.local_tokens`` comes from unequal capacities.
    """
    grouped = {stage for some in members for stage in some}
    alone = [(stage,) for stage in range(setting.stages) if stage not in grouped]
    return min(
        sum(setting.kv_capacity_bytes[stage] for stage in some)
        // sum(setting.kv_bytes_per_token[stage] for stage in some)
        for some in (*members, *alone)
    )


def _overflowing(
    block: Block, hosts: Sequence[int], room: Sequence[int], size: int, page: int, leave: int
) -> dict[int, int]:
    """Tokens that each host takes: what does not fit at home, and `leave` in any case."""
    fitting = room[block.stage] // size if size else block.tokens
    excess = max(leave, block.tokens - fitting)
    excess = min(block.tokens, -(-excess // page) * page)
    shares = {}
    for host in sorted(hosts, key=lambda host: (-room[host], host)):
        taken = min(excess, room[host] // size if size else 0)
        taken -= taken % page if taken < excess else 0
        if taken > 0:
            shares[host] = taken
            excess -= taken
    return shares


def _balanced(
    block: Block, hosts: Sequence[int], room: Sequence[int], size: int, page: int
) -> dict[int, int]:
    """Tokens that each host takes if every page goes where most room is, home first."""
    page_bytes = page * size
    if page_bytes == 0:
        return {}
    regions = (block.stage, *hosts)
    pages = -(-block.tokens // page)
    level = _level([room[region] for region in regions], pages * page_bytes)
    given = {region: max(0, room[region] - level) // page_bytes for region in regions}
    for _ in range(pages - sum(given.values())):  # what rounding left, and all that has no room
        free = {region: room[region] - given[region] * page_bytes for region in regions}
        emptiest = max(regions, key=free.__getitem__)
        given[emptiest if free[emptiest] >= page_bytes else block.stage] += 1
    shares, left = {}, block.tokens
    for host in hosts:
        taken = min(left, given[host] * page)
        if taken:
            shares[host] = taken
            left -= taken
    return shares


def _level(rooms: Sequence[int], volume: int) -> int:
    """Room left where most is, once `volume` was poured in evenly from the top."""
    depths = sorted(rooms, reverse=True)
    count, left = 0, 0
    for count in range(1, len(depths) + 1):
        left = sum(depths[:count]) - volume
        if count == len(depths) or left >= count * depths[count]:
            break
    return max(0, -(-left // count))


def _full(block: Block, short: int, setting: Setting, hosts: Sequence[int]) -> CapacityError:
    where = f"stage {block.stage}" + (f" and its hosts {list(hosts)}" if hosts else "")
    return CapacityError(
        f"KV of request {block.request}, chunk {block.chunk} ({block.tokens} tokens) finds no room "
        f"on {where} at slot {block.start}: {short} bytes short of a capacity of "
        f"{setting.kv_capacity_bytes[block.stage]} bytes; shorter requests, more stages, larger "
        "groups of hosts or fewer requests in flight would help",
        request=block.request,
        chunk=block.chunk,
        stage=block.stage,
        slot=block.start,
        short_bytes=short,
    )
