"""Cosine and sine of the rotary angles of a model, scaled forms included.

Frequencies and angles are float32 in the order of operations that the published checkpoints were
trained and are served with: at position 100,000 a rounded angle differs from the exact one by
thousandths of a radian, and the rounded one is the model's.
"""

from __future__ import annotations

import math

import numpy as np

from wafer_emu.architecture import Linear, Llama3, Rope, Yarn
from wafer_emu.model import Model

__all__ = ["inverse_frequencies", "rotary_tables"]

Float32 = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Positions = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def rotary_tables(model: Model, positions: Positions) -> tuple[Float32, Float32]:
    """Cosine and sine tables, both (tokens, rotary_dim / 2), YaRN's attention factor included.

    Parameters
    ----------
    model
        Gives the base, the scaling and the rotated width of a head.
    positions
        Positions of the tokens in their request (tokens,).
    """
    frequencies = inverse_frequencies(model.rope, model.rotary_dim)
    angles = positions.astype(np.float32)[:, None] * frequencies
    scaling = model.rope.scaling
    factor = np.float32(scaling.attention_factor if isinstance(scaling, Yarn) else 1.0)
    return np.cos(angles) * factor, np.sin(angles) * factor


def inverse_frequencies(rope: Rope, width: int) -> Float32:
    """Radians per position of each rotated plane (width / 2,), ``theta ** (-2 j / width)`` scaled.

    Sources: Su et al., arXiv 2104.09864; Peng et al., arXiv 2309.00071 (YaRN); the Llama 3.1
    reference code (``llama3``).
    """
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    base = np.float32(1.0) / np.float32(rope.theta) ** exponents
    match rope.scaling:
        case Linear(factor=factor):
            return base / np.float32(factor)
        case Llama3() as scaling:
            return _llama3(base, scaling)
        case Yarn() as scaling:
            return _yarn(base, scaling, rope.theta)
    return base


def _llama3(base: Float32, scaling: Llama3) -> Float32:
    """Keep short wavelengths, divide long ones, pass linearly from one to the other between."""
    wavelengths = np.float32(2 * math.pi) / base
    turns = np.float32(scaling.original_positions) / wavelengths
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    scaled: Float32 = (1 - kept) * base / np.float32(scaling.factor) + kept * base
    return scaled


def _yarn(base: Float32, scaling: Yarn, theta: float) -> Float32:
    """Keep planes that turn often in the original context, divide those that turn rarely."""
    planes = base.size

    def plane_turning(times: float) -> float:
        """Index of the plane that turns so many times within the original context."""
        per_turn = scaling.original_positions / (times * 2 * math.pi)
        return planes * math.log(per_turn) / math.log(theta)

    first, last = plane_turning(scaling.beta_fast), plane_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * planes - 1)
    width = np.float32(last - first or 0.001)
    planes_after = np.arange(planes, dtype=np.float32) - np.float32(first)
    divided = np.clip(planes_after / width, 0, 1)
    scaled: Float32 = base / np.float32(scaling.factor) * divided + base * (1 - divided)
    return scaled
