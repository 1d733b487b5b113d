"""The memory ledger one quantum and one core at a time."""


def spread(room, quantum, quanta):
    """Hand every quantum to the core with the most room left, the last of equals; None: no room."""
    left = list(room)
    for _ in range(quanta):
        core = max(range(len(left)), key=lambda c: (left[c], c), default=None)
        if core is None or left[core] < quantum:
            return None
        left[core] -= quantum
    return [before - after for before, after in zip(room, left, strict=True)]


class Core:
    """What one core holds, by class, and the fullest it has been."""

    def __init__(self, capacity, classes):
        self.capacity = capacity
        self.resident = [0] * classes
        self.peak = 0
        self.peak_cycle = 0

    @property
    def total(self):
        return sum(self.resident)

    def add(self, kind, amount, cycle):
        """Hold ``amount`` more (less where negative) and return True, or change nothing."""
        if self.resident[kind] + amount < 0 or self.total + amount > self.capacity:
            return False
        self.resident[kind] += amount
        if self.total > self.peak:
            self.peak, self.peak_cycle = self.total, cycle
        return True
