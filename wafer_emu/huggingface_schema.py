"""What is read of a Hugging Face ``config.json``, and the defaults of its model types.

The defaults are those of the configuration classes of transformers 4 and 5
(github.com/huggingface/transformers): a file may leave out what equals its class's default.
"""

from __future__ import annotations

from typing import Any

import msgspec

from wafer_emu.strict import Amount, Count, Natural, Rate

__all__ = ["CLASS_DEFAULTS", "Config", "Scaling"]

_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "mixtral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **_QWEN,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    "deepseek_v3": {
        "max_position_embeddings": 4096,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}


class Config(msgspec.Struct, kw_only=True):
    """The keys of ``config.json`` that are read; the others do not shape a prefill."""

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    vocab_size: Count
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Rate = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    torch_dtype: str | None = None
    dtype: str | None = None
    rope_theta: Rate = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_interleave: bool = True
    partial_rotary_factor: Rate = 1.0
    sliding_window: Count | None = None
    use_sliding_window: bool = False
    max_window_layers: Natural = 28
    layer_types: list[str] | None = None
    num_local_experts: Count | None = None
    num_experts: Count | None = None
    n_routed_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    n_shared_experts: Natural | None = None
    moe_intermediate_size: Count | None = None
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[Natural] | None = None
    first_k_dense_replace: Natural = 0
    moe_layer_freq: Count = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Rate = 1.0
    n_group: Count = 1
    topk_group: Count = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    q_lora_rank: Count | None = None
    kv_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count | None = None


class Scaling(msgspec.Struct, kw_only=True):
    """``rope_parameters`` of transformers 5, ``rope_scaling`` of 4."""

    rope_theta: Rate | None = None
    rope_type: str | None = None
    type: str | None = None
    partial_rotary_factor: Rate = 1.0
    factor: Rate | None = None
    low_freq_factor: Rate | None = None
    high_freq_factor: Rate | None = None
    original_max_position_embeddings: Count | None = None
    beta_fast: Rate | None = None
    beta_slow: Rate | None = None
    attention_factor: Rate | None = None
    mscale: Amount | None = None
    mscale_all_dim: Amount | None = None
    truncate: bool = True
