"""Every value of a model with where it comes from, and the arithmetic of its KV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from wafer_emu import quantities
from wafer_emu._data import preset_path
from wafer_emu.model import Model, dtype_bytes
from wafer_emu.strict import read_json

__all__ = ["kv_arithmetic", "model_values"]

# Keys of config.json that decide a value whose name there is another one.
KEYS = {
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "qk_rope_head_dim"),
    "max_positions": ("max_position_embeddings",),
    "norm_epsilon": ("rms_norm_eps",),
    "tied_embeddings": ("tie_word_embeddings",),
    "dtype": ("dtype", "torch_dtype"),
    "activation": ("hidden_act",),
    "qkv_bias": ("attention_bias",),
    "output_bias": ("attention_bias",),
    "windows": ("sliding_window",),
    "rope.theta": ("rope_theta", "rope_parameters"),
    "rope.scaling": ("rope_scaling", "rope_parameters"),
    "moe.experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe.experts_per_token": ("num_experts_per_tok",),
    "moe.shared_experts": ("n_shared_experts",),
    "moe.expert_intermediate_size": ("moe_intermediate_size",),
    "moe.dense_layers": ("first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step"),
    "moe.scoring": ("scoring_func",),
}


def model_values(name: str, model: Model) -> list[dict[str, Any]]:
    """Values of a model: path, value, grade and source.

    What the configuration states has its source; the rest follows from the model type, by the
    defaults and the code of its class in transformers.

    Parameters
    ----------
    name
        Preset, ``config.json`` or folder that the model was read from.
    model
        That model.
    """
    if name in Model.presets():
        file = preset_path("models", ".json", name)
        grade, _, source = Model.preset_provenance(name).partition(": ")
    else:
        file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        grade, source = "published", str(file)
    stated, _ = read_json(file)
    by_type = f"the {model.model_type} class of transformers, its defaults and its code"
    values = []
    for path, value in _leaves(model.to_dict()):
        keys = (*KEYS.get(path, ()), *KEYS.get(".".join(path.split(".")[:2]), ()), path,
                path.rpartition(".")[2])  # fmt: skip
        known = path == "name" or any(key in stated for key in keys)
        values.append(
            {
                "path": path,
                "value": value,
                "grade": grade if known else "derived",
                "source": source if known else by_type,
            }
        )
    return sorted(values, key=lambda one: one["source"] == by_type)


def kv_arithmetic(model: Model, tokens: int = 32_768) -> list[str]:
    """How many bytes of KV a token and a prompt leave, line by line."""
    element = dtype_bytes(model.dtype)
    per_layer = model.kv_elements_per_token(0)
    if model.mla is not None:
        latent, rotary = model.mla.kv_lora_rank, model.mla.qk_rope_head_dim
        elements = f"kv_lora_rank {latent} + qk_rope_head_dim {rotary}"
    else:
        elements = f"2 (key, value) x kv_heads {model.kv_heads} x head_dim {model.head_dim}"
    layer, token = per_layer * element, model.kv_bytes_per_token()
    lines = [
        f"{elements} = {per_layer:,} elements a layer",
        f"{per_layer:,} x {element} B ({model.dtype}) = {layer:,} B a layer",
        f"{layer:,} B x {model.layers} layers = {token:,} B a token",
        f"{token:,} B x {tokens:,} tokens = {token * tokens:,} B "
        f"({quantities.size(token * tokens)})",
    ]
    windows = sorted({window for window in model.windows if window is not None})
    if windows:
        bounded = sum(window is not None for window in model.windows)
        spans = ", ".join(f"{window:,}" for window in windows)
        lines.append(f"{bounded} of {model.layers} layers see a window of {spans} tokens only")
    return lines


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            alike = [(one, len(list(same))) for one, same in groupby(value)]
            yield path, ", ".join(f"{'no' if one is None else one} x {k}" for one, k in alike)
        else:
            yield path, value
