"""Parts of a decoder beyond plain attention: rotary scaling, latent attention, experts."""

from __future__ import annotations

from typing import Literal

import msgspec

from wafer_emu.strict import Amount, Count, Natural, Rate

__all__ = ["Linear", "Llama3", "Mla", "Moe", "Rope", "Yarn"]


class Linear(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="linear",
             tag_field="kind"):  # fmt: skip
    """Rotary frequencies divided by ``factor``."""

    factor: Rate


class Llama3(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="llama3",
             tag_field="kind"):  # fmt: skip
    """Rotary scaling of Llama 3.1: long wavelengths divided, short kept, a ramp between."""

    factor: Rate
    low_frequency_factor: Rate
    high_frequency_factor: Rate
    original_positions: Count


class Yarn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="yarn",
           tag_field="kind"):  # fmt: skip
    """YaRN (arXiv 2309.00071): ``attention_factor`` multiplies cosine and sine.

    ``mscale_all_dim`` enters the softmax scale of multi-head latent attention.
    """

    factor: Rate
    original_positions: Count
    beta_fast: Rate
    beta_slow: Rate
    attention_factor: Rate
    mscale_all_dim: Amount = 0.0
    truncate: bool = True


class Rope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rotary embedding: base ``theta``; pairs (0, 1), (2, 3).. if interleaved, else halves."""

    theta: Rate
    interleaved: bool = False
    scaling: Linear | Llama3 | Yarn | None = None


class Mla(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    q_lora_rank: Count | None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count


class Moe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mixture of experts; ``dense_layers[l]`` tells the layers that have none.

    Groups: the experts form ``n_group`` groups, of which ``topk_group`` are open to a token.
    """

    experts: Count
    experts_per_token: Count
    shared_experts: Natural
    expert_intermediate_size: Count
    dense_layers: tuple[bool, ...]
    norm_topk_prob: bool
    scoring: Literal["softmax", "sigmoid"]
    routed_scaling_factor: Rate = 1.0
    n_group: Count = 1
    topk_group: Count = 1

    def __post_init__(self) -> None:
        if self.experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"{self.topk_group} of {self.n_group} groups do not divide {self.experts} experts"
            )
        open_experts = self.topk_group * (self.experts // self.n_group)
        if self.experts_per_token > open_experts:
            raise ValueError(f"{self.experts_per_token} experts per token of {open_experts} open")

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has one feed-forward block for all tokens instead of experts."""
        return self.dense_layers[layer]
