"""The dense reference: a forward pass in plain NumPy, every token at once, every matrix whole.

Nothing is cut into tiles, chunks or stages, and no kernel is called: what a plan computes is
compared with this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wafer_emu.architecture import Moe
from wafer_emu.model import Model
from wafer_emu.rotary import rotary_tables

__all__ = ["LATENT_NORM_EPSILON", "Dense", "forward"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
LATENT_NORM_EPSILON = 1e-6  # of MLA's two latent norms, whatever the config says (DeepSeek-V3 code)


@dataclass
class Dense:
    """Logits (tokens, vocabulary), states after the final norm (tokens, hidden), KV by layer."""

    logits: Float32
    hidden: Float32
    kv: list[Float32]


def forward(model: Model, weights: Mapping[str, Float32], token_ids: Sequence[int]) -> Dense:
    """Forward pass of a prompt from position 0.

    Sources: Llama (arXiv 2302.13971), grouped queries (2305.13245), Mixtral (2401.04088),
    DeepSeek-V3 (2412.19437).

    Parameters
    ----------
    model
        What the weights are of.
    weights
        Tensors (out, in) under the names of Hugging Face checkpoints.
    token_ids
        The prompt (tokens,).
    """
    x: Float32 = weights["model.embed_tokens.weight"][np.asarray(token_ids)]
    kv = []
    for layer in range(model.layers):
        w = _Layer(weights, layer)
        normed = _norm(x, w["input_layernorm.weight"], model.norm_epsilon)
        attended, kept = (_attend if model.mla is None else _attend_latent)(model, layer, w, normed)
        x = x + w.linear("self_attn.o_proj", attended)
        normed = _norm(x, w["post_attention_layernorm.weight"], model.norm_epsilon)
        if model.moe is None or model.moe.is_dense(layer):
            x = x + _feed_forward(model, w, "mlp", normed)
        else:
            x = x + _experts(model, model.moe, w, normed)
        kv.append(kept)
    hidden = _norm(x, weights["model.norm.weight"], model.norm_epsilon)
    return Dense(hidden @ weights[model.head_name].T, hidden, kv)


@dataclass(frozen=True)
class _Layer:
    """The weights of one layer under their relative names."""

    weights: Mapping[str, Float32]
    layer: int

    def __getitem__(self, name: str) -> Float32:
        return self.weights[f"model.layers.{self.layer}.{name}"]

    def __contains__(self, name: str) -> bool:
        return f"model.layers.{self.layer}.{name}" in self.weights

    def linear(self, name: str, x: Float32) -> Float32:
        """``x W^T``, and the bias if there is one."""
        y: Float32 = x @ self[f"{name}.weight"].T
        return y + self[f"{name}.bias"] if f"{name}.bias" in self else y


def _norm(x: Float32, weight: Float32, epsilon: float) -> Float32:
    mean: Float32 = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    scaled: Float32 = weight * (x / np.sqrt(mean + np.float32(epsilon)))
    return scaled


def _attend(model: Model, layer: int, w: _Layer, x: Float32) -> tuple[Float32, Float32]:
    """Heads side by side (tokens, heads x width), and the keys and values of the layer."""
    tokens, width = len(x), model.head_dim
    q = w.linear("self_attn.q_proj", x).reshape(tokens, model.heads, width)
    k = w.linear("self_attn.k_proj", x).reshape(tokens, model.kv_heads, width)
    v = w.linear("self_attn.v_proj", x)
    if model.qk_norm:
        q = _norm(q, w["self_attn.q_norm.weight"], model.norm_epsilon)
        k = _norm(k, w["self_attn.k_norm.weight"], model.norm_epsilon)
    q, k = _rotate(model, q), _rotate(model, k)
    kept = np.concatenate([k.reshape(tokens, -1), v], axis=1)
    v = v.reshape(tokens, model.kv_heads, width)
    group = model.heads // model.kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    return _softmax_attention(model, layer, q, k, v), kept


def _attend_latent(model: Model, layer: int, w: _Layer, x: Float32) -> tuple[Float32, Float32]:
    """Attention whose keys and values are expanded from one latent a token."""
    mla, tokens = model.mla, len(x)
    assert mla is not None
    if mla.q_lora_rank is None:
        q = w.linear("self_attn.q_proj", x)
    else:
        low = w.linear("self_attn.q_a_proj", x)
        low = _norm(low, w["self_attn.q_a_layernorm.weight"], LATENT_NORM_EPSILON)
        q = w.linear("self_attn.q_b_proj", low)
    q = q.reshape(tokens, model.heads, model.key_width)
    plain, rank = mla.qk_nope_head_dim, mla.kv_lora_rank
    q = np.concatenate([q[..., :plain], _rotate(model, q[..., plain:])], axis=-1)
    both = w.linear("self_attn.kv_a_proj_with_mqa", x)
    latent = _norm(both[:, :rank], w["self_attn.kv_a_layernorm.weight"], LATENT_NORM_EPSILON)
    shared = _rotate(model, both[:, np.newaxis, rank:])
    expanded = w.linear("self_attn.kv_b_proj", latent).reshape(tokens, model.heads, -1)
    k = np.concatenate([expanded[..., :plain], np.repeat(shared, model.heads, axis=1)], axis=-1)
    attended = _softmax_attention(model, layer, q, k, expanded[..., plain:])
    return attended, np.concatenate([latent, shared[:, 0]], axis=1)


def _softmax_attention(model: Model, layer: int, q: Float32, k: Float32, v: Float32) -> Float32:
    """``softmax(scale q k^T) v`` of every head (tokens, heads, width) under the causal mask."""
    tokens, window = len(q), model.windows[layer]
    distance = np.subtract.outer(np.arange(tokens), np.arange(tokens))
    visible = (distance >= 0) & (distance < (tokens if window is None else window))
    result = np.empty((tokens, model.heads, v.shape[2]), np.float32)
    for head in range(model.heads):
        scores = q[:, head] @ k[:, head].T * np.float32(model.softmax_scale)
        scores = np.where(visible, scores, np.float32(-np.inf))
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        result[:, head] = shares @ v[:, head] / shares.sum(axis=1, keepdims=True)
    return result.reshape(tokens, -1)


def _rotate(model: Model, x: Float32) -> Float32:
    """Turn the planes of every head (tokens, heads, width) by position."""
    cosine, sine = rotary_tables(model, np.arange(len(x)))
    cosine, sine = cosine[:, np.newaxis], sine[:, np.newaxis]
    half = x.shape[2] // 2
    interleaved = model.rope.interleaved
    first = np.s_[..., ::2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1::2] if interleaved else np.s_[..., half:]
    y = np.empty_like(x)
    y[first] = x[first] * cosine - x[second] * sine
    y[second] = x[second] * cosine + x[first] * sine
    return y


def _activate(name: str, x: Float32) -> Float32:
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        erf = np.vectorize(math.erf, otypes=[np.float32])
        return x * (1 + erf(x * np.float32(math.sqrt(0.5)))) / 2
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
    return x * (1 + np.tanh(inner)) / 2


def _feed_forward(
    model: Model,
    w: _Layer,
    block: str,
    x: Float32,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Float32:
    gate, up, down = (f"{block}.{name}" for name in names)
    return w.linear(down, _activate(model.activation, w.linear(gate, x)) * w.linear(up, x))


def _experts(model: Model, moe: Moe, w: _Layer, x: Float32) -> Float32:
    """Every token's chosen experts, weighed, and the shared ones."""
    mixtral = model.model_type == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    logits = w.linear(f"{block}.gate", x)
    if moe.scoring == "softmax":
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = scores / scores.sum(axis=1, keepdims=True)
        chosen = _best(scores, moe.experts_per_token)
    else:
        scores = 1 / (1 + np.exp(-logits))
        corrected = scores + w["mlp.gate.e_score_correction_bias"]
        grouped = corrected.reshape(len(x), moe.n_group, -1)
        of_group = np.sort(grouped, axis=2)[..., -2:].sum(axis=2)
        opened = np.zeros((len(x), moe.n_group), np.bool_)
        np.put_along_axis(opened, _best(of_group, moe.topk_group), True, axis=1)
        masked: Float32 = np.where(opened[..., np.newaxis], grouped, np.float32(-np.inf))
        chosen = _best(masked.reshape(len(x), -1), moe.experts_per_token)
    shares = np.take_along_axis(scores, chosen, axis=1)
    if moe.norm_topk_prob:
        floor = np.float32(0 if moe.scoring == "softmax" else 1e-20)
        shares = shares / (shares.sum(axis=1, keepdims=True) + floor)
    if moe.scoring == "sigmoid":
        shares = shares * np.float32(moe.routed_scaling_factor)
    y = np.zeros_like(x)
    for expert in range(moe.experts):
        rows, choices = np.nonzero(chosen == expert)
        part = _feed_forward(model, w, f"{block}.experts.{expert}", x[rows], names)
        y[rows] += shares[rows, choices, np.newaxis] * part
    if moe.shared_experts:
        y = y + _feed_forward(model, w, f"{block}.shared_experts", x)
    return y


def _best(scores: Float32, count: int) -> Int64:
    """Indices of the highest scores of each row, the lower index first among equals."""
    best: Int64 = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return best
