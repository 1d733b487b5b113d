"""Collectives on a row of cores, stepped cycle by cycle: wavelets move over ramps and links.

A core issues or takes in one wavelet a cycle; a ramp is a delay line, and so is a link, which
carries one wavelet a cycle; a router passes wavelets on at once, those from farther away first.
"""

from __future__ import annotations

from collections import deque


def broadcast(pes: int, wavelets: int, ramp: int, hop: int) -> int:
    """Core 0 sends its vector; every router copies it down to its core and on to the next."""
    to_router: deque[int] = deque()
    links: list[deque[int]] = [deque() for _ in range(pes)]
    down: list[deque[int]] = [deque() for _ in range(pes)]
    received = [0] * pes
    received[0] = wavelets
    issued = cycle = 0
    while min(received) < wavelets:
        if issued < wavelets:
            to_router.append(cycle + 1 + ramp)
            issued += 1
        if to_router and to_router[0] == cycle:
            to_router.popleft()
            links[0].append(cycle + hop)
        for pe in range(1, pes):
            if links[pe - 1] and links[pe - 1][0] == cycle:
                links[pe - 1].popleft()
                links[pe].append(cycle + hop)
                down[pe].append(cycle + ramp)
        cycle += 1
        for pe in range(1, pes):
            if down[pe] and down[pe][0] == cycle - 1:
                down[pe].popleft()
                received[pe] += 1
    return cycle


def chain_reduce(pes: int, wavelets: int, ramp: int, hop: int) -> int:
    """The far end sends its vector; each core adds its own element and passes the sum on."""
    arrivals: list[deque[int]] = [deque() for _ in range(pes)]
    summed = [0] * pes
    cycle = 0
    while summed[0] < wavelets:
        for pe in reversed(range(pes)):
            ready = pe == pes - 1 or (bool(arrivals[pe]) and arrivals[pe][0] <= cycle)
            if summed[pe] < wavelets and ready:
                if pe < pes - 1:
                    arrivals[pe].popleft()
                summed[pe] += 1
                if pe > 0:
                    arrivals[pe - 1].append(cycle + 1 + ramp + hop + ramp)
        cycle += 1
    return cycle


def star_reduce(pes: int, wavelets: int, ramp: int, hop: int) -> int:
    """All cores send their vectors to core 0, which adds one wavelet a cycle."""
    waiting: list[deque[int]] = [deque() for _ in range(pes)]  # at each router, from its core
    passing: list[deque[int]] = [deque() for _ in range(pes)]  # at each router, from farther away
    for pe in range(1, pes):
        for wavelet in range(wavelets):
            waiting[pe].append(wavelet + 1 + ramp)
    added, cycle, last = 0, 0, 0
    while added < wavelets * (pes - 1):
        for pe in range(1, pes):
            for queue in (passing[pe], waiting[pe]):
                if queue and queue[0] <= cycle:
                    queue.popleft()
                    if pe > 1:
                        passing[pe - 1].append(cycle + hop)
                    else:
                        added += 1
                        last = cycle + hop + ramp + 1
                    break
        cycle += 1
    return last
