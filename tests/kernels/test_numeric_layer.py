"""Layers out of tile kernels, chunk by chunk and tile by tile, against the dense reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import dense
from wafer_emu.model import Model
from wafer_emu.rotary import rotary_tables
from wafer_emu.weights import Weights
from wafer_kernels.numeric import (
    Activation,
    add,
    add_bias,
    gate,
    product_add_transposed,
    rms_scale,
    rotate_halves,
    square_sums_add,
)
from wafer_kernels.numeric_attention import (
    SoftmaxState,
    attention_finish,
    attention_reset,
    attention_tile,
)

CONFIG = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "head_dim": 6,
}
KINDS = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
}


def linear(w, name, x):
    weight = w[f"{name}.weight"]
    y = np.zeros((len(x), len(weight)), np.float32)
    product_add_transposed(y, np.ascontiguousarray(x), weight)
    if f"{name}.bias" in w:
        add_bias(y, w[f"{name}.bias"])
    return y


def norm(x, weight, epsilon):
    sums, y = np.zeros(len(x), np.float32), np.empty_like(x)
    square_sums_add(sums, x)
    rms_scale(y, x, sums, weight, x.shape[1], epsilon)
    return y


def heads_of(model, w, name, x, positions):
    """Projected, normed and rotated (tokens, heads, head_dim)."""
    y = linear(w, f"self_attn.{name}_proj", x)
    if model.qk_norm:
        weight = w[f"self_attn.{name}_norm.weight"]
        y = norm(y.reshape(-1, model.head_dim), weight, model.norm_epsilon)
    y = y.reshape(len(x), -1, model.head_dim)
    rotate_halves(y, *rotary_tables(model, positions))
    return y


def attend(model, q, positions, k, v, key_tile, window):
    """Attention of one chunk over the cache; the heads of a group are stacked into one tile."""
    tokens, group = len(q), model.heads // model.kv_heads
    mixed = np.empty((tokens, model.heads, model.head_dim), np.float32)
    for kv_head in range(model.kv_heads):
        of_group = slice(kv_head * group, (kv_head + 1) * group)
        queries = np.ascontiguousarray(q[:, of_group].reshape(-1, model.head_dim))
        rows = len(queries)
        state = SoftmaxState(
            np.empty(rows, np.float32),
            np.empty(rows, np.float32),
            np.empty((rows, model.head_dim), np.float32),
        )
        attention_reset(state)
        for first in range(0, len(k), key_tile):
            keys = np.arange(first, min(first + key_tile, len(k)))
            attention_tile(
                state,
                np.empty((rows, keys.size), np.float32),
                queries,
                k[keys, kv_head],
                v[keys, kv_head],
                model.softmax_scale,
                np.repeat(positions, group),
                keys,
                window or 0,
            )
        output = np.empty_like(queries)
        attention_finish(output, state)
        mixed[:, of_group] = output.reshape(tokens, group, model.head_dim)
    return mixed.reshape(tokens, -1)


def logits_by_chunks(model, weights, token_ids, chunks, key_tile):
    caches = [([], []) for _ in range(model.layers)]
    rows, prefix = [], 0
    for chunk in chunks:
        positions = np.arange(prefix, prefix + chunk)
        x = weights["model.embed_tokens.weight"][token_ids[positions]]
        for layer, (keys, values) in enumerate(caches):
            prefix_name = f"model.layers.{layer}."
            w = {name: weights[prefix_name + name] for name in model.layer_weight_shapes(layer)}
            normed = norm(x, w["input_layernorm.weight"], model.norm_epsilon)
            q = heads_of(model, w, "q", normed, positions)
            keys.append(heads_of(model, w, "k", normed, positions))
            v = linear(w, "self_attn.v_proj", normed)
            values.append(v.reshape(chunk, model.kv_heads, model.head_dim))
            k, v = np.concatenate(keys), np.concatenate(values)
            mixed = attend(model, q, positions, k, v, key_tile, model.windows[layer])
            add(x, linear(w, "self_attn.o_proj", mixed))
            normed = norm(x, w["post_attention_layernorm.weight"], model.norm_epsilon)
            gated = linear(w, "mlp.gate_proj", normed)
            gate(gated, gated, linear(w, "mlp.up_proj", normed), int(Activation.SILU))
            add(x, linear(w, "mlp.down_proj", gated))
        hidden = norm(x, weights["model.norm.weight"], model.norm_epsilon)
        rows.append(linear(weights, "lm_head", hidden))
        prefix += chunk
    return np.concatenate(rows)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    key_tile=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_logits_do_not_depend_on_the_cuts(kind, chunks, key_tile, seed):
    model = Model.from_hf({**CONFIG, **KINDS[kind]})
    weights = dict(Weights.random(model, seed))
    ids = np.random.default_rng(seed).integers(0, model.vocab_size, sum(chunks))
    expected = dense.forward(model, weights, ids, np.float64).logits
    found = logits_by_chunks(model, weights, ids, chunks, key_tile)
    assert np.abs(found - expected).max() <= 5e-6 * np.abs(expected).max()
