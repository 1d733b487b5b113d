"""Small models with weights, prompts and policies whose plans tests carry out on real numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st

import mocap.policy
from mocap.policy import Move, Policy, Request, Setting
from tests.naive import dense
from wafer_emu.emulation import Run, emulate
from wafer_emu.model import Model
from wafer_emu.wafer import Wafer
from wafer_emu.weights import Weights
from wafer_emu.workload import Workload

TINY = Wafer.preset("tiny-4x4")
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-gqa": {},
    "llama-mha-tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama-biases-gelu": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 10},
    "mistral-window": {"model_type": "mistral", "sliding_window": 7, "head_dim": 6},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek": LATENT,
    "deepseek-low-rank-queries": {**LATENT, "q_lora_rank": 14, "rope_interleave": False},
}
POLICIES = ("gpipe", "uniform", "terapipe", "lbcp", "mbkr", "mocap", "layerwise", "prefill-only")


@cache
def model_of(name: str, dtype: str = "float32", layers: int = 4) -> Model:
    changes = {"torch_dtype": dtype, "num_hidden_layers": layers}
    return Model.from_hf({**SMALL, **CONFIGS[name], **changes})


@cache
def weights_of(model: Model) -> Mapping[str, Any]:
    return dict(Weights.random(model, 3, model.dtype))


def prompt(model: Model, tokens: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, model.vocab_size, tokens).tolist()
    return ids


@cache
def expected(model: Model, tokens: int, seed: int = 0) -> Any:
    """The dense twin's forward pass of a prompt."""
    return dense.forward(model, weights_of(model), prompt(model, tokens, seed))


def error(found: Any, wanted: Any) -> float:
    """Largest difference over the largest value."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def policy_of(name: str) -> Policy:
    """A shipped policy, told to move KV if it can."""
    moving = "trigger" in mocap.policy.get(name).option_types()
    return mocap.policy.get(name, {"trigger": "balance"} if moving else {})


@dataclass
class Given(Policy):
    """Cuts and moves, and whether KV goes layer by layer, as the test says."""

    name: ClassVar[str] = "given"
    cuts: Sequence[int] = ()
    moves: Sequence[Move] = field(default_factory=list)
    by_layer: bool = False

    def partition(self, request: Request, setting: Setting) -> list[int]:
        return list(self.cuts)

    def reallocate(self, cuts: Sequence[Sequence[int]], setting: Setting) -> list[Move]:
        return list(self.moves)

    def frees_by_layer(self) -> bool:
        return self.by_layer


Case = tuple[list[int], list[Move]]


@st.composite
def moving_cases(draw: st.DrawFn, stages: int = 2) -> Case:
    """Cuts, and moves between stages as chunks are written and as later ones are worked on."""
    cuts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    moves = []
    for stage in range(stages):
        for chunk, tokens in enumerate(cuts):
            host, moved = draw(st.integers(0, stages - 1)), draw(st.integers(0, tokens))
            later = draw(st.integers(0, moved))
            pushed = draw(st.integers(chunk, len(cuts) - 1))
            if host != stage:
                moves += [Move(0, stage, chunk, moved - later, host)] if moved > later else []
                moves += [Move(0, stage, chunk, later, host, pushed)] if later else []
    return cuts, moves


def computed(
    model: Model, tokens: int, policy: Policy | str = "uniform", seed: int = 0, **asked: Any
) -> Run:
    """All logits of a prompt on the 4x4 wafer."""
    options: dict[str, Any] = {"stages": 4, "chunks": 4, "logits": "all", **asked}
    workload = Workload.single(tokens, options.pop("prefix_tokens", 0))
    return emulate(
        options.pop("wafer", TINY),
        model,
        workload,
        policy_of(policy) if isinstance(policy, str) else policy,
        numbers=weights_of(model),
        token_ids=prompt(model, tokens, seed),
        **options,
    )
