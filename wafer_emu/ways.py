"""Ways of working: tiles and their dealing, bytes of attention, places of KV and activations.

No way depends on how much memory there is, which only decides what fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from mocap.policy import Policy, Request
from wafer_emu.attention_room import beside_kv, moments, shrunk
from wafer_emu.clock import Tiers
from wafer_emu.cutting import cuts_of, even_cuts, lined_up
from wafer_emu.deployment import PAGE_TOKENS, Deployment, deploy
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.refusal import needs_and_rooms, refuse_too_long, refuse_too_wide
from wafer_emu.stage_clocks import Shelf
from wafer_emu.transfers import arrivals, handoff_latency, no_transfers, traffic
from wafer_emu.wafer import Wafer
from wafer_kernels import pipeline
from wafer_kernels.errors import CapacityError

__all__ = ["LEANEST", "Way", "even_cycles", "memory_tiers", "most_tokens", "ways_by_speed"]

LEANEST = 2  # the tiles in which chunks pass a layer are halved at most so often
SHRINKINGS = (0, 1, 2, 64)  # of attention, tried until a plan fits; the last leaves least
JUDGED_REQUESTS = 16  # by which ways are compared: the first of a workload


def memory_tiers(wafer: Wafer, options: Options) -> list[Tiers]:
    """Memory tiers to try in order.

    What die memory has to bring most often leaves SRAM last: weights come for every tile, KV for
    every query block, waiting activations once a layer.
    """
    if options.kv_budget is not None:
        return [Tiers()]
    memories = ("sram", "dram") if wafer.dram is not None else ("sram",)
    asked = (options.weights_tier, options.kv_tier, options.activations_tier)
    return [
        Tiers(*chosen)
        for chosen in product(*(memories if each == "auto" else (each,) for each in asked))
    ]


class Way(NamedTuple):
    """A way of working, the chunk that it is laid out for [tokens], and :func:`even_cycles`.

    0 cycles where there is nothing to compare it with.
    """

    deployment: Deployment
    usual: int
    cycles: int = 0


def ways_by_speed(
    wafer: Wafer,
    model: Model,
    waiting: Sequence[Request],
    policy: Policy,
    options: Options,
    tiers: Sequence[Tiers],
    leanest: bool,
    shelf: Shelf,
) -> Iterator[Way]:
    """Ways of working in the order in which to try them: the fastest first, then with less memory.

    ``leanest`` gives only the one that takes the least, of every tier.

    Raises
    ------
    CapacityError
        If weights, KV alone, or what works on it, fit under none.
    """
    longest = max(waiting, key=lambda one: one.new_tokens)
    ways: list[Way] = []
    failure: CapacityError | None = None
    for way in _ways(wafer, model, policy, options, tiers, leanest, longest, shelf):
        try:
            least = shrunk(way.deployment, SHRINKINGS[-1], shelf)
            refuse_too_long(least, policy, longest)
            if not leanest:  # the one way is then planned, which tells more
                refuse_too_wide(least, policy, longest)
            ways.append(way)
        except CapacityError as error:
            failure = error
    if not ways:
        assert failure is not None
        raise failure
    if not leanest:
        ways = _beside_kv(ways, policy, waiting, longest, shelf)
    tried: set[tuple[object, ...]] = set()
    for halvings in SHRINKINGS[-1:] if leanest else SHRINKINGS:
        less = [way._replace(deployment=shrunk(way.deployment, halvings, shelf)) for way in ways]
        if len(less) > 1:
            less = [
                way._replace(cycles=even_cycles(way.deployment, policy, waiting)) for way in less
            ]
            less.sort(key=lambda way: way.cycles)
        for way in less:
            deployment = way.deployment
            budgets = (each.attention_bytes for each in deployment.clocks)
            key = (deployment.tiers, deployment.tile_tokens, deployment.in_rounds, *budgets)
            if key not in tried:
                tried.add(key)
                yield way


def _ways(
    wafer: Wafer,
    model: Model,
    policy: Policy,
    options: Options,
    tiers: Sequence[Tiers],
    leanest: bool,
    longest: Request,
    shelf: Shelf,
) -> Iterator[Way]:
    """Ways of working, tiers in their order: tiles halved, dealt in rounds of the rows or evenly.

    Halves are taken up to whole rounds too where a request passes whole; it takes no larger tile
    than an even chunk, so that its working set is none either.
    """
    for memories in tiers:
        sizes: set[int] = set()
        for lean in range(LEANEST if leanest else 0, LEANEST + 1):
            way = deploy(wafer, model, options, policy, memories, lean, longest, shelf)
            tile, full = way.tile_tokens, way.round_tokens
            even = options.usual_chunk(longest.new_tokens, len(way.stages), policy.uses)
            usual = min(longest.new_tokens, -(-even // PAGE_TOKENS) * PAGE_TOKENS)
            found = {tile}
            if policy.streams_tokens:
                found.add(min(even, -(-tile // full) * full))
                even = usual = longest.new_tokens
            if asked := policy.asked_tile():
                found = {min(asked, longest.new_tokens)}
            for size in sorted(found - sizes, reverse=True):
                rounds, evenly = (way.with_tile(size, in_rounds) for in_rounds in (True, False))
                yield Way(rounds, usual)
                if list(rounds.tiles(even)) != list(evenly.tiles(even)):
                    yield Way(evenly, usual)
            sizes |= found


def _beside_kv(
    ways: Sequence[Way],
    policy: Policy,
    waiting: Sequence[Request],
    longest: Request,
    shelf: Shelf,
) -> list[Way]:
    """The ways with attention that uses what KV leaves.

    The KV of even chunks; where these have room nowhere, of the policy's own: their ends are small.
    """
    several, resident = len(waiting) > 1, max(one.tokens for one in waiting) - longest.new_tokens

    def beside(deployment: Deployment, cuts: Sequence[int] | None) -> tuple[Deployment, bool]:
        even = even_cuts(deployment, policy, [longest])[0]
        follows = max(even) if several or len(even) > 1 else 0
        times = moments(cuts or even, resident, several)
        return beside_kv(deployment, policy, times, follows, shelf)

    placed = [beside(way.deployment, None) for way in ways]
    if policy.uses and not any(alone for _, alone in placed):
        own = cuts_of(ways[0].deployment, policy, [longest], ways[0].usual)[0]
        placed = [beside(way.deployment, own) for way in ways]
    return [
        way._replace(deployment=deployment)
        for way, (deployment, _) in zip(ways, placed, strict=True)
    ]


def even_cycles(deployment: Deployment, policy: Policy, waiting: Sequence[Request]) -> int:
    """Makespan of the first requests in even chunks, or whole if the policy does not cut them.

    As if KV needed no memory. It is that of ``uniform`` itself.
    """
    requests = Policy().order(waiting)[:JUDGED_REQUESTS]
    cuts = even_cuts(deployment, policy, requests)
    order = lined_up(deployment, policy, requests, cuts, deployment.memories(0))
    stages, count = order.compute.shape
    nothing = np.zeros((stages, 1, count), np.int64)
    tasks = pipeline.Tasks(
        arrivals(order),
        order.last.astype(np.int64),
        order.compute,
        handoff_latency(order),
        np.arange(stages, dtype=np.int64)[:, np.newaxis],
        nothing,
        np.zeros((stages, count), np.int64),
        np.ones(stages, np.int64),
        np.zeros((stages, count + 1), np.int64),
    )
    sent, links = traffic(order, no_transfers(order))
    schedule = pipeline.schedule(tasks, links.capacity.size)
    pipeline.run(tasks, np.arange(count, dtype=np.int64), sent, links, schedule)
    return int(schedule.end.max())


def most_tokens(wafer: Wafer, model: Model, policy: Policy, options: Options, shelf: Shelf) -> int:
    """Tokens that no plan of a policy can exceed: its KV alone would not fit.

    Raises
    ------
    CapacityError
        If the weights fit under no split.
    """
    most = 0
    request = Request(0, 1)
    failure: CapacityError | None = None
    for tiers in memory_tiers(wafer, options):
        try:
            deployment = deploy(wafer, model, options, policy, tiers, LEANEST, request, shelf)
        except CapacityError as error:
            failure = error
            continue
        deployment = shrunk(deployment, SHRINKINGS[-1], shelf)
        needs, rooms = needs_and_rooms(deployment, policy)
        most = max(most, min(room // need for need, room in zip(needs, rooms, strict=True)))
    if most == 0 and failure is not None:
        raise failure
    return most
