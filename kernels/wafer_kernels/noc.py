"""Flows between regions: routes over directed links, shared max-min fairly by those under way.

Volumes are counted in *grains*, of which a byte has so many that the rates of all links are whole
grains a cycle; shares of a link are rounded down to whole grains.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_kernels._jit import kernel

__all__ = ["NEVER", "Links", "Under", "advance", "fair_rates", "next_end", "under_way"]

Int64 = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


class Links(NamedTuple):
    """Directed links, and the routes between P places; all int64.

    ``capacity`` (E,) [grains/cycle]; the route from place a to b crosses the links in ``route``
    from ``first[a P + b]`` on, up to the next first; ``latency`` (P, P) cycles from a flow's last
    grain to its arrival; ``shared`` (1,) 0 if every flow has the rate that it would have alone.
    """

    capacity: Int64
    first: Int64
    route: Int64
    latency: Int64
    shared: Int64


class Under(NamedTuple):
    """F flows that may be under way; all int64.

    ``pair`` (F,) number of the route; ``left`` (F,) grains that have not gone yet, 0 if it is not
    under way; ``rate`` (F,) [grains/cycle]; ``flows`` (E,) that cross each link; ``busy`` (E,)
    cycles in which any did.
    """

    pair: Int64
    left: Int64
    rate: Int64
    flows: Int64
    busy: Int64


@kernel()
def under_way(flows: int, links: Links) -> Under:
    """So many flows, none of which is under way."""
    some, crossed = np.zeros((3, flows), np.int64), np.zeros((2, links.capacity.size), np.int64)
    return Under(some[0], some[1], some[2], crossed[0], crossed[1])


@kernel()
def fair_rates(links: Links, under: Under) -> None:
    """Fill the rates of the flows under way: max-min fair.

    The rates of all flows rise together; when a link is full, its flows stay at what they have.
    Where links are not shared, every flow has the least capacity of its route.
    """
    under.flows[:] = 0
    under.rate[:] = 0
    waiting = 0
    for flow in range(under.left.size):
        if under.left[flow] > 0:
            waiting += 1
            pair, alone = under.pair[flow], NEVER
            for at in range(links.first[pair], links.first[pair + 1]):
                under.flows[links.route[at]] += 1
                alone = min(alone, links.capacity[links.route[at]])
            if links.shared[0] == 0:
                under.rate[flow] = alone
    if links.shared[0] == 0:
        return
    left, rising = links.capacity.copy(), under.flows.copy()
    frozen = np.zeros(under.left.size, np.int64)  # rates of this round, not yet taken off the links
    while waiting > 0:
        full = -1
        for link in range(left.size):
            if rising[link] > 0 and (
                full < 0 or left[link] * rising[full] < left[full] * rising[link]
            ):
                full = link
        share, parts = left[full], rising[full]
        for flow in range(under.left.size):
            frozen[flow] = 0
            if under.left[flow] == 0 or under.rate[flow] > 0:
                continue
            pair = under.pair[flow]
            for at in range(links.first[pair], links.first[pair + 1]):
                link = links.route[at]
                if left[link] * parts == share * rising[link]:  # full at the same moment
                    frozen[flow] = max(1, share // parts)
        for flow in range(under.left.size):
            if frozen[flow] > 0:
                under.rate[flow] = frozen[flow]
                waiting -= 1
                pair = under.pair[flow]
                for at in range(links.first[pair], links.first[pair + 1]):
                    left[links.route[at]] -= frozen[flow]
                    rising[links.route[at]] -= 1


@kernel()
def advance(links: Links, under: Under, cycles: int) -> None:
    """Let all flows move for so many cycles."""
    for flow in range(under.left.size):
        under.left[flow] = max(0, under.left[flow] - cycles * under.rate[flow])
    for link in range(under.flows.size):
        if under.flows[link] > 0:
            under.busy[link] += cycles


@kernel()
def next_end(under: Under) -> int:
    """Cycles until the first flow has moved all of its grains; NEVER if none is under way."""
    soonest = NEVER
    for flow in range(under.left.size):
        if under.left[flow] > 0:
            soonest = min(soonest, -(-under.left[flow] // under.rate[flow]))
    return soonest
