"""16-bit storage of tiles: bit patterns (uint16) to and from float32.

Narrowing rounds to the nearest value, ties to the even one, as IEEE 754 does; what is beyond the
largest finite value becomes infinite; a NaN stays a NaN. Widening is exact.
"""

from __future__ import annotations

import numpy as np

from wafer_kernels._jit import kernel
from wafer_kernels.numeric import Float32

__all__ = ["narrow_bfloat16", "narrow_float16", "widen_bfloat16", "widen_float16"]

Bits16 = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]

SIGN16, NAN16, INFINITY16, FRACTION16 = 0x8000, 0x7E00, 0x7C00, 0x03FF
MAGNITUDE32, INFINITY32, FRACTION32, IMPLICIT32 = 0x7FFFFFFF, 0x7F800000, 0x007FFFFF, 0x00800000
REBIAS = 127 - 15
"""Difference between the exponent biases of float32 and float16."""
SMALLEST_NORMAL = (REBIAS + 1) << 23
"""Float32 bits of the smallest normal float16, 2^-14."""
OVERFLOW = 0x477FF000
"""Float32 bits of 65520, halfway from the largest float16 to the next power of two."""


@kernel()
def _shift_to_even(bits: np.int64, shift: np.int64) -> np.int64:
    """``bits / 2^shift``, rounded to the nearest integer, ties to even."""
    half = np.int64(1) << (shift - 1)
    return (bits + half - 1 + ((bits >> shift) & 1)) >> shift


@kernel()
def narrow_bfloat16(narrow: Bits16, wide: Float32) -> None:
    """Round float32 (any shape, C-contiguous) to bfloat16 bits of the same shape."""
    bits, result = wide.reshape(-1).view(np.uint32), narrow.reshape(-1)
    for i in range(bits.size):
        magnitude = np.int64(bits[i]) & MAGNITUDE32
        sign = (np.int64(bits[i]) >> 16) & SIGN16
        if magnitude > INFINITY32:
            result[i] = sign | 0x7FC0
        else:
            result[i] = sign | _shift_to_even(magnitude, np.int64(16))


@kernel()
def widen_bfloat16(wide: Float32, narrow: Bits16) -> None:
    """Read bfloat16 bits (any shape, C-contiguous) as float32 of the same shape."""
    bits, result = narrow.reshape(-1), wide.reshape(-1).view(np.uint32)
    for i in range(bits.size):
        result[i] = np.int64(bits[i]) << 16


@kernel()
def narrow_float16(narrow: Bits16, wide: Float32) -> None:
    """Round float32 (any shape, C-contiguous) to float16 bits of the same shape."""
    bits, result = wide.reshape(-1).view(np.uint32), narrow.reshape(-1)
    for i in range(bits.size):
        magnitude = np.int64(bits[i]) & MAGNITUDE32
        sign = (np.int64(bits[i]) >> 16) & SIGN16
        if magnitude > INFINITY32:
            rounded = np.int64(NAN16)
        elif magnitude >= OVERFLOW:
            rounded = np.int64(INFINITY16)
        elif magnitude >= SMALLEST_NORMAL:
            rounded = _shift_to_even(magnitude - (REBIAS << 23), np.int64(13))
        else:
            # Subnormal, in units of 2^-24: the significand without its binary exponent. A shift
            # beyond the significand's 24 bits and one more leaves nothing.
            shift = min(126 - (magnitude >> 23), np.int64(26))
            rounded = _shift_to_even((magnitude & FRACTION32) | IMPLICIT32, shift)
        result[i] = sign | rounded


@kernel()
def widen_float16(wide: Float32, narrow: Bits16) -> None:
    """Read float16 bits (any shape, C-contiguous) as float32 of the same shape."""
    bits, result = narrow.reshape(-1), wide.reshape(-1)
    result_bits = result.view(np.uint32)
    for i in range(bits.size):
        sign = (np.int64(bits[i]) & SIGN16) << 16
        magnitude = np.int64(bits[i]) & ~SIGN16
        if magnitude >= INFINITY16:
            result_bits[i] = sign | INFINITY32 | ((magnitude & FRACTION16) << 13)
        elif magnitude > FRACTION16:
            result_bits[i] = sign | ((magnitude << 13) + (REBIAS << 23))
        else:
            result[i] = np.float32(magnitude) * np.float32(2.0**-24)
            result_bits[i] |= sign
