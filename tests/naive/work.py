"""Counts of tile programs by looping over cores, steps and links."""


def deal(total, lines):
    """Deal ``total`` things one by one to lines; how many each got."""
    return [sum(1 for thing in range(total) if thing % lines == line) for line in range(lines)]


def folded_ring(length):
    """Places on a line in the order of a ring: out over even places, back over odd ones."""
    places = [place for place in range(length) if place % 2 == 0]
    return places + [place for place in reversed(range(length)) if place % 2 == 1]


def placed(parts):
    """Parts of the members of a folded ring in the order of places."""
    by_place = dict(zip(folded_ring(len(parts)), parts, strict=True))
    return [by_place[place] for place in range(len(parts))]


def compute_shift_tiles(rows, columns, m, k, n):
    """(row, column, m, k, n) of every tile product of a compute-shift product, by place."""
    tiles = []
    for row, height in enumerate(placed(deal(m, rows))):
        for column, width in enumerate(placed(deal(n, columns))):
            for depth in deal(k, max(rows, columns)):
                tiles.append((row, column, height, depth, width))
    return tiles


def row_vector_tiles(rows, columns, m, k, n):
    """The same of m row vectors whose weights stay."""
    tiles = []
    for _vector in range(m):
        for row, depth in enumerate(placed(deal(k, rows))):
            for column, width in enumerate(placed(deal(n, columns))):
                tiles.append((row, column, 1, depth, width))
    return tiles


def turn_hops(length, die_lines, first, turns):
    """Hops, and those that cross a die border, of an element that turns around a folded ring."""
    places, hops, crossings = folded_ring(length), 0, 0
    for turn in range(turns):
        here = places[(first - turn) % length]
        there = places[(first - turn - 1) % length]
        hops += abs(here - there)
        crossings += abs(here // die_lines - there // die_lines)
    return hops, crossings


def skew_hops(rows, columns, m, k, die_columns):
    """Element-hops of skewing A on a grid with a slice per column, and those between dies."""
    slices = max(rows, columns)
    hops = crossings = 0
    for row, height in enumerate(deal(m, rows)):
        offset = row * slices // rows
        for column in range(columns):
            length, backwards = (offset, False)
            if slices - offset < offset:
                length, backwards = (slices - offset, True)
            start = column + length if backwards else column
            along = turn_hops(columns, die_columns, start, length)
            hops += along[0] * height * (k // slices)
            crossings += along[1] * height * (k // slices)
    return hops, crossings


def summing_hops(cores):
    """Hops of a vector: chains of a root's length, a chain of their leaders, and back."""
    group = 1
    while group * group < cores:
        group += 1
    hops, leaders = 0, []
    for first in range(0, cores, group):
        leaders.append(first)
        hops += len(range(first + 1, min(first + group, cores)))
    return hops + leaders[-1] - leaders[0] + cores - 1
