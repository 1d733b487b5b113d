"""Products, norms, rotary embedding and gates on tiles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import numeric as naive
from wafer_kernels.numeric import (
    Activation,
    add,
    add_bias,
    gate,
    product_add,
    product_add_transposed,
    rms_scale,
    rotate_halves,
    rotate_pairs,
    square_sums_add,
)

few = settings(max_examples=30, deadline=None)
size = st.integers(1, 9)
seed = st.integers(0, 2**32 - 1)


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def relative_error(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@few
@given(size, size, size, seed)
def test_product_is_the_twin_bit_for_bit(rows, inner, columns, seed):
    rng = np.random.default_rng(seed)
    a, b, c = normal(rng, rows, inner), normal(rng, inner, columns), normal(rng, rows, columns)
    expected = naive.product_add(c, a, b)
    transposed = c.copy()
    product_add_transposed(transposed, a, np.ascontiguousarray(b.T))
    product_add(c, a, b)
    np.testing.assert_array_equal(c, expected)
    np.testing.assert_array_equal(transposed, expected)


@few
@given(st.lists(size, min_size=1, max_size=5), seed)
def test_product_continued_over_slices_has_the_bits_of_one_product(slices, seed):
    rng = np.random.default_rng(seed)
    a, b = normal(rng, 3, sum(slices)), normal(rng, sum(slices), 37)
    whole, continued = np.zeros((3, 37), np.float32), np.zeros((3, 37), np.float32)
    product_add(whole, a, b)
    for end, width in zip(np.cumsum(slices), slices, strict=True):
        product_add(continued, np.ascontiguousarray(a[:, end - width : end]), b[end - width : end])
    np.testing.assert_array_equal(continued, whole)


def test_product_of_large_tiles_matches_blas():
    rng = np.random.default_rng(1)
    a, b = normal(rng, 61, 203), normal(rng, 203, 83)
    c = np.zeros((61, 83), np.float32)
    product_add(c, a, b)
    assert relative_error(c, a.astype(np.float64) @ b.astype(np.float64)) < 1e-6


@few
@given(st.lists(size, min_size=1, max_size=4), st.integers(1, 5), seed)
def test_norm_of_sliced_rows_is_the_norm_of_the_row(slices, rows, seed):
    rng = np.random.default_rng(seed)
    width = sum(slices)
    x, weight = normal(rng, rows, width), normal(rng, width)
    y, sums = np.empty_like(x), np.zeros(rows, np.float32)
    cuts = np.split(np.arange(width), np.cumsum(slices)[:-1])
    for cut in cuts:
        square_sums_add(sums, x[:, cut])
    for cut in cuts:
        part = np.empty((rows, cut.size), np.float32)
        rms_scale(part, x[:, cut], sums, weight[cut], width, 1e-5)
        y[:, cut] = part
    assert relative_error(y, naive.rms_norm(x, weight, 1e-5)) < 1e-6


def test_norm_of_equal_elements_is_the_weight():
    x = np.full((2, 16), 4.0, np.float32)
    sums = np.zeros(2, np.float32)
    square_sums_add(sums, x)
    rms_scale(x, x, sums, np.arange(16, dtype=np.float32), 16, 0.0)
    np.testing.assert_array_equal(x, np.tile(np.arange(16, dtype=np.float32), (2, 1)))


@few
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.booleans(), seed)
def test_rotation(tokens, heads, half, pairs, seed):
    rng = np.random.default_rng(seed)
    x = normal(rng, tokens, heads, 2 * half)
    angles = rng.uniform(-9, 9, (tokens, half))
    expected = naive.rotate(x, angles, pairs)
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    (rotate_pairs if pairs else rotate_halves)(x, cosine, sine)
    assert relative_error(x, expected) < 1e-6


def test_rotation_leaves_the_other_columns_of_a_head_alone():
    rng = np.random.default_rng(2)
    x = normal(rng, 3, 2, 10)
    before, expected = x.copy(), naive.rotate(x[:, :, 6:], np.ones((3, 2)), pairs=False)
    one = np.ones((3, 2), np.float32)
    rotate_halves(x[:, :, 6:], np.cos(one), np.sin(one))
    np.testing.assert_array_equal(x[:, :, :6], before[:, :, :6])
    assert relative_error(x[:, :, 6:], expected) < 1e-6


def test_layouts_of_the_rotation_give_the_same_products():
    rng = np.random.default_rng(3)
    q, k = normal(rng, 4, 1, 8), normal(rng, 4, 1, 8)
    angles = rng.uniform(-9, 9, (4, 4)).astype(np.float32)
    separated = [np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1) for x in (q, k)]
    for x in (q, k):
        rotate_pairs(x, np.cos(angles), np.sin(angles))
    for x in separated:
        rotate_halves(x, np.cos(angles), np.sin(angles))
    np.testing.assert_allclose(
        q[:, 0] @ k[:, 0].T, separated[0][:, 0] @ separated[1][:, 0].T, atol=1e-5
    )


@pytest.mark.parametrize(
    ("activation", "twin"),
    [
        (Activation.SILU, naive.silu),
        (Activation.GELU, naive.gelu),
        (Activation.GELU_TANH, naive.gelu_tanh),
    ],
)
def test_gates(activation, twin):
    gated = np.linspace(-12, 12, 241, dtype=np.float32).reshape(1, -1)
    up = np.linspace(3, -2, 241, dtype=np.float32).reshape(1, -1)
    y = np.empty_like(up)
    gate(y, gated, up, int(activation))
    expected = [twin(float(g)) * float(u) for g, u in zip(gated[0], up[0], strict=True)]
    np.testing.assert_allclose(y[0], expected, rtol=2e-6, atol=2e-6)
    assert y.dtype == np.float32


def test_gate_of_extreme_values_stays_finite():
    gated = np.array([[-200.0, 200.0]], np.float32)
    for activation in Activation:
        y = np.empty_like(gated)
        with np.errstate(over="ignore"):  # of exp(200), seen only without the compiler
            gate(y, gated, np.ones_like(gated), int(activation))
        np.testing.assert_array_equal(y, [[0.0, 200.0]])


def test_sums():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    add_bias(x, np.array([10, 20, 30], np.float32))
    add(x, np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(x, [[11, 22, 33], [14, 25, 36]])
