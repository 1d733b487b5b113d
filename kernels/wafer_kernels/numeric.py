"""Real arithmetic on the tiles of one core: products, norms, rotary embedding, gates, routing.

A tile is a small C-contiguous float32 array in the memory of one core. Sums are float32 and are
taken one by one in ascending order of the summed index, so a sum that is split over cores and
continued in that order gives the same bits as an unsplit one. Every kernel writes into arrays of
its caller. Attention, routing and 16-bit storage have files of their own.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np

from wafer_kernels._jit import kernel

__all__ = [
    "Activation",
    "add",
    "add_bias",
    "gate",
    "product_add",
    "product_add_transposed",
    "rms_scale",
    "rotate_halves",
    "rotate_pairs",
    "square_sums_add",
]

Float32 = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Int64 = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Activation(IntEnum):
    """The function that gates the up-projection of a feed-forward block."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2


@kernel()
def product_add(c: Float32, a: Float32, b: Float32) -> None:
    """Add the product of two tiles to a third, ``C += A B``.

    Parameters
    ----------
    c
        Sum so far, modified in place (rows, columns).
    a
        Left operand (rows, inner).
    b
        Right operand (inner, columns).
    """
    rows, inner = a.shape
    columns = b.shape[1]
    quads, pairs = inner - inner % 4, rows - rows % 2
    # Two rows at a time share what is loaded of B. Four steps of the inner index at a time, still
    # added one after the other: the sum stays in a register and the loop over columns is
    # vectorised.
    for i in range(0, pairs, 2):
        for k in range(0, quads, 4):
            a0, a1, a2, a3 = a[i, k], a[i, k + 1], a[i, k + 2], a[i, k + 3]
            d0, d1, d2, d3 = a[i + 1, k], a[i + 1, k + 1], a[i + 1, k + 2], a[i + 1, k + 3]
            for j in range(columns):
                b0, b1, b2, b3 = b[k, j], b[k + 1, j], b[k + 2, j], b[k + 3, j]
                c[i, j] = (((c[i, j] + a0 * b0) + a1 * b1) + a2 * b2) + a3 * b3
                c[i + 1, j] = (((c[i + 1, j] + d0 * b0) + d1 * b1) + d2 * b2) + d3 * b3
        for k in range(quads, inner):
            for j in range(columns):
                c[i, j] += a[i, k] * b[k, j]
                c[i + 1, j] += a[i + 1, k] * b[k, j]
    if pairs < rows:
        for k in range(inner):
            for j in range(columns):
                c[pairs, j] += a[pairs, k] * b[k, j]


@kernel()
def product_add_transposed(c: Float32, a: Float32, b: Float32) -> None:
    """Add the product with a transposed tile, ``C += A B^T``; same bits as ``product_add``.

    Parameters
    ----------
    c
        Sum so far, modified in place (rows, columns).
    a
        Left operand (rows, inner).
    b
        Right operand (columns, inner).
    """
    rows, inner = a.shape
    columns = b.shape[0]
    quads = columns - columns % 4
    for i in range(rows):
        # Four independent sums hide the latency of an addition.
        for j in range(0, quads, 4):
            c0, c1, c2, c3 = c[i, j], c[i, j + 1], c[i, j + 2], c[i, j + 3]
            for k in range(inner):
                c0 += a[i, k] * b[j, k]
                c1 += a[i, k] * b[j + 1, k]
                c2 += a[i, k] * b[j + 2, k]
                c3 += a[i, k] * b[j + 3, k]
            c[i, j], c[i, j + 1], c[i, j + 2], c[i, j + 3] = c0, c1, c2, c3
        for j in range(quads, columns):
            for k in range(inner):
                c[i, j] += a[i, k] * b[j, k]


@kernel()
def add_bias(x: Float32, bias: Float32) -> None:
    """Add a bias (columns,) to every row of a tile (rows, columns), in place."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] += bias[j]


@kernel()
def add(x: Float32, y: Float32) -> None:
    """Add a tile to another of its shape, ``X += Y``: residuals and reductions over cores."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] += y[i, j]


@kernel()
def square_sums_add(sums: Float32, x: Float32) -> None:
    """Add each row's squares (rows, columns) to its sum so far (rows,), in place."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            sums[i] += x[i, j] * x[i, j]


@kernel()
def rms_scale(
    y: Float32, x: Float32, sums: Float32, weight: Float32, width: int, epsilon: float
) -> None:
    """Scale a slice of rows by their root mean square, ``y = w x / sqrt(sum / width + epsilon)``.

    Parameters
    ----------
    y
        Result (rows, columns); may be ``x`` itself.
    x
        The slice that this core holds (rows, columns).
    sums
        Sum of squares over the *whole* row (rows,), from ``square_sums_add``.
    weight
        Weight of this slice's columns (columns,).
    width
        Elements of the whole row.
    epsilon
        The model's ``rms_norm_eps``.
    """
    for i in range(x.shape[0]):
        mean = sums[i] / np.float32(width)
        inverse = np.float32(1.0) / np.sqrt(mean + np.float32(epsilon))
        for j in range(x.shape[1]):
            y[i, j] = weight[j] * (x[i, j] * inverse)


@kernel()
def rotate_halves(x: Float32, cosine: Float32, sine: Float32) -> None:
    """Rotate element ``j`` of each head with element ``j + dim / 2`` by the token's angle ``j``.

    Parameters
    ----------
    x
        Queries or keys, modified in place (tokens, heads, dim).
    cosine, sine
        Of the angles (tokens, dim / 2).
    """
    half = x.shape[2] // 2
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for j in range(half):
                first, second = x[t, h, j], x[t, h, j + half]
                x[t, h, j] = first * cosine[t, j] - second * sine[t, j]
                x[t, h, j + half] = second * cosine[t, j] + first * sine[t, j]


@kernel()
def rotate_pairs(x: Float32, cosine: Float32, sine: Float32) -> None:
    """Rotate element ``2 j`` of each head with element ``2 j + 1``: DeepSeek's interleaved layout.

    Parameters as in ``rotate_halves``. The pairs stay where they are; queries and keys share the
    layout, so their products equal those of an implementation that separates the pairs.
    """
    half = x.shape[2] // 2
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for j in range(half):
                first, second = x[t, h, 2 * j], x[t, h, 2 * j + 1]
                x[t, h, 2 * j] = first * cosine[t, j] - second * sine[t, j]
                x[t, h, 2 * j + 1] = second * cosine[t, j] + first * sine[t, j]


@kernel()
def _activate(x: np.float32, activation: int) -> np.float32:
    one, half = np.float32(1.0), np.float32(0.5)
    if activation == Activation.SILU:
        return x / (one + np.exp(-x))
    if activation == Activation.GELU:
        return half * x * (one + math.erf(x * np.float32(math.sqrt(0.5))))
    inner = np.float32(math.sqrt(2.0 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return half * x * (one + np.tanh(inner))


@kernel()
def gate(y: Float32, gated: Float32, up: Float32, activation: int) -> None:
    """Multiply the up-projection by the activated gate, ``y = f(gated) * up``.

    Parameters
    ----------
    y
        Result (rows, columns); may be ``gated`` or ``up``.
    gated, up
        Outputs of the gate and of the up projection (rows, columns).
    activation
        One of ``Activation``.
    """
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = _activate(gated[i, j], activation) * up[i, j]
