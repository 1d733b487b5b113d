"""Products on a grid of cores, played move by move: tiles lie in queues and travel between cores.

Written from the semantics in docs/method.md. Each function takes ``product(m, k, n)``, the cycles
of one step of a core, and checks that the tiles which meet on a core belong together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, lcm

Product = Callable[[int, int, int], int]
Place = tuple[int, int]


@dataclass
class Mesh:
    """A grid of cores, uneven if its tables say so."""

    rows: int
    columns: int
    element_bytes: int
    link_rate: int
    hop_cycles: int
    ramp_cycles: int
    shared_ramp: bool
    extra: dict[Place, int] = field(default_factory=dict)  # (row, column): cycles a step
    x_rates: dict[int, int] = field(default_factory=dict)  # link c..c+1: bytes per cycle
    x_extras: dict[int, int] = field(default_factory=dict)
    y_rates: dict[int, int] = field(default_factory=dict)
    y_extras: dict[int, int] = field(default_factory=dict)

    def wire(self, axis: str, start: int, end: int, moved_bytes: int) -> tuple[int, int]:
        """Serialisation on the slowest link from `start` to `end`, and the flight after it."""
        rates, extras = (
            (self.x_rates, self.x_extras) if axis == "x" else (self.y_rates, self.y_extras)
        )
        links = range(min(start, end), max(start, end))
        sent = max(serial(moved_bytes, rates.get(link, self.link_rate)) for link in links)
        flight = sum(self.hop_cycles + extras.get(link, 0) for link in links)
        return sent, flight + 2 * self.ramp_cycles


@dataclass
class Played:
    """What came out: planes by physical place, and sums over all moves."""

    start: dict[Place, int]
    finish: dict[Place, int]
    busy: dict[Place, int]
    alignment: int
    macs: int
    byte_hops: int

    @property
    def makespan(self) -> int:
        return max(self.finish.values())


def serial(moved_bytes: int, rate: int) -> int:
    return 0 if rate == 0 else ceil(moved_bytes / rate)


def deal(total: int, parts: int) -> list[int]:
    """Deal elements one by one, round and round."""
    sizes = [0] * parts
    for element in range(total):
        sizes[element % parts] += 1
    return sizes


def folded(length: int) -> list[int]:
    """Places of a ring folded onto a line: all even places, then the odd ones backwards."""
    return [p for p in range(length) if p % 2 == 0] + [p for p in range(length) if p % 2][::-1]


def shift_product(
    mesh: Mesh,
    m: int,
    k: int,
    n: int,
    product: Product,
    step_cycles: int,
    *,
    wraps: bool = False,
    move_a: bool = True,
    move_b: bool = False,
) -> Played:
    """MeshGEMM, or Cannon's ring that wraps, on any grid."""
    slices = max(mesh.rows, mesh.columns)
    place_y = list(range(mesh.rows)) if wraps else folded(mesh.rows)
    place_x = list(range(mesh.columns)) if wraps else folded(mesh.columns)
    ms, ns, ks = deal(m, mesh.rows), deal(n, mesh.columns), deal(k, slices)
    x = [i * slices // mesh.rows for i in range(mesh.rows)]
    y = [j * slices // mesh.columns for j in range(mesh.columns)]
    places = {
        (i, j): (place_y[i], place_x[j]) for i in range(mesh.rows) for j in range(mesh.columns)
    }
    byte_hops = 0

    def held(first: list[int], member: int) -> list[int]:
        after = first[member + 1] if member + 1 < len(first) else slices
        return list(range(first[member], after))

    def turn(line: int, width: int, first: list[int], place: list[int]) -> deque[deque[int]]:
        """Turn one line of cores by `line` slices, shift by shift, the shorter way."""
        nonlocal byte_hops
        ring = deque(deque(held(first, member)) for member in range(len(first)))
        down = line <= slices - line
        for _ in range(min(line, slices - line) if len(first) > 1 else 0):
            moving = [queue.popleft() if down else queue.pop() for queue in ring]
            for member, tile in enumerate(moving):
                target = (member - 1 if down else member + 1) % len(first)
                if down:
                    ring[target].append(tile)
                else:
                    ring[target].appendleft(tile)
                hops = abs(place[member] - place[target])
                byte_hops += hops * width * ks[tile] * mesh.element_bytes
        if len(first) == 1:
            ring[0].rotate(-line)
        return ring

    def skew_cycles(turns: int, axis: str, width: int, place: list[int]) -> int:
        if len(place) == 1:
            return 0
        moved = width * max(ks) * mesh.element_bytes
        shifts = [mesh.wire(axis, place[j], place[j - 1], moved) for j in range(len(place))]
        return turns * max(sum(shift) for shift in shifts)

    before = byte_hops
    a_rows = [turn(x[i], ms[i], y, place_x) for i in range(mesh.rows)]
    a_byte_hops, before = byte_hops - before, byte_hops
    b_columns = [turn(y[j], ns[j], x, place_y) for j in range(mesh.columns)]
    b_byte_hops = byte_hops - before
    byte_hops = a_byte_hops * move_a + b_byte_hops * move_b
    a_cycles = skew_cycles(max(min(t, slices - t) for t in x), "x", max(ms), place_x) * move_a
    b_cycles = skew_cycles(max(min(t, slices - t) for t in y), "y", max(ns), place_y) * move_b
    alignment = a_cycles + b_cycles if mesh.shared_ramp else max(a_cycles, b_cycles)

    a_tiles = {core: deque((s, 0) for s in a_rows[core[0]][core[1]]) for core in places}
    b_tiles = {core: deque((s, 0) for s in b_columns[core[1]][core[0]]) for core in places}
    free = dict.fromkeys(places, alignment)
    busy = dict.fromkeys(places, 0)
    first_start: dict[Place, int] = {}
    finish: dict[Place, int] = {}
    macs = 0
    for t in range(slices):
        start: dict[Place, int] = {}
        tile: dict[Place, int] = {}
        for core in places:
            (a_slice, a_ready), (b_slice, b_ready) = (
                a_tiles[core].popleft(),
                b_tiles[core].popleft(),
            )
            assert a_slice == b_slice == (x[core[0]] + y[core[1]] + t) % slices
            start[core] = max(free[core], a_ready, b_ready)
            tile[core] = a_slice
            first_start.setdefault(core, start[core])
        for core, (row, column) in places.items():
            i, j = core
            s = tile[core]
            work = product(ms[i], ks[s], ns[j]) + step_cycles + mesh.extra.get((row, column), 0)
            macs += ms[i] * ks[s] * ns[j]
            busy[core] += work
            finish[core] = start[core] + work
            free[core] = finish[core]
        for core in places:
            i, j = core
            s = tile[core]
            widths = {"x": ms[i] * (mesh.columns > 1), "y": ns[j] * (mesh.rows > 1)}
            for axis, queues in (("x", a_tiles), ("y", b_tiles)):
                receiver = (i, (j - 1) % mesh.columns) if axis == "x" else ((i - 1) % mesh.rows, j)
                if widths[axis] == 0 and receiver == core:
                    queues[core].append((s, 0))
                    continue
                source = places[core][1 if axis == "x" else 0]
                target = places[receiver][1 if axis == "x" else 0]
                moved = widths[axis] * ks[s] * mesh.element_bytes
                sent, flight = mesh.wire(axis, source, target, moved)
                byte_hops += abs(source - target) * moved
                left = arrive = sent
                if mesh.shared_ramp:
                    ramp = sum(widths.values()) * ks[s] * mesh.element_bytes
                    into = ms[receiver[0]] * (mesh.columns > 1) + ns[receiver[1]] * (mesh.rows > 1)
                    left = max(sent, serial(ramp, mesh.link_rate))
                    arrive = max(sent, serial(into * ks[s] * mesh.element_bytes, mesh.link_rate))
                moves = max(start[core], start[receiver])
                free[core] = max(free[core], moves + left)
                queues[receiver].append((s, moves + arrive + flight))
    return Played(
        {places[core]: cycle for core, cycle in first_start.items()},
        {places[core]: cycle for core, cycle in finish.items()},
        {places[core]: cycles for core, cycles in busy.items()},
        alignment,
        macs,
        byte_hops,
    )


def padded_square(rows: int, columns: int, m: int, k: int, n: int) -> tuple[int, int, int, int]:
    """Logical side of the least-common-multiple grid and the padded m, k, n."""
    side = lcm(rows, columns)
    return side, ceil(m / side) * side, ceil(k / side) * side, ceil(n / side) * side


def owner(first: list[int], s: int) -> int:
    return max(member for member, begin in enumerate(first) if begin <= s)


def summa(
    mesh: Mesh, m: int, k: int, n: int, product: Product, step_cycles: int, stage: int
) -> Played:
    """SUMMA: slice t is broadcast along rows and columns by those who hold it."""
    slices = max(mesh.rows, mesh.columns)
    ms, ns, ks = deal(m, mesh.rows), deal(n, mesh.columns), deal(k, slices)
    x = [i * slices // mesh.rows for i in range(mesh.rows)]
    y = [j * slices // mesh.columns for j in range(mesh.columns)]
    cores = [(i, j) for i in range(mesh.rows) for j in range(mesh.columns)]
    posted = dict.fromkeys(cores, 0)
    finish, busy = dict.fromkeys(cores, 0), dict.fromkeys(cores, 0)
    first_start: dict[Place, int] = {}
    macs = byte_hops = 0
    for t in range(slices):
        start: dict[Place, int] = {}
        for i, j in cores:
            ready = finish[i, j]
            a_bytes = ms[i] * ks[t] * mesh.element_bytes * (mesh.columns > 1)
            b_bytes = ns[j] * ks[t] * mesh.element_bytes * (mesh.rows > 1)
            for axis, moved in (("x", a_bytes), ("y", b_bytes)):
                line = mesh.columns if axis == "x" else mesh.rows
                if line == 1:
                    continue
                begins = max(posted[i, b] if axis == "x" else posted[b, j] for b in range(line))
                sent, _ = mesh.wire(axis, 0, line - 1, moved)
                if mesh.shared_ramp:
                    sent = max(sent, serial(a_bytes + b_bytes, mesh.link_rate))
                me, root = (j, owner(y, t)) if axis == "x" else (i, owner(x, t))
                arrival = begins + sent
                if me != root:
                    extras = mesh.x_extras if axis == "x" else mesh.y_extras
                    for link in range(min(me, root), max(me, root)):
                        arrival += stage + extras.get(link, 0)
                    arrival += 2 * mesh.ramp_cycles
                    byte_hops += moved  # the link towards the root carries the tile once
                ready = max(ready, arrival)
            start[i, j] = ready
            first_start.setdefault((i, j), ready)
            work = product(ms[i], ks[t], ns[j]) + step_cycles + mesh.extra.get((i, j), 0)
            finish[i, j] = ready + work
            busy[i, j] += work
            macs += ms[i] * ks[t] * ns[j]
        posted = start
    return Played(first_start, finish, busy, 0, macs, byte_hops)


def allgather(
    mesh: Mesh, m: int, k: int, n: int, product: Product, step_cycles: int, stage: int, move_b: bool
) -> Played:
    """Gather the row panel of A (and the column panel of B), then multiply once."""
    ms, ns = deal(m, mesh.rows), deal(n, mesh.columns)
    start: dict[Place, int] = {}
    finish: dict[Place, int] = {}
    busy: dict[Place, int] = {}
    macs = byte_hops = 0
    a_ks, b_ks = deal(k, mesh.columns), deal(k, mesh.rows)
    for i in range(mesh.rows):
        for j in range(mesh.columns):
            a_bytes = sum(ms[i] * a_ks[c] for c in range(mesh.columns) if c != j)
            b_bytes = sum(ns[j] * b_ks[r] for r in range(mesh.rows) if r != i) if move_b else 0
            a_bytes, b_bytes = a_bytes * mesh.element_bytes, b_bytes * mesh.element_bytes
            byte_hops += a_bytes + b_bytes  # a tile crosses one link more for each core it reaches
            gathered = [0]
            for axis, moved, line, me in (
                ("x", a_bytes, mesh.columns, j),
                ("y", b_bytes, mesh.rows, i),
            ):
                if line == 1 or (axis == "y" and not move_b):
                    continue
                sent, _ = mesh.wire(axis, 0, line - 1, moved)
                if mesh.shared_ramp:
                    sent = max(sent, serial(a_bytes + b_bytes, mesh.link_rate))
                extras = mesh.x_extras if axis == "x" else mesh.y_extras
                ways = [sum(stage + extras.get(link, 0) for link in range(me))]
                ways.append(sum(stage + extras.get(link, 0) for link in range(me, line - 1)))
                gathered.append(sent + max(ways) + 2 * mesh.ramp_cycles)
            start[i, j] = max(gathered)
            busy[i, j] = product(ms[i], k, ns[j]) + step_cycles + mesh.extra.get((i, j), 0)
            finish[i, j] = start[i, j] + busy[i, j]
            macs += ms[i] * k * ns[j]
    return Played(start, finish, busy, 0, macs, byte_hops)


def transposed(
    mesh: Mesh,
    m: int,
    k: int,
    n: int,
    product: Product,
    step_cycles: int,
    add: Callable[[int, int], int],
) -> Played:
    """C = A B^T: slices of n circulate along columns; each step's partial sums meet at a root."""
    slices = max(mesh.rows, mesh.columns)
    place = folded(mesh.rows)
    ms, ks, ns = deal(m, mesh.rows), deal(k, mesh.columns), deal(n, slices)
    x = [i * slices // mesh.rows for i in range(mesh.rows)] + [slices]
    y = [j * slices // mesh.columns for j in range(mesh.columns)]
    cores = [(i, j) for i in range(mesh.rows) for j in range(mesh.columns)]
    tiles = {(i, j): deque((s, 0) for s in range(x[i], x[i + 1])) for i, j in cores}
    free, finish, busy, left = (dict.fromkeys(cores, 0) for _ in range(4))
    macs = byte_hops = 0
    for _ in range(slices):
        start: dict[Place, int] = {}
        tile: dict[Place, int] = {}
        for i, j in cores:
            tile[i, j], ready = tiles[i, j].popleft()
            start[i, j] = max(free[i, j], ready)
            work = product(ms[i], ks[j], ns[tile[i, j]]) + step_cycles
            work += mesh.extra.get((place[i], j), 0)
            busy[i, j] += work
            finish[i, j] = start[i, j] + work
            macs += ms[i] * ks[j] * ns[tile[i, j]]
        for i in range(mesh.rows):
            (s,) = {tile[i, j] for j in range(mesh.columns)}
            root = owner(y, s)
            partial = ms[i] * ns[s] * mesh.element_bytes
            chains = [range(root), range(mesh.columns - 1, root, -1)]
            sent = mesh.wire("x", 0, mesh.columns - 1, partial)[0] if mesh.columns > 1 else 0
            for chain in chains:
                for j in chain:
                    towards = j + 1 if j < root else j - 1
                    _, flight = mesh.wire("x", j, towards, partial)
                    departs = max(finish[i, j], left[i, j])
                    left[i, j] = departs + sent
                    arrival = departs + sent + flight
                    finish[i, towards] = max(finish[i, towards], arrival) + add(ms[i], ns[s])
                    busy[i, towards] += add(ms[i], ns[s])
                    byte_hops += partial
        for i, j in cores:
            free[i, j] = finish[i, j]
        for i, j in cores:
            receiver = (i - 1) % mesh.rows
            if receiver == i:
                tiles[i, j].append((tile[i, j], 0))
                continue
            moved = ks[j] * ns[tile[i, j]] * mesh.element_bytes
            sent, flight = mesh.wire("y", place[i], place[receiver], moved)
            byte_hops += abs(place[i] - place[receiver]) * moved
            moves = max(start[i, j], start[receiver, j])
            free[i, j] = max(free[i, j], moves + sent)
            tiles[receiver, j].append((tile[i, j], moves + sent + flight))
    return Played(
        dict.fromkeys(cores, 0),
        {(place[i], j): finish[i, j] for i, j in cores},
        {(place[i], j): busy[i, j] for i, j in cores},
        0,
        macs,
        byte_hops,
    )
