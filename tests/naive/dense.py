"""A whole forward pass in dense NumPy: every token at once, every matrix whole, one softmax.

Written from the models' published equations: Llama (arXiv 2302.13971), grouped queries
(2305.13245), Mistral's sliding window (2310.06825), Mixtral's experts (2401.04088), Qwen2 and Qwen3
(2407.10671, 2505.09388), DeepSeek-V3's latent attention and router (2412.19437), rotary embedding
(2104.09864) and YaRN (2309.00071). Token counts, not speed, are what it is small in.
"""

import math
from dataclasses import dataclass

import numpy as np

LATENT_NORM_EPSILON = 1e-6
"""Of the norms on MLA's latents; DeepSeek-V3's code fixes it, whatever the config says."""


@dataclass
class Forward:
    """Logits (tokens, vocabulary), hidden state after the last norm (tokens, hidden), per layer
    the cached columns (tokens, keys and values or latents), and who chooses which expert (tokens,
    experts), or None."""

    logits: np.ndarray
    hidden: np.ndarray
    cached: list
    chooses: list


def forward(model, weights, token_ids, dtype=np.float32):
    """Forward pass of ``token_ids`` from position 0; ``weights`` maps names to arrays."""

    def w(name):
        return weights[name].astype(dtype)

    x = w("model.embed_tokens.weight")[np.asarray(token_ids)]
    cached, chooses = [], []
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        local = {name: w(prefix + name) for name in model.layer_weight_shapes(layer)}
        attend = latent_attention if model.mla else grouped_attention
        normed = rms_norm(x, local["input_layernorm.weight"], model.norm_epsilon)
        attended, kept = attend(model, layer, local, normed)
        x = x + attended
        normed = rms_norm(x, local["post_attention_layernorm.weight"], model.norm_epsilon)
        if model.moe is None or model.moe.dense_layers[layer]:
            y, chosen = feed_forward(model, local, "mlp", normed), None
        else:
            y, chosen = expert_layer(model, local, normed)
        x = x + y
        cached.append(kept)
        chooses.append(chosen)
    hidden = rms_norm(x, w("model.norm.weight"), model.norm_epsilon)
    head = "model.embed_tokens.weight" if model.tied_embeddings else "lm_head.weight"
    return Forward(hidden @ w(head).T, hidden, cached, chooses)


def linear(w, name, x):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def rms_norm(x, weight, epsilon):
    return weight * (x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + x.dtype.type(epsilon)))


def grouped_attention(model, layer, w, x):
    """softmax(q k^T / sqrt(d)) v, each group of query heads sharing one key and value head."""
    tokens = len(x)
    q = linear(w, "self_attn.q_proj", x).reshape(tokens, model.heads, model.head_dim)
    k = linear(w, "self_attn.k_proj", x).reshape(tokens, model.kv_heads, model.head_dim)
    v = linear(w, "self_attn.v_proj", x).reshape(tokens, model.kv_heads, model.head_dim)
    if model.qk_norm:
        q = rms_norm(q, w["self_attn.q_norm.weight"], model.norm_epsilon)
        k = rms_norm(k, w["self_attn.k_norm.weight"], model.norm_epsilon)
    q, k = rotate(model, q), rotate(model, k)
    group = model.heads // model.kv_heads
    scale = 1 / math.sqrt(model.head_dim)
    mixed = attention(
        q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1), scale, model.windows[layer]
    )
    kept = np.concatenate([k.reshape(tokens, -1), v.reshape(tokens, -1)], axis=1)
    return linear(w, "self_attn.o_proj", mixed), kept


def latent_attention(model, layer, w, x):
    """Keys and values are made from one latent per token, beside one shared rotary key."""
    mla, tokens = model.mla, len(x)
    nope, rope = mla.qk_nope_head_dim, mla.qk_rope_head_dim
    if mla.q_lora_rank is None:
        q = linear(w, "self_attn.q_proj", x)
    else:
        latent = linear(w, "self_attn.q_a_proj", x)
        latent = rms_norm(latent, w["self_attn.q_a_layernorm.weight"], LATENT_NORM_EPSILON)
        q = linear(w, "self_attn.q_b_proj", latent)
    q = q.reshape(tokens, model.heads, nope + rope)
    q = np.concatenate([q[..., :nope], rotate(model, q[..., nope:])], axis=-1)

    compressed = linear(w, "self_attn.kv_a_proj_with_mqa", x)
    latent = rms_norm(
        compressed[:, : mla.kv_lora_rank], w["self_attn.kv_a_layernorm.weight"], LATENT_NORM_EPSILON
    )
    shared = rotate(model, compressed[:, None, mla.kv_lora_rank :])
    expanded = linear(w, "self_attn.kv_b_proj", latent).reshape(tokens, model.heads, -1)
    k = np.concatenate([expanded[..., :nope], np.repeat(shared, model.heads, axis=1)], axis=-1)

    scale = 1 / math.sqrt(nope + rope)
    yarn = model.rope.scaling
    if getattr(yarn, "mscale_all_dim", 0):
        scale *= (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1) ** 2
    mixed = attention(q, k, expanded[..., nope:], scale, model.windows[layer])
    return linear(w, "self_attn.o_proj", mixed), np.concatenate([latent, shared[:, 0]], axis=1)


def attention(q, k, v, scale, window):
    """Causal attention of (tokens, heads, dim) arrays, heads side by side in the result."""
    tokens = len(q)
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    visible = (distance >= 0) & (True if window is None else distance < window)
    heads = []
    for head in range(q.shape[1]):
        scores = np.where(visible, q[:, head] @ k[:, head].T * scale, -np.inf)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        heads.append(shares / shares.sum(axis=1, keepdims=True) @ v[:, head])
    return np.concatenate(heads, axis=1).astype(q.dtype)


def rotate(model, x):
    """Turn each plane of (tokens, heads, rotary width) by position times frequency."""
    width = x.shape[-1]
    # The checkpoints define frequencies and angles in float32.
    positions = np.arange(len(x), dtype=np.float32)
    y = np.empty_like(x)
    for plane in range(width // 2):
        angle = positions * frequency(model.rope, width, plane)
        stretch = getattr(model.rope.scaling, "attention_factor", 1.0)
        cosine, sine = (
            (f(angle) * np.float32(stretch)).astype(x.dtype)[:, None] for f in (np.cos, np.sin)
        )
        halves = (plane, plane + width // 2)
        a, b = (2 * plane, 2 * plane + 1) if model.rope.interleaved else halves
        y[..., a] = x[..., a] * cosine - x[..., b] * sine
        y[..., b] = x[..., b] * cosine + x[..., a] * sine
    return y


def frequency(rope, width, plane):
    """Radians per position of one plane, in float32."""
    base = np.float32(1) / np.float32(rope.theta) ** (np.float32(2 * plane) / np.float32(width))
    scaling, kind = rope.scaling, type(rope.scaling).__name__
    if kind == "Linear":
        return base / np.float32(scaling.factor)
    if kind == "Llama3":
        turns = scaling.original_positions * float(base) / (2 * math.pi)
        if turns < scaling.low_frequency_factor:
            return base / np.float32(scaling.factor)
        if turns > scaling.high_frequency_factor:
            return base
        smooth = (turns - scaling.low_frequency_factor) / (
            scaling.high_frequency_factor - scaling.low_frequency_factor
        )
        return np.float32((1 - smooth) * base / scaling.factor + smooth * base)
    if kind == "Yarn":
        low, high = (
            width
            * math.log(scaling.original_positions / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        ramp = (plane - low) / (high - low if high != low else 0.001)
        share = min(max(ramp, 0.0), 1.0)
        return np.float32(share * base / scaling.factor + (1 - share) * base)
    return base


def activation(name, x):
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return (x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2).astype(x.dtype)
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def feed_forward(model, w, block, x, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = (f"{block}.{name}" for name in names)
    gated = activation(model.activation, linear(w, gate, x)) * linear(w, up, x)
    return linear(w, down, gated)


def expert_layer(model, w, x):
    """Each token's chosen experts, weighted, and the shared ones; who chose which expert."""
    moe, y = model.moe, np.zeros_like(x)
    mixtral = model.model_type == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    logits = linear(w, f"{block}.gate", x)
    shares = np.zeros((len(x), moe.experts), x.dtype)
    for t in range(len(x)):
        if moe.scoring == "softmax":
            chosen, kept = route_by_softmax(moe, logits[t])
        else:
            bias = w[f"{block}.gate.e_score_correction_bias"]
            chosen, kept = route_by_group(moe, logits[t], bias)
        shares[t, chosen] = kept
    for expert in range(moe.experts):
        rows = np.flatnonzero(shares[:, expert])
        part = feed_forward(model, w, f"{block}.experts.{expert}", x[rows], names)
        y[rows] += shares[rows, expert, None] * part
    if moe.shared_experts:
        y = y + feed_forward(model, w, f"{block}.shared_experts", x)
    return y, shares != 0


def best(scores, count):
    return np.argsort(-scores, kind="stable")[:count]


def route_by_softmax(moe, logits):
    scores = np.exp(logits - logits.max())
    scores = scores / scores.sum()
    chosen = best(scores, moe.experts_per_token)
    kept = scores[chosen]
    return chosen, kept / kept.sum() if moe.norm_topk_prob else kept


def route_by_group(moe, logits, bias):
    scores = 1 / (1 + np.exp(-logits))
    corrected = (scores + bias).reshape(moe.n_group, -1)
    group_scores = np.sort(corrected, axis=1)[:, -2:].sum(axis=1)
    open_groups = best(group_scores, moe.topk_group)
    closed = np.setdiff1d(np.arange(moe.n_group), open_groups)
    corrected[closed] = -np.inf
    chosen = best(corrected.reshape(-1), moe.experts_per_token)
    kept = scores[chosen]
    if moe.norm_topk_prob:
        kept = kept / (kept.sum() + 1e-20)
    return chosen, kept * moe.routed_scaling_factor
