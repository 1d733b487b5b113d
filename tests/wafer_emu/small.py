"""Small wafers, models and clocks to draw tests from."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from wafer_emu.clock import Clock, Tiers
from wafer_emu.model import Model
from wafer_emu.placement import Region
from wafer_emu.routing import Routing
from wafer_emu.wafer import Simd, Systolic, Wafer

TINY = Wafer.preset("tiny-4x4").replace({"die.core_rows": 9, "die.core_columns": 9})
SIMD = Simd(lanes=3, issue_millicycles=1700)
DIES = Wafer.preset("wsc-54").replace({"die.core_rows": 3, "die.core_columns": 3})
WAFERS = (
    TINY,
    TINY.replace({"core.compute": SIMD, "core.step_cycles": 42}),
    TINY.replace({"core.compute": Systolic(rows=3, columns=2, depth=2, dataflow="ws")}),
    TINY.replace({"link.bytes_per_cycle": 1, "link.hop_cycles": 30}),
    DIES,
)


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 50,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 10,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
del DEEPSEEK["head_dim"]

sizes = st.integers(1, 40)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Two layers with grouped, multi-query, windowed or latent attention, dense or of experts."""
    base = draw(st.sampled_from([LLAMA, MIXTRAL, DEEPSEEK]))
    config = {**base, "hidden_size": draw(sizes), "intermediate_size": draw(sizes)}
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    config["num_attention_heads"] = groups * per_group
    config["num_key_value_heads"] = groups * per_group if base is DEEPSEEK else groups
    if base is not DEEPSEEK:
        config["head_dim"] = 2 * draw(st.integers(1, 5))
    elif draw(st.booleans()):
        config["q_lora_rank"] = None
    if base is LLAMA and draw(st.booleans()):
        config |= {"model_type": "mistral", "sliding_window": draw(sizes)}
    return Model.from_hf(config)


@st.composite
def clocks(draw: st.DrawFn, most_lines: int = 6) -> Clock:
    """A clock of a small region, with more or less memory for attention."""
    wafer, model = draw(st.sampled_from(WAFERS)), draw(models())
    rows, columns = draw(st.integers(1, most_lines)), draw(st.integers(1, most_lines))
    tiers = Tiers()
    if wafer.dram is not None:
        tiers = Tiers(*(draw(st.sampled_from(["sram", "dram"])) for _ in range(3)))
    budget = draw(st.sampled_from([0, 500, 4000, 50_000]))
    return Clock(wafer, model, Region(0, 0, rows, columns), tiers, budget, model.dtype, model.dtype)


def clock_of(
    wafer: Wafer, model: Model, rows: int, columns: int, tiers: Tiers | None = None
) -> Clock:
    """Clock of a region in the corner of a wafer, with half of a core's memory for attention."""
    budget, region = wafer.core.sram_bytes // 2, Region(0, 0, rows, columns)
    return Clock(wafer, model, region, tiers or Tiers(), budget, model.dtype, model.dtype)


def routing_of(model: Model, tokens: int, seed: int, experts: int | None = None) -> Routing:
    """Any choices of so many tokens, among the first ``experts`` ones."""
    random, moe = np.random.default_rng(seed), model.moe
    if moe is None:
        return Routing({})
    among = np.arange(experts or moe.experts)
    layers = [layer for layer in range(model.layers) if not moe.is_dense(layer)]
    return Routing(
        {
            layer: random.permuted(np.tile(among, (tokens, 1)), axis=1)[:, : moe.experts_per_token]
            for layer in layers
        }
    )


def routings(model: Model, tokens: int) -> st.SearchStrategy[Routing | None]:
    """Choices of so many tokens; None for a model without experts."""
    if model.moe is None:
        return st.none()
    return st.integers(0, 10**6).map(lambda seed: routing_of(model, tokens, seed))


chunks = st.integers(1, 50)
prefixes = st.integers(0, 60)
