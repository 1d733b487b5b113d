"""Slow, obvious versions of the tile arithmetic: plain loops in Python's doubles.

Only ``product_add`` keeps float32, because the order of its additions is part of what it promises.
"""

import math
from fractions import Fraction

import numpy as np


def product_add(c, a, b):
    """C + A B with float32 additions in ascending order of the inner index."""
    total = c.copy()
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            for k in range(a.shape[1]):
                total[i, j] = np.float32(total[i, j] + np.float32(a[i, k] * b[k, j]))
    return total


def rms_norm(x, weight, epsilon):
    rows = []
    for row in x.tolist():
        mean = sum(value**2 for value in row) / len(row)
        rows.append([w * v / math.sqrt(mean + epsilon) for v, w in zip(row, weight, strict=True)])
    return np.array(rows)


def rotate(x, angles, pairs):
    """Turn the plane (x[a], x[b]) of each head as a complex number by the token's angle."""
    turned = np.array(x, dtype=np.float64)
    tokens, heads, dim = x.shape
    for t in range(tokens):
        for h in range(heads):
            for j in range(dim // 2):
                a, b = (2 * j, 2 * j + 1) if pairs else (j, j + dim // 2)
                point = complex(x[t, h, a], x[t, h, b]) * complex(
                    math.cos(angles[t, j]), math.sin(angles[t, j])
                )
                turned[t, h, a], turned[t, h, b] = point.real, point.imag
    return turned


def silu(x):
    return x * (1 / (1 + math.exp(-x)))


def gelu(x):
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x):
    return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def attention(q, k, v, scale, q_positions, k_positions, window):
    """Softmax over the visible keys, taken at once; window None sees all earlier positions."""
    rows = []
    for i, position in enumerate(q_positions.tolist()):
        visible = [
            j
            for j, key_position in enumerate(k_positions.tolist())
            if key_position <= position and (window is None or position - key_position < window)
        ]
        scores = [
            scale * sum(x * y for x, y in zip(q[i].tolist(), k[j].tolist(), strict=True))
            for j in visible
        ]
        shares = [math.exp(score - max(scores)) for score in scores]
        rows.append(
            [
                sum(share * float(v[j, d]) for share, j in zip(shares, visible, strict=True))
                / sum(shares)
                for d in range(v.shape[1])
            ]
            if visible
            else [math.nan] * v.shape[1]
        )
    return np.array(rows).reshape(len(q_positions), v.shape[1])


def best(scores, count):
    """Indices of the highest scores, the best first, the lower index first among equals."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]


def choose_by_softmax(logits, count, normalise):
    exponentials = [math.exp(value - max(logits)) for value in logits]
    shares = [value / sum(exponentials) for value in exponentials]
    chosen = best(logits, count)
    weights = [shares[expert] for expert in chosen]
    if normalise:
        weights = [weight / sum(weights) for weight in weights]
    return chosen, weights


def choose_by_group(logits, correction, groups, kept_groups, count, normalise, scale):
    sigmoid = [1 / (1 + math.exp(-value)) for value in logits]
    corrected = [score + bias for score, bias in zip(sigmoid, correction, strict=True)]
    size = len(logits) // groups
    group_scores = [
        sum(sorted(corrected[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(groups)
    ]
    kept = best(group_scores, kept_groups)
    candidates = [
        score if expert // size in kept else -math.inf for expert, score in enumerate(corrected)
    ]
    chosen = best(candidates, count)
    weights = [sigmoid[expert] for expert in chosen]
    if normalise:
        weights = [weight / sum(weights) for weight in weights]
    return chosen, [weight * scale for weight in weights]


def value(bits, exponent_bits, fraction_bits):
    """Exact value of a non-negative finite binary pattern: IEEE 754's definition."""
    exponent, fraction = bits >> fraction_bits, bits & ((1 << fraction_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == 0:
        return Fraction(fraction, 1 << fraction_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(fraction, 1 << fraction_bits)) * Fraction(2) ** (exponent - bias)


def round_to(x, exponent_bits, fraction_bits):
    """Bits of the pattern nearest to a finite x, by bisection over all patterns; ties to even."""
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    exact, low, high = abs(Fraction(float(x))), 0, infinity
    while high - low > 1:
        middle = (low + high) // 2
        if value(middle, exponent_bits, fraction_bits) <= exact:
            low = middle
        else:
            high = middle
    below = exact - value(low, exponent_bits, fraction_bits)
    above = value(high, exponent_bits, fraction_bits) - exact
    nearest = low if below < above or (below == above and low % 2 == 0) else high
    return nearest | (int(math.copysign(1, x) < 0) << (exponent_bits + fraction_bits))
