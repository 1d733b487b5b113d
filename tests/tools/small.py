"""A wafer of four small dies and a model for it, so that a measurement takes seconds."""

from __future__ import annotations

from typing import Any

from tools.mocap_bench import Bench
from wafer_emu.model import Model
from wafer_emu.wafer import Wafer

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
DIES = Wafer.preset("wsc-54").replace(
    {
        "die_rows": 2,
        "die_columns": 2,
        "die.core_rows": 3,
        "die.core_columns": 3,
        "core.sram_bytes": 131_072,
    }
)


def bench() -> Bench:
    """Four dies of nine cores, four layers, two layouts."""
    return Bench(DIES, Model.from_hf(CONFIG), ((2, 2), (4, 4)))
