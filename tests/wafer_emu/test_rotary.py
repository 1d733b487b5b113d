"""Rotary tables: closed forms, the dense reference, and what each scaling promises."""

import math

import numpy as np
import pytest

from tests.naive import dense
from wafer_emu.architecture import Linear, Llama3, Rope, Yarn
from wafer_emu.model import Model
from wafer_emu.rotary import inverse_frequencies, rotary_tables

LLAMA3 = Llama3(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192
)
YARN = Yarn(
    factor=40.0, original_positions=4096, beta_fast=32.0, beta_slow=1.0, attention_factor=1.25
)


@pytest.mark.parametrize("scaling", [None, Linear(factor=3.0), LLAMA3, YARN])
@pytest.mark.parametrize(("theta", "width"), [(10000.0, 64), (500000.0, 128), (1e6, 6)])
def test_frequencies_are_the_dense_references(scaling, theta, width):
    rope = Rope(theta=theta, scaling=scaling)
    expected = [dense.frequency(rope, width, plane) for plane in range(width // 2)]
    found = inverse_frequencies(rope, width)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=5e-7)


def test_closed_form():
    found = inverse_frequencies(Rope(theta=10000.0), 8)
    np.testing.assert_allclose(found, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    plain = inverse_frequencies(Rope(theta=500000.0), 128)
    scaled = inverse_frequencies(Rope(theta=500000.0, scaling=LLAMA3), 128)
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_array_equal(scaled[long], plain[long] / np.float32(8))
    between = ~short & ~long
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_yarn_keeps_fast_planes_and_divides_slow_ones():
    """DeepSeek-V3's own parameters: the ramp runs from plane 10 to plane 23 of 32."""
    ratio = inverse_frequencies(Rope(theta=10000.0), 64) / inverse_frequencies(
        Rope(theta=10000.0, scaling=YARN), 64
    )
    np.testing.assert_allclose(ratio[:11], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[23:], 40.0, rtol=1e-6)
    assert (np.diff(ratio[10:24]) > 0).all()


def test_tables_of_positions():
    model = Model.preset("llama-3-8b")
    positions = np.array([0, 5, 70000])
    cosine, sine = rotary_tables(model, positions)
    assert cosine.shape == sine.shape == (3, 64)
    assert cosine.dtype == sine.dtype == np.float32
    np.testing.assert_array_equal(cosine[0], 1.0)
    np.testing.assert_allclose(cosine[:2, 0], np.cos([0.0, 5.0]), rtol=1e-6)
    np.testing.assert_allclose(cosine**2 + sine**2, 1.0, rtol=1e-6)


def test_yarn_stretches_both_tables():
    model = Model.preset("llama-3-8b").replace(rope=Rope(theta=10000.0, scaling=YARN))
    cosine, sine = rotary_tables(model, np.arange(9))
    np.testing.assert_allclose(cosine**2 + sine**2, 1.25**2, rtol=1e-6)
