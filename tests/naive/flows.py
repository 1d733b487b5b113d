"""Flows that share links, cycle by cycle: what contention does to a pipeline, as its equations say.

A *grain* is a whole part of a byte. An edge carries so many grains a cycle; every flow has a path
of edges, and moves from its beginning on until its last grain has *left*; ``latency`` cycles later
it has *arrived*. Nothing but plain Python: every cycle all rates are worked out anew, and every
stage is a generator that reads as what the stage does, whose ``yield`` is "until the next cycle".
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from fractions import Fraction

Edge = Hashable
Cell = tuple[int, int]
Table = list[list[int]]


def xy_route(source: Cell, target: Cell) -> list[tuple[Cell, Cell]]:
    """Directed edges from one (row, column) to another: along the row, then along the column."""
    edges = []
    here = source
    while here != target:
        row, column = here
        if column != target[1]:
            after = (row, column + (1 if target[1] > column else -1))
        else:
            after = (row + (1 if target[0] > row else -1), column)
        edges.append((here, after))
        here = after
    return edges


def fair_rates(paths: list[list[Edge]], capacity: dict[Edge, int]) -> list[int]:
    """Grains a cycle of each flow: all rise together, and stop where an edge of theirs is full.

    Edges that fill at the same level are full at once, so that no order of edges or flows matters.
    """
    rates = [0] * len(paths)
    rising = set(range(len(paths)))
    left = dict(capacity)
    while rising:
        crowd = {edge: [f for f in rising if edge in paths[f]] for edge in capacity}
        level = {edge: Fraction(left[edge], len(on)) for edge, on in crowd.items() if on}
        fills = min(level.values())
        full = [edge for edge in level if level[edge] == fills]
        for flow in {f for edge in full for f in crowd[edge]}:
            rates[flow] = fills.numerator // fills.denominator
            if rates[flow] == 0:
                raise ValueError(f"more flows than grains a cycle on one of the edges {full}")
            for edge in paths[flow]:
                left[edge] -= rates[flow]
            rising.remove(flow)
    return rates


def alone_rates(paths: list[list[Edge]], capacity: dict[Edge, int]) -> list[int]:
    """The same where flows pass through each other."""
    return [min(capacity[edge] for edge in path) for path in paths]


class Flow:
    """Something under way; ``left_at`` is the cycle at which its last grain had gone."""

    def __init__(self, path: list[Edge], grains: int, latency: int) -> None:
        self.path, self.to_go, self.latency = path, grains, latency
        self.left_at: int | None = None

    def has_arrived(self, cycle: int) -> bool:
        return self.left_at is not None and self.left_at + self.latency <= cycle


class Network:
    """All edges, and what is under way on them in the cycle from ``cycle`` on."""

    def __init__(self, capacity: dict[Edge, int], contention: bool) -> None:
        self.capacity = capacity
        self.rates = fair_rates if contention else alone_rates
        self.cycle = 0
        self.under_way: list[Flow] = []
        self.carried = dict.fromkeys(capacity, 0)  # grains
        self.busy = dict.fromkeys(capacity, 0)  # cycles in which anything moved over it

    def begin(self, path: list[Edge], grains: int, latency: int) -> Flow:
        assert path
        assert grains > 0
        flow = Flow(path, grains, latency)
        self.under_way.append(flow)
        return flow

    def tick(self) -> None:
        """Let one cycle pass."""
        rates = self.rates([flow.path for flow in self.under_way], self.capacity)
        self.cycle += 1
        used = set()
        for flow, rate in zip(self.under_way, rates, strict=True):
            moved = min(rate, flow.to_go)
            flow.to_go -= moved
            for edge in flow.path:
                self.carried[edge] += moved
                used.add(edge)
            if flow.to_go == 0:
                flow.left_at = self.cycle
        for edge in used:
            self.busy[edge] += 1
        self.under_way = [flow for flow in self.under_way if flow.to_go > 0]


@dataclass
class Served:
    """When each flow's last grain left and when it arrived; grains and busy cycles by edge."""

    left: list[int]
    arrived: list[int]
    carried: dict[Edge, int]
    busy: dict[Edge, int]


def serve(
    flows: list[tuple[int, int, list[Edge], int]],
    capacity: dict[Edge, int],
    *,
    contention: bool = True,
) -> Served:
    """Flows (start, grains > 0, path, latency) that know nothing of each other."""
    network = Network(capacity, contention)
    begun: dict[int, Flow] = {}
    while len(begun) < len(flows) or network.under_way:
        for number, (start, grains, path, latency) in enumerate(flows):
            if start == network.cycle:
                begun[number] = network.begin(path, grains, latency)
        network.tick()
    left = [begun[number].left_at for number in range(len(flows))]
    known = [cycle for cycle in left if cycle is not None]
    assert len(known) == len(flows)
    arrived = [cycle + flow[3] for cycle, flow in zip(known, flows, strict=True)]
    return Served(known, arrived, network.carried, network.busy)


@dataclass
class Work:
    """Tasks of a pipeline and what they send; ``latency`` [cycles] and all bytes by stages.

    ``read_bytes`` and ``write_bytes`` are of one layer: ``[stage][host][task]``, the hosts those of
    ``hosts[stage]`` in their order. So are ``ask_bytes`` and ``answer_bytes``, of a policy that
    attends remotely and reads nothing. ``route(a, b)`` gives the edges from stage to stage.
    """

    durations: Table
    layers: list[int]
    arrival: list[int]
    handoff_bytes: Table
    hosts: Table
    read_bytes: list[Table]
    write_bytes: list[Table]
    ask_bytes: list[Table]
    answer_bytes: list[Table]
    route: Callable[[int, int], list[Edge]]
    latency: Table
    capacity: dict[Edge, int]
    grains_per_byte: int


@dataclass
class Ran:
    """Cycles by (stage, task); the end of the last task; grains and busy cycles by edge."""

    input_ready: Table
    start: Table
    end: Table
    makespan: int
    carried: dict[Edge, int]
    busy: dict[Edge, int]


class Pipeline:
    """Stages without memory limits, each two generators: one that works, one that hands off."""

    def __init__(self, work: Work, contention: bool) -> None:
        self.work = work
        self.network = Network(work.capacity, contention)
        self.stages, self.count = len(work.durations), len(work.arrival)
        self.input_ready: dict[tuple[int, int], int] = {}
        self.start: dict[tuple[int, int], int] = {}
        self.end: dict[tuple[int, int], int] = {}
        for i, cycle in enumerate(work.arrival):
            self.input_ready[0, i] = cycle

    def sent(self, source: int, target: int, moved_bytes: int) -> Flow | None:
        """Begin to send bytes now; nothing at all needs no flow and no time."""
        if moved_bytes == 0:
            return None
        path, latency = self.work.route(source, target), self.work.latency[source][target]
        return self.network.begin(path, moved_bytes * self.work.grains_per_byte, latency)

    def exposed(self, k: int, i: int, layer: int) -> Iterator[tuple[int, int, int]]:
        """(source, target, bytes) that layer ``layer`` of task i must have before it computes."""
        for part, host in enumerate(self.work.hosts[k]):
            yield k, host, self.work.ask_bytes[k][part][i]
            yield host, k, self.work.answer_bytes[k][part][i]
        if layer == 0:
            yield from self.reads(k, i)

    def hidden(self, k: int, i: int, layer: int) -> Iterator[tuple[int, int, int]]:
        """The same of what moves while it computes: the next layer's reads, then its writes."""
        if layer + 1 < self.work.layers[k]:
            yield from self.reads(k, i)
        for part, host in enumerate(self.work.hosts[k]):
            yield k, host, self.work.write_bytes[k][part][i]

    def reads(self, k: int, i: int) -> Iterator[tuple[int, int, int]]:
        for part, host in enumerate(self.work.hosts[k]):
            yield host, k, self.work.read_bytes[k][part][i]

    def one_by_one(self, transfers: Iterator[tuple[int, int, int]]) -> Iterator[None]:
        """Each transfer begins when the one before it has arrived."""
        for source, target, moved_bytes in transfers:
            flow = self.sent(source, target, moved_bytes)
            while flow is not None and not flow.has_arrived(self.network.cycle):
                yield

    def works(self, k: int) -> Iterator[None]:
        """What stage k does."""
        layers = self.work.layers[k]
        for i in range(self.count):
            while self.input_ready.get((k, i), self.network.cycle + 1) > self.network.cycle:
                yield
            self.start[k, i] = self.network.cycle
            cycles = self.work.durations[k][i]
            for layer in range(layers):
                yield from self.one_by_one(self.exposed(k, i, layer))
                share = cycles * (layer + 1) // layers - cycles * layer // layers
                computed = self.network.cycle + share
                yield from self.one_by_one(self.hidden(k, i, layer))
                while self.network.cycle < computed:
                    yield
            self.end[k, i] = self.network.cycle

    def hands_off(self, k: int) -> Iterator[None]:
        """What the way out of stage k does: it sends one output after the other, in order."""
        for i in range(self.count):
            while (k, i) not in self.end:
                yield
            flow = self.sent(k, k + 1, self.work.handoff_bytes[k][i])
            while flow is not None and flow.left_at is None:
                yield
            ready = self.network.cycle + (0 if flow is None else flow.latency)
            if i > 0:  # an output of no bytes does not overtake
                ready = max(ready, self.input_ready[k + 1, i - 1])
            self.input_ready[k + 1, i] = ready

    def run(self) -> None:
        """Tick until all has ended.

        Within a cycle a stage waits only for its own flows and for what the stages before it do, so
        that one pass over them in their order sees all that happens in it.
        """
        running = []
        for k in range(self.stages):
            running.append(self.works(k))
            if k + 1 < self.stages:
                running.append(self.hands_off(k))
        while True:
            running = [one for one in running if next(one, "over") != "over"]
            if not running:
                break
            self.network.tick()

    def table(self, cycles: dict[tuple[int, int], int]) -> Table:
        return [[cycles[k, i] for i in range(self.count)] for k in range(self.stages)]


def run(work: Work, *, contention: bool = True) -> Ran:
    """All tasks through all stages."""
    pipeline = Pipeline(work, contention)
    pipeline.run()
    return Ran(
        input_ready=pipeline.table(pipeline.input_ready),
        start=pipeline.table(pipeline.start),
        end=pipeline.table(pipeline.end),
        makespan=max(pipeline.end.values()),
        carried=pipeline.network.carried,
        busy=pipeline.network.busy,
    )
