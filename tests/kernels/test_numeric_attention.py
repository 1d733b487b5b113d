"""Online softmax: keys in any pieces, masks, merging of states."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import numeric as naive
from wafer_kernels.numeric_attention import (
    SoftmaxState,
    attend,
    attention_finish,
    attention_reset,
    attention_tile,
    merge,
)

few = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def new_state(queries, width):
    state = SoftmaxState(
        np.full(queries, np.nan, np.float32),
        np.full(queries, np.nan, np.float32),
        np.full((queries, width), np.nan, np.float32),
    )
    attention_reset(state)
    return state


def finished(state):
    output = np.empty_like(state.values)
    attention_finish(output, state)
    return output


def tensors(seed, queries, keys, dim=8, width=6):
    rng = np.random.default_rng(seed)
    return tuple(
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((queries, dim), (keys, dim), (keys, width))
    )


def attend_pieces(state, q, k, v, q_positions, pieces, window):
    for piece in pieces:
        scores = np.empty((len(q), piece.size), np.float32)
        attention_tile(state, scores, q, k[piece], v[piece], 0.35, q_positions, piece, window)


@st.composite
def cut_keys(draw):
    """A number of keys, and their positions dealt to pieces of any order."""
    keys = draw(st.integers(1, 24))
    pieces = draw(st.integers(1, 5))
    owners = np.array(draw(st.lists(st.integers(0, pieces - 1), min_size=keys, max_size=keys)))
    return keys, [np.flatnonzero(owners == piece) for piece in range(pieces)]


@few
@given(cut_keys(), st.integers(1, 6), st.sampled_from([0, 1, 3, 7]), seeds)
def test_keys_in_any_pieces_equal_one_pass(cut, queries, window, seed):
    keys, pieces = cut
    q, k, v = tensors(seed, queries, keys)
    q_positions = np.random.default_rng(seed).integers(0, keys, queries)
    expected = naive.attention(q, k, v, 0.35, q_positions, np.arange(keys), window or None)

    one_after_another = new_state(queries, v.shape[1])
    attend_pieces(one_after_another, q, k, v, q_positions, pieces, window)
    merged = new_state(queries, v.shape[1])
    for piece in pieces:
        part = new_state(queries, v.shape[1])
        attend_pieces(part, q, k, v, q_positions, [piece], window)
        merge(merged, part)

    for state in (one_after_another, merged):
        assert np.abs(finished(state) - expected).max() <= 1e-6 * np.abs(expected).max()


@few
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([0, 2, 5]), seeds)
def test_chunks_of_queries_equal_the_whole_bit_for_bit(chunks, window, seed):
    tokens = sum(chunks)
    q, k, v = tensors(seed, tokens, tokens)
    every = np.arange(tokens)
    whole = new_state(tokens, v.shape[1])
    attend_pieces(whole, q, k, v, every, [every], window)
    parts = []
    for end, chunk in zip(np.cumsum(chunks), chunks, strict=True):
        rows = np.arange(end - chunk, end)
        state = new_state(chunk, v.shape[1])
        attend_pieces(state, q[rows], k, v, rows, [every], window)
        parts.append(finished(state))
    np.testing.assert_array_equal(np.concatenate(parts), finished(whole))


@pytest.mark.parametrize("window", [0, 1, 2, 4])
def test_masks(window):
    """Equal scores: the answer is the mean of the visible values, which are one-hot."""
    tokens = 5
    every, zeros = np.arange(tokens), np.zeros((tokens, 4), np.float32)
    state = new_state(tokens, tokens)
    attention_tile(
        state, np.empty((tokens, tokens), np.float32), zeros, zeros,
        np.eye(tokens, dtype=np.float32), 1.0, every, every, window,
    )  # fmt: skip
    distance = every[:, None] - every
    visible = (distance >= 0) & ((distance < window) | (window == 0))
    np.testing.assert_allclose(
        finished(state), visible / visible.sum(axis=1, keepdims=True), rtol=1e-6
    )


def test_a_query_that_saw_no_key_is_not_a_number():
    q, k, v = tensors(0, 2, 3)
    state = new_state(2, v.shape[1])
    attend_pieces(state, q, k, v, np.array([-1, 2]), [np.arange(3)], 0)
    with np.errstate(invalid="ignore"):  # of 0 / 0, seen only without the compiler
        output = finished(state)
    assert np.isnan(output[0]).all()
    assert np.isfinite(output[1]).all()


def test_huge_scores_do_not_overflow():
    q = np.full((1, 4), 200.0, np.float32)
    k = np.stack([q[0], q[0] / 2])
    v = np.array([[1.0], [2.0]], np.float32)
    state = new_state(1, 1)
    attend_pieces(state, q, k, v, np.array([1]), [np.array([1]), np.array([0])], 0)
    np.testing.assert_array_equal(finished(state), [[1.0]])


def test_products_summed_over_slices_of_the_head_attend_like_a_tile():
    q, k, v = tensors(5, 4, 6)
    positions = np.arange(2, 6)
    whole, sliced = new_state(4, v.shape[1]), new_state(4, v.shape[1])
    attend_pieces(whole, q, k, v, positions, [np.arange(6)], 0)
    scores = (q[:, :3] @ k[:, :3].T + q[:, 3:] @ k[:, 3:].T).astype(np.float32)
    attend(sliced, scores, v, 0.35, positions, np.arange(6), 0)
    np.testing.assert_allclose(finished(sliced), finished(whole), rtol=1e-5, atol=1e-6)
