"""One tile product stepped cycle by cycle: operands move between the cells of an array."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

Matrix = list[list[int]]


def output_stationary(rows: int, columns: int, a: Matrix, b: Matrix, drain: bool) -> int:
    """Cycles of one fold C = A B with C kept in the cells; the cells compute the real product."""
    m, k, n = len(a), len(b), len(b[0])
    right = [[0] * columns for _ in range(rows)]
    down = [[0] * columns for _ in range(rows)]
    total = [[0] * columns for _ in range(rows)]
    done = [[0] * columns for _ in range(rows)]
    cycles = 0
    while min(min(row) for row in done) < k:
        for i in reversed(range(rows)):
            for j in reversed(range(columns)):
                a_index, b_index = cycles - i, cycles - j
                a_in, b_in = 0, 0
                if j > 0:
                    a_in = right[i][j - 1]
                elif i < m and 0 <= a_index < k:
                    a_in = a[i][a_index]
                if i > 0:
                    b_in = down[i - 1][j]
                elif j < n and 0 <= b_index < k:
                    b_in = b[b_index][j]
                right[i][j], down[i][j] = a_in, b_in
                total[i][j] += a_in * b_in
                if 0 <= cycles - i - j < k:
                    done[i][j] += 1
        cycles += 1
    for i in range(m):
        for j in range(n):
            assert total[i][j] == sum(a[i][s] * b[s][j] for s in range(k))
    if drain:
        left = rows
        while left > 0:  # results leave through the lower edge, one row of cells a cycle
            left -= 1
            cycles += 1
    return cycles


def stationary(rows: int, columns: int, kept: Matrix, streamed: Matrix) -> int:
    """Cycles of one fold Y = X W with W (k, n) kept in the cells and X (t, k) streamed through."""
    k, n, length = len(kept), len(kept[0]), len(streamed)
    weight = [[0] * columns for _ in range(rows)]
    cycles = 0
    for load in range(rows):  # the row for the bottom of the array goes in first
        for i in reversed(range(1, rows)):
            weight[i] = weight[i - 1]
        source = rows - 1 - load
        weight[0] = [kept[source][j] if source < k and j < n else 0 for j in range(columns)]
        cycles += 1
    right = [[0] * columns for _ in range(rows)]
    down = [[0] * columns for _ in range(rows)]
    results = [[0] * columns for _ in range(length)]
    left = length * columns
    stream = 0
    while left > 0:
        for i in reversed(range(rows)):
            for j in reversed(range(columns)):
                index = stream - i
                x_in = 0
                if j > 0:
                    x_in = right[i][j - 1]
                elif i < k and 0 <= index < length:
                    x_in = streamed[index][i]
                above = down[i - 1][j] if i > 0 else 0
                right[i][j], down[i][j] = x_in, above + x_in * weight[i][j]
        for j in range(columns):
            index = stream - (rows - 1) - j
            if 0 <= index < length:
                results[index][j] = down[rows - 1][j]
                left -= 1
        stream += 1
        cycles += 1
    for t in range(length):
        for j in range(n):
            assert results[t][j] == sum(streamed[t][s] * kept[s][j] for s in range(k))
    return cycles


def folds(total: int, size: int) -> list[range]:
    """Cut `total` into pieces of at most `size`."""
    return [range(first, min(first + size, total)) for first in range(0, total, size)]


def array_cycles(
    rows: int, columns: int, dataflow: str, a: Matrix, b: Matrix, *, drain: bool = False
) -> int:
    """Cycles of C = A B on a rows x columns array, fold after fold."""
    m, k, n = len(a), len(b), len(b[0])
    cycles = 0
    if dataflow == "os":
        for i_fold in folds(m, rows):
            for j_fold in folds(n, columns):
                a_part = [a[i] for i in i_fold]
                b_part = [[b[s][j] for j in j_fold] for s in range(k)]
                cycles += output_stationary(rows, columns, a_part, b_part, drain)
    elif dataflow == "ws":
        for k_fold in folds(k, rows):
            for j_fold in folds(n, columns):
                kept = [[b[s][j] for j in j_fold] for s in k_fold]
                cycles += stationary(
                    rows, columns, kept, [[a[i][s] for s in k_fold] for i in range(m)]
                )
    else:
        for k_fold in folds(k, rows):
            for i_fold in folds(m, columns):
                kept = [[a[i][s] for i in i_fold] for s in k_fold]
                cycles += stationary(
                    rows, columns, kept, [[b[s][j] for s in k_fold] for j in range(n)]
                )
    return cycles


def sram_traffic(rows: int, columns: int, dataflow: str, m: int, k: int, n: int) -> tuple[int, int]:
    """Elements read and written: each fold reads what enters it and writes what leaves it."""
    reads = writes = 0
    if dataflow == "os":
        for i_fold in folds(m, rows):
            for j_fold in folds(n, columns):
                reads += len(i_fold) * k + k * len(j_fold)
                writes += len(i_fold) * len(j_fold)
    elif dataflow == "ws":
        for k_fold in folds(k, rows):
            for j_fold in folds(n, columns):
                reads += len(k_fold) * len(j_fold) + m * len(k_fold)
                writes += m * len(j_fold)
    else:
        for k_fold in folds(k, rows):
            for i_fold in folds(m, columns):
                reads += len(k_fold) * len(i_fold) + n * len(k_fold)
                writes += len(i_fold) * n
    return reads, writes


def simd_cycles(lanes: int, issue_millicycles: int, m: int, k: int, n: int) -> int:
    """Cycles of k n vector multiply-adds of length m, in exact fractions of a cycle."""
    total = Fraction(0)
    for _ in range(k * n):
        left = m
        while left > 0:
            left -= lanes
            total += 1
        total += Fraction(issue_millicycles, 1000)
    return ceil(total)
