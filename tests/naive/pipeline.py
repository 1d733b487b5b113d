"""A pipeline of objects on a clock that ticks cycle by cycle; an admission that tries all slots.

``tasks`` has the fields of the kernel's ``Tasks``: arrival[i], last[i], duration[k][i],
handoff[k][i], host[k][g], need[k][g][i], leave[k][i], layers[k], capacity[k][i]. What is granted,
held and freed is one layer of one task on one stage: a ``Layer``.
"""


def requests(tasks):
    """The task numbers of each request."""
    groups, group = [], []
    for i, is_last in enumerate(tasks.last):
        group.append(i)
        if is_last:
            groups.append(group)
            group = []
    return groups


def most_layers(tasks):
    return max(int(layers) for layers in tasks.layers)


def moments(tasks, k, j):
    """Sub-slots of its slot in which layer j of a task on stage k begins and has ended."""
    layers, steps = int(tasks.layers[k]), most_layers(tasks)
    return j * steps // layers, (j + 1) * steps // layers


def stays(tasks, k, i, j):
    """What layer j of task i on stage k takes: (host, quanta)."""
    layers = int(tasks.layers[k])
    found = {}
    for g, host in enumerate(tasks.host[k]):
        found[int(host)] = found.get(int(host), 0) + int(tasks.need[k][g][i]) // layers
    return found


class Layer:
    """Layer j of chunk i on stage k."""

    def __init__(self, tasks, k, i, j):
        self.stage, self.task, self.number = k, i, j
        self.request = next(group for group in requests(tasks) if i in group)
        layers, cycles = int(tasks.layers[k]), int(tasks.duration[k][i])
        self.duration = cycles * (j + 1) // layers - cycles * j // layers
        self.needs = stays(tasks, k, i, j)
        self.leaves = int(tasks.leave[k][i]) // layers
        self.start = self.end = None
        self.wait = 0


class Pipeline:
    """All layers of all tasks on all stages; ``slot`` orders the grants of memory."""

    def __init__(self, tasks, slot):
        self.stages, self.count = len(tasks.duration), len(tasks.arrival)
        self.capacity = tasks.capacity
        self.arrival, self.handoff = tasks.arrival, tasks.handoff
        self.depth = [int(layers) for layers in tasks.layers]
        self.layers = {
            (k, i, j): Layer(tasks, k, i, j)
            for k in range(self.stages)
            for i in range(self.count)
            for j in range(self.depth[k])
        }
        steps = most_layers(tasks)
        self.order = {
            (k, i, j): ((slot[i] + k) * steps + moments(tasks, k, j)[0], k)
            for k, i, j in self.layers
        }
        self.cycle = 0
        self.peak = [0] * self.stages

    def first(self, k, i):
        return self.layers[k, i, 0]

    def final(self, k, i):
        return self.layers[k, i, self.depth[k] - 1]

    def ended(self, layer):
        return layer.end is not None and layer.end <= self.cycle

    def at(self, stage):
        """The task that a stage is at or waits for."""
        return sum(self.ended(self.final(stage, i)) for i in range(self.count))

    def used(self, host):
        """Quanta of all layers that began and whose request has not left them on their stage."""
        total = 0
        for (k, _, j), layer in self.layers.items():
            if layer.start is None:
                continue
            if self.ended(self.layers[k, layer.request[-1], j]):
                continue
            total += layer.needs.get(host, 0)
            if host == k and self.ended(layer):
                total -= layer.leaves
        return total

    def promised(self, host, before):
        """Quanta of all grants to come that precede a grant in slot order."""
        return sum(
            layer.needs.get(host, 0)
            for place, layer in self.layers.items()
            if layer.start is None and self.order[place] < self.order[before]
        )

    def input_ready(self, k, i):
        """When the input is there, None while that is not known."""
        if k == 0:
            return int(self.arrival[i])
        before = self.final(k - 1, i)
        if before.end is None or before.end > self.cycle:
            return None
        ready = before.end + int(self.handoff[k - 1][i])
        if i > 0:
            ready = max(ready, self.input_ready(k, i - 1))
        return ready

    def has_memory(self, place):
        return all(
            self.used(host) + need + self.promised(host, place)
            <= self.capacity[host][self.at(host)]
            for host, need in self.layers[place].needs.items()
            if need > 0
        )

    def could_start_at(self, k, i, j):
        """When the input and the stage are there, None while that is not known or not yet."""
        if j > 0:
            before = self.layers[k, i, j - 1]
            return before.end if self.ended(before) else None
        ready = self.input_ready(k, i)
        if self.at(k) != i or ready is None or ready > self.cycle:
            return None
        return max(ready, self.final(k, i - 1).end if i > 0 else 0)

    def start_one(self):
        """Start one layer that can start now; False if there is none."""
        for place, layer in self.layers.items():
            if layer.start is not None:
                continue
            able = self.could_start_at(*place)
            if able is None or not self.has_memory(place):
                continue
            layer.start, layer.end = self.cycle, self.cycle + layer.duration
            layer.wait = self.cycle - able
            self.peak = [max(self.peak[x], self.used(x)) for x in range(self.stages)]
            return True
        return False

    def run(self):
        """Tick until all is done (True) or nothing will ever happen again (False)."""
        while not all(self.ended(layer) for layer in self.layers.values()):
            while self.start_one():
                pass
            known = [self.input_ready(k, i) for k, i, j in self.layers if j == 0]
            ends = [layer.end for layer in self.layers.values()]
            if not any(c is not None and c > self.cycle for c in known + ends):
                return False
            self.cycle += 1
        return True


def held(tasks, slot, stage, now):
    """Most quanta on a stage in slot ``now``, of the requests that ``slot`` (task -> slot) places.

    A layer's quanta are there from its beginning to the end of that layer in the request's last
    task; what a task pushes away only to the end of the layer that pushes it.
    """
    steps = most_layers(tasks)
    totals = []
    for moment in range(now * steps, (now + 1) * steps):
        total = 0
        for group in requests(tasks):
            if group[0] not in slot:
                continue
            for k in range(len(tasks.layers)):
                for j in range(int(tasks.layers[k])):
                    begin, end = moments(tasks, k, j)
                    if moment >= (slot[group[-1]] + k) * steps + end:
                        continue
                    for i in group:
                        if moment >= (slot[i] + k) * steps + begin:
                            total += stays(tasks, k, i, j).get(stage, 0)
                        if stage == k and moment >= (slot[i] + k) * steps + end:
                            total -= int(tasks.leave[k][i]) // int(tasks.layers[k])
        totals.append(total)
    return max(totals)


def shortages(tasks, slot):
    """(stage, slot) -> quanta short, wherever a stage holds more than it can."""
    short = {}
    stages = len(tasks.duration)
    for now in range(max(slot.values()) + stages):
        for stage in range(stages):
            at = sum(place + stage < now for place in slot.values())
            excess = held(tasks, slot, stage, now) - tasks.capacity[stage][at]
            if excess > 0:
                short[stage, now] = int(excess)
    return short


def admit(tasks):
    """Slots of all tasks, each request as early as it fits; or the request that never does."""
    slot = {}
    for group in requests(tasks):
        after = max(slot.values(), default=-1) + 1
        for first in range(after, after + len(tasks.duration) + 1):
            tried = slot | {i: first + n for n, i in enumerate(group)}
            if not shortages(tasks, tried):
                slot = tried
                break
        else:
            return None, group[0]
    return [slot[i] for i in range(len(slot))], None
