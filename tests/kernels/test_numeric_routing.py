"""Choice of experts, and the rows that travel to them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import numeric as naive
from wafer_kernels.numeric_routing import (
    choose_by_group,
    choose_by_softmax,
    expert_rows,
    gather_rows,
    scatter_rows_add,
)

few = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def results(tokens, count):
    return np.full((tokens, count), -1), np.full((tokens, count), np.nan, np.float32)


@few
@given(st.integers(1, 4), st.integers(1, 12), st.data(), st.booleans(), seeds)
def test_choice_by_softmax(tokens, experts, data, normalise, seed):
    count = data.draw(st.integers(1, experts))
    logits = 2 * np.random.default_rng(seed).standard_normal((tokens, experts), dtype=np.float32)
    chosen, weights = results(tokens, count)
    choose_by_softmax(chosen, weights, logits, normalise)
    for t in range(tokens):
        expected = naive.choose_by_softmax(logits[t].tolist(), count, normalise)
        assert chosen[t].tolist() == expected[0]
        np.testing.assert_allclose(weights[t], expected[1], rtol=2e-6)


@few
@given(st.integers(1, 4), st.integers(1, 4), st.data(), st.booleans(), seeds)
def test_choice_by_group(groups, group_size, data, normalise, seed):
    kept = data.draw(st.integers(1, groups))
    count = data.draw(st.integers(1, kept * group_size))
    rng = np.random.default_rng(seed)
    experts = groups * group_size
    logits = rng.standard_normal((3, experts), dtype=np.float32)
    correction = rng.standard_normal(experts, dtype=np.float32)
    chosen, weights = results(3, count)
    choose_by_group(chosen, weights, logits, correction, groups, kept, normalise, 2.5)
    for t in range(3):
        expected = naive.choose_by_group(
            logits[t].tolist(), correction.tolist(), groups, kept, count, normalise, 2.5
        )
        assert chosen[t].tolist() == expected[0]
        np.testing.assert_allclose(weights[t], expected[1], rtol=2e-6)


@pytest.mark.parametrize("normalise", [True, False])
def test_equal_scores_go_to_the_lower_index(normalise):
    chosen, weights = results(1, 2)
    choose_by_softmax(chosen, weights, np.zeros((1, 8), np.float32), normalise)
    assert chosen.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[0.5, 0.5] if normalise else [0.125, 0.125]])


def test_correction_changes_the_choice_but_not_the_weight():
    logits = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    correction = np.array([9.0, 8.0, 0.0, 0.0], np.float32)
    chosen, weights = results(1, 2)
    choose_by_group(chosen, weights, logits, correction, 1, 1, normalise=False, scale=1.0)
    assert chosen.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights[0], 1 / (1 + np.exp([-0.0, -1.0])), rtol=1e-6)


@few
@given(st.integers(1, 8), st.integers(1, 6), st.data(), seeds)
def test_rows_sent_to_experts_and_back_are_weighted_sums(tokens, experts, data, seed):
    count = data.draw(st.integers(1, experts))
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, 5), dtype=np.float32)
    chosen = np.array([rng.permutation(experts)[:count] for _ in range(tokens)])
    weights = rng.random((tokens, count), dtype=np.float32)
    y, sent = np.zeros_like(x), 0
    rows, shares = np.empty(tokens, np.int64), np.empty(tokens, np.float32)
    for expert in range(experts):
        n = expert_rows(rows, shares, chosen, weights, expert)
        part = np.empty((n, 5), np.float32)
        gather_rows(part, x, rows[:n])
        scatter_rows_add(y, part * np.float32(expert + 1), rows[:n], shares[:n])
        sent += n
    expected = x * (weights * (chosen + 1)).sum(axis=1, keepdims=True)
    assert sent == tokens * count
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
