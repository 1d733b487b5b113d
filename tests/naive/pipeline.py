"""A pipeline of objects on a clock that ticks cycle by cycle; an admission that tries all slots.

``tasks`` has the fields of the kernel's ``Tasks``: arrival[i], last[i], duration[k][i],
handoff[k][i], host[k][g], need[k][g][i], capacity[k][i].
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


class Task:
    """Chunk i on stage k."""

    def __init__(self, tasks, k, i):
        self.stage, self.number = k, i
        self.request = next(group for group in requests(tasks) if i in group)
        self.duration, self.handoff = int(tasks.duration[k][i]), int(tasks.handoff[k][i])
        self.needs = {}
        for g, host in enumerate(tasks.host[k]):
            self.needs[int(host)] = self.needs.get(int(host), 0) + int(tasks.need[k][g][i])
        self.ready = self.start = self.end = None
        self.memory_wait = 0


class Pipeline:
    """All tasks of all stages; ``slot`` orders the grants of memory."""

    def __init__(self, tasks, slot):
        self.stages, self.count = len(tasks.duration), len(tasks.arrival)
        self.capacity = tasks.capacity
        self.arrival = tasks.arrival
        self.tasks = {
            (k, i): Task(tasks, k, i) for k in range(self.stages) for i in range(self.count)
        }
        self.order = {(k, i): (slot[i] + k, k) for k, i in self.tasks}
        self.cycle = 0
        self.peak = [0] * self.stages

    def ended(self, task):
        return task.end is not None and task.end <= self.cycle

    def at(self, stage):
        """The task that a stage is at or waits for."""
        return sum(self.ended(self.tasks[stage, i]) for i in range(self.count))

    def used(self, host):
        """Quanta of all tasks that were granted and whose request has not left their stage."""
        return sum(
            task.needs.get(host, 0)
            for task in self.tasks.values()
            if task.start is not None and not self.ended(self.tasks[task.stage, task.request[-1]])
        )

    def promised(self, host, before):
        """Quanta of all grants to come that precede a grant in slot order."""
        return sum(
            task.needs.get(host, 0)
            for place, task in self.tasks.items()
            if task.start is None and self.order[place] < self.order[before]
        )

    def input_ready(self, k, i):
        """When the input is there, None while that is not known."""
        if k == 0:
            return int(self.arrival[i])
        before = self.tasks[k - 1, i]
        if before.end is None or before.end > self.cycle:
            return None
        ready = before.end + before.handoff
        if i > 0:
            ready = max(ready, self.input_ready(k, i - 1))
        return ready

    def has_memory(self, k, i):
        return all(
            self.used(host) + need + self.promised(host, (k, i))
            <= self.capacity[host][self.at(host)]
            for host, need in self.tasks[k, i].needs.items()
            if need > 0
        )

    def start_one(self):
        """Start one task that can start now; False if there is none."""
        for (k, i), task in self.tasks.items():
            if task.start is not None or self.at(k) != i:
                continue
            ready = self.input_ready(k, i)
            if ready is None or ready > self.cycle or not self.has_memory(k, i):
                continue
            free = self.tasks[k, i - 1].end if i > 0 else 0
            task.ready, task.start = ready, self.cycle
            task.end = self.cycle + task.duration
            task.memory_wait = self.cycle - max(free, ready)
            self.peak = [max(self.peak[x], self.used(x)) for x in range(self.stages)]
            return True
        return False

    def run(self):
        """Tick until all is done (True) or nothing will ever happen again (False)."""
        while not all(self.ended(task) for task in self.tasks.values()):
            while self.start_one():
                pass
            known = [self.input_ready(k, i) for k, i in self.tasks]
            ends = [task.end for task in self.tasks.values()]
            if not any(c is not None and c > self.cycle for c in known + ends):
                return all(self.ended(task) for task in self.tasks.values())
            self.cycle += 1
        return True


def held(tasks, slot, stage, now):
    """Quanta on a stage in slot ``now``, of the requests that ``slot`` (task -> slot) places."""
    total = 0
    for group in requests(tasks):
        if group[0] not in slot:
            continue
        for home, hosts in enumerate(tasks.host):
            for g, host in enumerate(hosts):
                for i in group:
                    if host == stage and slot[i] + home <= now <= slot[group[-1]] + home:
                        total += tasks.need[home][g][i]
    return total


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
