"""Slow, obvious attention of one chunk: tokens and tiles are ranges, time a dictionary.

Positions are counted from the chunk's first token; keys of the prefix have negative ones.
"""

from math import ceil
from typing import NamedTuple


def part(total, parts, index):
    """Deal ``total`` things one by one and count what ``index`` got."""
    return sum(1 for thing in range(total) if thing % parts == index)


def cut(keys, size):
    """Cut a range into ranges of ``size``, the last one short."""
    return [keys[at : at + size] for at in range(0, len(keys), size)]


class Block(NamedTuple):
    """One chunk of queries on one region; ``tile(m, k, n)`` are a product's cycles."""

    cost: object
    tile: object
    chunk: int
    prefix: int = 0

    def step(self, queries, keys):
        if queries == 0 or keys == 0:
            return 0
        c = self.cost
        scores = self.tile(queries, c.key_width, keys) + self.vector(queries * keys, 8)
        values = self.tile(queries, keys, c.value_width) + self.vector(queries * c.value_width, 1)
        return c.units * (scores + values) + c.step_cycles

    def vector(self, elements, operations):
        issue = ceil(operations * self.cost.vector_issue_millicycles / 1000)
        return operations * ceil(elements / self.cost.vector_lanes) + issue

    def shift(self, keys):
        c = self.cost
        moved = c.units * keys * (c.key_width + c.value_width) * c.element_bytes
        return ceil(moved / c.link_bytes_per_cycle) + c.shift_latency_cycles

    def queries(self, row, keys):
        """Tokens of the row's query tiles that have to meet these keys."""
        c = self.cost
        met = []
        for number, tokens in enumerate(cut(range(self.chunk), c.query_tile)):
            too_early = tokens[-1] < keys[0]
            too_late = c.window > 0 and tokens[0] - keys[-1] >= c.window
            if number % c.rows == row and not (c.causal_skip and (too_early or too_late)):
                met.extend(tokens)
        return len(met)

    def charged(self, query, key):
        window = self.cost.window
        visible = key <= query and (window == 0 or query - key < window)
        return visible or not self.cost.causal_skip

    def pairs(self, keys):
        return sum(self.charged(query, key) for query in range(self.chunk) for key in keys)

    def ring(self, tiles, free):
        """Pass ``tiles`` (a range of keys a row) once around; return when each row is free."""
        rows = self.cost.rows
        finishes = [[cycle] for cycle in free]
        start = {}
        for x in range(rows):
            for row in range(rows):
                keys = tiles[(row + x) % rows]
                if not keys:
                    continue
                done = finishes[row]
                arrival = free[row]
                if x > 0:
                    second_buffer = done[-2] if len(done) > 1 else done[0]
                    sent = start[(row + 1) % rows, x - 1]
                    arrival = max(sent, second_buffer) + self.shift(len(keys))
                start[row, x] = arrival
                queries = self.queries(row, keys)
                if queries > 0:
                    start[row, x] = max(arrival, done[-1])
                    done.append(start[row, x] + self.step(queries, len(keys)))
        return [done[-1] for done in finishes]

    def own_passes(self, split, size):
        """The chunk's own keys of a split: passes of one (maybe empty) tile a row."""
        c = self.cost
        mine = cut(range(self.chunk), size)[split :: c.splits]
        passes = [mine[at : at + c.rows] for at in range(0, len(mine), c.rows)]
        return [tiles + [range(0)] * (c.rows - len(tiles)) for tiles in passes]

    def prefix_passes(self, split):
        """Prefix keys of a split that any query sees: passes of one (maybe empty) tile a row."""
        c = self.cost
        seen = self.prefix
        if c.window > 0:
            seen = min(seen, c.window - 1)
        sizes = [part(seen, c.splits, j) for j in range(c.splits)]
        first = -seen + sum(sizes[:split])
        keys = range(first, first + sizes[split])
        return [self.deal(some) for some in cut(keys, c.rows * c.key_tile)]

    def deal(self, keys):
        """One pass over consecutive keys: even numbers of whole granules, the last one short."""
        granules = len(cut(keys, self.cost.key_granule))
        tiles = []
        for row in range(self.cost.rows):
            size = part(granules, self.cost.rows, row) * self.cost.key_granule
            tiles.append(keys[:size])
            keys = keys[size:]
        return tiles

    def split_diagonal(self, split, size):
        """When the last row ends a split's own keys; rows do not wait for one another."""
        free = [0] * self.cost.rows
        for tiles in self.own_passes(split, size):
            free = self.ring(tiles, free)
        return max(free)

    def split_prefix(self, split):
        """Cycles of a split's passes over the prefix, each starting when all rows are free."""
        free = [0] * self.cost.rows
        return sum(max(self.ring(tiles, free)) for tiles in self.prefix_passes(split))

    def diagonal_cycles(self):
        return self.own_tile()[0]

    def own_tile(self):
        """Cycles and size of the fastest tiles for the chunk's own keys, the smaller of equals."""
        splits, granule = range(self.cost.splits), self.cost.key_granule
        return min(
            (max(self.split_diagonal(split, size) for split in splits), size)
            for size in range(granule, self.cost.key_tile + 1, granule)
        )

    def prefix_cycles(self):
        return max(self.split_prefix(split) for split in range(self.cost.splits))

    def tiles(self):
        """All tiles of keys that each split meets."""
        _, size = self.own_tile()
        for split in range(self.cost.splits):
            passes = self.prefix_passes(split) + self.own_passes(split, size)
            yield [keys for tiles in passes for keys in tiles if keys]

    def busy(self):
        """Sum of the steps of every (split, row)."""
        return [
            [
                sum(self.step(self.queries(row, keys), len(keys)) for keys in tiles)
                for row in range(self.cost.rows)
            ]
            for tiles in self.tiles()
        ]

    def steps(self):
        """How many steps multiply (queries, keys) of a shape, over all rows and splits."""
        counts = {}
        for tiles in self.tiles():
            for keys in tiles:
                for row in range(self.cost.rows):
                    shape = self.queries(row, keys), len(keys)
                    counts[shape] = counts.get(shape, 0) + 1
        return {shape: count for shape, count in counts.items() if min(shape) > 0}
