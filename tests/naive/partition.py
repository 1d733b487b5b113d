"""Chunk boundaries by trying everything, written from the objectives."""

from itertools import combinations


def splits(units):
    """All ways to cut `units` into chunks of one unit and more."""
    for count in range(units):
        for edges in combinations(range(1, units), count):
            ends = [*edges, units]
            yield [end - start for start, end in zip([0, *edges], ends, strict=True)]


def chunk_times(table, sizes):
    prefix, result = 0, []
    for size in sizes:
        result.append(int(table[size - 1][prefix]))
        prefix += size
    return result


def terapipe(table, stages, max_chunks):
    """Least sum t + (stages - 1) max t; 0 means any number of chunks."""
    best = None
    for sizes in splits(len(table)):
        if max_chunks and len(sizes) > max_chunks:
            continue
        times = chunk_times(table, sizes)
        value = sum(times) + (stages - 1) * max(times)
        if best is None or value < best:
            best = value
    return best


def slowest(sizes, time):
    """Time of the slowest chunk, for ``time(size, prefix)``."""
    prefix, worst = 0, 0
    for size in sizes:
        worst = max(worst, time(size, prefix))
        prefix += size
    return worst


def best_page_move(sizes, page, time):
    """Least maximum after no move or one move of a page, chunks kept at half a page or more."""
    best = slowest(sizes, time)
    for giver in range(len(sizes)):
        for taker in range(len(sizes)):
            if giver == taker or 2 * (sizes[giver] - page) < page:
                continue
            moved = list(sizes)
            moved[giver] -= page
            moved[taker] += page
            best = min(best, slowest(moved, time))
    return best
