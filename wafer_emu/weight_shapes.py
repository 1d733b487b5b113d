"""Shapes of a layer's weights under the names of Hugging Face checkpoints.

All shapes are (out, in), names are relative to ``model.layers.<layer>.``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wafer_emu.architecture import Mla, Moe
    from wafer_emu.model import Model

__all__ = ["Shapes", "attention_shapes", "feed_forward_shapes"]

Shapes = dict[str, tuple[int, ...]]

_GATED = ("gate_proj", "up_proj", "down_proj")
_GATED_MIXTRAL = ("w1", "w3", "w2")


def attention_shapes(model: Model) -> Shapes:
    """Weights between the layer's first norm and its residual."""
    if model.mla is not None:
        return _latent_shapes(model, model.mla)
    hidden, queries = model.hidden_size, model.heads * model.head_dim
    pairs = model.kv_heads * model.head_dim
    shapes = {
        **_linear("self_attn.q_proj", queries, hidden, model.qkv_bias),
        **_linear("self_attn.k_proj", pairs, hidden, model.qkv_bias),
        **_linear("self_attn.v_proj", pairs, hidden, model.qkv_bias),
        **_linear("self_attn.o_proj", hidden, queries, model.output_bias),
    }
    if model.qk_norm:
        shapes["self_attn.q_norm.weight"] = (model.head_dim,)
        shapes["self_attn.k_norm.weight"] = (model.head_dim,)
    return shapes


def feed_forward_shapes(model: Model, layer: int) -> Shapes:
    """Weights between the layer's second norm and its residual."""
    if model.moe is None or model.moe.is_dense(layer):
        return _gated("mlp", model.hidden_size, model.intermediate_size, model.mlp_bias)
    return _expert_shapes(model, model.moe)


def _latent_shapes(model: Model, mla: Mla) -> Shapes:
    hidden, queries = model.hidden_size, model.heads * model.key_width
    expanded = model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    cached = mla.kv_lora_rank + mla.qk_rope_head_dim
    if mla.q_lora_rank is None:
        shapes = _linear("self_attn.q_proj", queries, hidden, bias=False)
    else:
        shapes = {
            **_linear("self_attn.q_a_proj", mla.q_lora_rank, hidden, model.qkv_bias),
            "self_attn.q_a_layernorm.weight": (mla.q_lora_rank,),
            **_linear("self_attn.q_b_proj", queries, mla.q_lora_rank, bias=False),
        }
    return {
        **shapes,
        **_linear("self_attn.kv_a_proj_with_mqa", cached, hidden, model.qkv_bias),
        "self_attn.kv_a_layernorm.weight": (mla.kv_lora_rank,),
        **_linear("self_attn.kv_b_proj", expanded, mla.kv_lora_rank, bias=False),
        **_linear("self_attn.o_proj", hidden, model.heads * model.value_width, model.output_bias),
    }


def _expert_shapes(model: Model, moe: Moe) -> Shapes:
    hidden, inner = model.hidden_size, moe.expert_intermediate_size
    mixtral = model.model_type == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    names = _GATED_MIXTRAL if mixtral else _GATED
    shapes: Shapes = {f"{block}.gate.weight": (moe.experts, hidden)}
    if moe.scoring == "sigmoid":
        shapes[f"{block}.gate.e_score_correction_bias"] = (moe.experts,)
    for expert in range(moe.experts):
        shapes |= _gated(f"{block}.experts.{expert}", hidden, inner, names=names)
    if moe.shared_experts:
        shapes |= _gated(f"{block}.shared_experts", hidden, moe.shared_experts * inner)
    return shapes


def _linear(name: str, out: int, inner: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out, inner)}
    if bias:
        shapes[f"{name}.bias"] = (out,)
    return shapes


def _gated(
    prefix: str,
    hidden: int,
    inner: int,
    bias: bool = False,
    names: tuple[str, str, str] = _GATED,
) -> Shapes:
    gate, up, down = (f"{prefix}.{name}" for name in names)
    return {
        **_linear(gate, inner, hidden, bias),
        **_linear(up, inner, hidden, bias),
        **_linear(down, hidden, inner, bias),
    }
