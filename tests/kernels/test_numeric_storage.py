"""16-bit storage: rounding against the definition, and against NumPy's float16."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import numeric as naive
from wafer_kernels.numeric_storage import (
    narrow_bfloat16,
    narrow_float16,
    widen_bfloat16,
    widen_float16,
)

EVERY_PATTERN = np.arange(2**16, dtype=np.uint16)


def narrow(kernel, wide):
    result = np.zeros(wide.shape, np.uint16)
    kernel(result, wide)
    return result


def widen(kernel, bits):
    result = np.zeros(bits.shape, np.float32)
    kernel(result, bits)
    return result


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_rounding_is_the_definition(values):
    wide = np.array(values, np.float32)
    for kernel, exponent_bits, fraction_bits in ((narrow_bfloat16, 8, 7), (narrow_float16, 5, 10)):
        expected = [naive.round_to(value, exponent_bits, fraction_bits) for value in values]
        assert narrow(kernel, wide).tolist() == expected


def test_float16_is_numpys_for_every_pattern():
    np.testing.assert_array_equal(
        widen(widen_float16, EVERY_PATTERN), EVERY_PATTERN.view(np.float16).astype(np.float32)
    )


def test_float16_rounds_like_numpy_at_and_beside_every_midpoint():
    values = EVERY_PATTERN[:0x7C00].view(np.float16).astype(np.float32)
    middles = np.append((values[1:] + values[:-1]) / 2, np.float32(65520))
    wide = np.concatenate([values, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9)])
    wide = np.concatenate([wide, -wide]).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = wide.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(narrow(narrow_float16, wide), expected)


@pytest.mark.parametrize(
    ("narrower", "wider"), [(narrow_bfloat16, widen_bfloat16), (narrow_float16, widen_float16)]
)
def test_what_was_widened_narrows_to_the_same_bits(narrower, wider):
    wide = widen(wider, EVERY_PATTERN.reshape(256, 256))
    back = narrow(narrower, wide)
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(back[number], EVERY_PATTERN.reshape(256, 256)[number])
    assert np.isnan(widen(wider, back)[~number]).all()


def test_bfloat16_overflow_and_ties():
    wide = np.array([3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, np.inf, -np.inf], np.float32)
    assert narrow(narrow_bfloat16, wide).tolist() == [0x7F80, 0x3F80, 0x3F82, 0x7F80, 0xFF80]
