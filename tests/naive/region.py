"""A region of cores as a dictionary of small arrays, and products on it, step by step."""

from itertools import pairwise

import numpy as np


def parts(total, lines):
    """Consecutive balanced parts (first, end) of a total, the larger ones first."""
    ends = [0]
    for line in range(lines):
        ends.append(ends[-1] + total // lines + (1 if line < total % lines else 0))
    return list(pairwise(ends))


def folded(lines):
    """Where the members of a ring stand on a line: out over even places, back over odd ones."""
    out = [place for place in range(lines) if place % 2 == 0]
    back = [place for place in range(lines) if place % 2 == 1]
    return out + back[::-1]


def deal(matrix, rows, columns):
    """Tile of every physical core (row, column)."""
    tiles = {}
    for i, (top, bottom) in enumerate(parts(matrix.shape[0], rows)):
        for j, (left, right) in enumerate(parts(matrix.shape[1], columns)):
            tiles[folded(rows)[i], folded(columns)[j]] = matrix[top:bottom, left:right]
    return tiles


def compute_shift(a, b, rows, columns):
    """A B in max(rows, columns) steps; each core begins with another slice of the inner index."""
    slices = parts(a.shape[1], max(rows, columns))
    result = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for i, (top, bottom) in enumerate(parts(a.shape[0], rows)):
        for j, (left, right) in enumerate(parts(b.shape[1], columns)):
            own = i * columns // rows + j if columns >= rows else j * rows // columns + i
            for step in range(len(slices)):
                low, high = slices[(own + step) % len(slices)]
                for k in range(low, high):
                    for m in range(top, bottom):
                        for n in range(left, right):
                            result[m, n] = result[m, n] + a[m, k] * b[k, n]
    return result
