"""Shapes and counts against the models that transformers builds from the same configuration."""

from __future__ import annotations

import math
from typing import Any

import pytest

from wafer_emu.model import Model

torch = pytest.importorskip("torch", reason="torch is not installed (extra `reference`)")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra `reference`)"
)

PLAIN = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "head_dim": 8,
}
LATENT = {
    **{key: value for key, value in PLAIN.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", PLAIN),
    ("llama", {**PLAIN, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {**PLAIN, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    ("qwen3", {**PLAIN, "attention_bias": True, "head_dim": 16}),
    ("mistral", PLAIN),
    ("mixtral", {**PLAIN, "num_local_experts": 4}),
    (
        "qwen3_moe",
        {**PLAIN, "num_experts": 6, "moe_intermediate_size": 10, "decoder_sparse_step": 2,
         "num_experts_per_tok": 2},
    ),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 10, "attention_bias": True}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "config"), CASES)
def test_shapes_and_counts(model_type: str, config: dict[str, Any]) -> None:
    settings = transformers.AutoConfig.for_model(model_type, **config)
    with torch.device("meta"):
        state = transformers.AutoModelForCausalLM.from_config(settings).state_dict()
    model = Model.from_hf({"model_type": model_type, **config})
    tied = math.prod(model.head_shape) if model.tied_embeddings else 0
    assert model.parameters == sum(tensor.numel() for tensor in state.values()) - tied
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        shapes = model.layer_weight_shapes(layer)
        for name, tensor in state.items():
            # experts are packed in memory and mixtral's block renamed, unlike in checkpoints
            if name.startswith(prefix) and ".mlp." not in name:
                assert shapes[name.removeprefix(prefix)] == tuple(tensor.shape), name
    written = settings.to_dict()
    assert Model.from_hf(written).to_dict() == {**model.to_dict(), "dtype": "float32"}
