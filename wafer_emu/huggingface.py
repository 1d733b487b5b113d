"""From a Hugging Face ``config.json`` to a Model, without importing transformers.

The rules are those of the configuration and modelling classes of transformers 4 and 5
(github.com/huggingface/transformers), some of which stand in the code and not in the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from wafer_emu.architecture import Linear, Llama3, Rope, Yarn
from wafer_emu.huggingface_schema import CLASS_DEFAULTS, Config, Scaling
from wafer_emu.model import DTYPE_BYTES, Model
from wafer_emu.strict import convert, read_json
from wafer_kernels.errors import ConfigError

__all__ = ["MODEL_TYPES", "read_config"]

MODEL_TYPES = tuple(CLASS_DEFAULTS)
_EXPERTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts",
            "deepseek_v3": "n_routed_experts"}  # fmt: skip
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def read_config(source: str | Path | Mapping[str, Any]) -> Model:
    """Model of a ``config.json`` (path, folder or content); errors as ``Model.from_hf``."""
    if isinstance(source, Mapping):
        raw, origin, name = dict(source), "config", str(source.get("_name_or_path") or "config")
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        raw, origin = read_json(path)
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin}: expected an object, not {type(raw).__name__}")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CLASS_DEFAULTS:
        hint = "; give its text_config as a file of its own" if "text_config" in raw else ""
        raise ConfigError(
            f"{origin}: $.model_type = {model_type!r} is not supported: "
            f"there are {', '.join(MODEL_TYPES)}{hint}",
            supported=list(MODEL_TYPES),
        )
    defaults = dict(CLASS_DEFAULTS[model_type])
    if any(key in raw for key in _EXPERTS.values()):  # the three spellings are aliases
        defaults.pop(_EXPERTS.get(model_type, ""), None)
    config = convert({**defaults, **raw}, Config, origin)
    faults = _faults(config, model_type)
    if faults:
        raise ConfigError(f"{origin}: {'; '.join(faults)}", origin=origin, problems=faults)
    return _model(config, model_type, name, origin)


def _model(c: Config, model_type: str, name: str, origin: str) -> Model:
    latent = model_type == "deepseek_v3"
    plain = {
        "name": name,
        "model_type": model_type,
        "hidden_size": c.hidden_size,
        "layers": c.num_hidden_layers,
        "heads": c.num_attention_heads,
        "kv_heads": c.num_key_value_heads or c.num_attention_heads,
        # transformers 5 writes the rotary width into head_dim of deepseek_v3
        "head_dim": (c.qk_rope_head_dim if latent else c.head_dim)
        or c.hidden_size // c.num_attention_heads,
        "intermediate_size": c.intermediate_size,
        "vocab_size": c.vocab_size,
        "max_positions": c.max_position_embeddings,
        "norm_epsilon": c.rms_norm_eps,
        "tied_embeddings": c.tie_word_embeddings,
        "dtype": _dtype(c),
        "activation": _ACTIVATIONS[c.hidden_act],
        # the biases of qwen2 and their absence in mistral and mixtral stand in the code only
        "qkv_bias": model_type == "qwen2" or (c.attention_bias and _has_bias(model_type)),
        "output_bias": c.attention_bias and _has_bias(model_type),
        "mlp_bias": c.mlp_bias and model_type == "llama",
        "qk_norm": model_type in {"qwen3", "qwen3_moe"},
        "windows": _windows(c, model_type),
        "rope": _rope(c, latent, origin),
        "mla": _mla(c) if latent else None,
        "moe": _moe(c, model_type),
    }
    return convert(msgspec.to_builtins(plain), Model, origin)


def _faults(c: Config, model_type: str) -> list[str]:
    """What the file asks for and this emulator does not do, by name."""
    faults = []
    if c.hidden_act not in _ACTIVATIONS:
        faults.append(f"$.hidden_act = {c.hidden_act!r}: allowed: {', '.join(_ACTIVATIONS)}")
    if _dtype(c) not in DTYPE_BYTES:
        key = "dtype" if c.dtype else "torch_dtype"
        faults.append(f"$.{key} = {_dtype(c)!r}: allowed: {', '.join(DTYPE_BYTES)}")
    if c.partial_rotary_factor != 1.0:
        faults.append(f"$.partial_rotary_factor = {c.partial_rotary_factor}: only 1 is supported")
    if c.head_dim is None and model_type != "deepseek_v3" and c.hidden_size % c.num_attention_heads:
        faults.append(
            f"$.num_attention_heads = {c.num_attention_heads} does not divide hidden_size "
            f"{c.hidden_size}, and head_dim is not given"
        )
    if c.layer_types is not None:
        kinds = {"full_attention", "sliding_attention"}
        faults += [f"$.layer_types: {kind!r}: allowed: {', '.join(sorted(kinds))}"
                   for kind in sorted(set(c.layer_types) - kinds)]  # fmt: skip
        if len(set(c.layer_types)) > 1 and model_type not in {"qwen2", "qwen3"}:
            faults.append("$.layer_types: a mix of kinds is supported for qwen2 and qwen3 only")
        if len(c.layer_types) != c.num_hidden_layers:
            faults.append(
                f"$.layer_types has {len(c.layer_types)} entries for {c.num_hidden_layers} layers"
            )
    if model_type in _EXPERTS:
        needed = ["num_experts_per_tok"]
        needed += ["moe_intermediate_size"] if model_type != "mixtral" else []
        needed += _LATENT if model_type == "deepseek_v3" else []
        faults += [f"$.{key}: missing" for key in needed if getattr(c, key) is None]
        if not any(getattr(c, key) for key in _EXPERTS.values()):
            faults.append(f"$.{_EXPERTS[model_type]}: missing")
    if model_type == "deepseek_v3":
        required = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        faults += [f"$.{key} = {getattr(c, key)!r}: only {value!r} is supported"
                   for key, value in required.items() if getattr(c, key) != value]  # fmt: skip
    return faults


def _dtype(c: Config) -> str:
    return (c.dtype or c.torch_dtype or "float32").removeprefix("torch.")


def _has_bias(model_type: str) -> bool:
    return model_type in {"llama", "qwen3", "qwen3_moe", "deepseek_v3"}


def _windows(c: Config, model_type: str) -> list[int | None]:
    """Window of each layer: mistral and mixtral have one for all, the Qwen family by switch."""
    layers = range(c.num_hidden_layers)
    if model_type in {"mistral", "mixtral"}:
        return [c.sliding_window for _ in layers]
    if not model_type.startswith("qwen") or not c.use_sliding_window:
        return [None for _ in layers]
    if model_type == "qwen3_moe":
        return [c.sliding_window for _ in layers]
    if c.layer_types is not None:
        return [c.sliding_window if kind == "sliding_attention" else None for kind in c.layer_types]
    return [c.sliding_window if layer >= c.max_window_layers else None for layer in layers]


def _rope(c: Config, latent: bool, origin: str) -> Rope:
    key = "rope_parameters" if c.rope_parameters else "rope_scaling"
    raw = c.rope_parameters or c.rope_scaling or {}
    nested = [value for value in raw.values() if isinstance(value, dict)]
    if nested:
        if any(value != nested[0] for value in nested):
            raise ConfigError(f"{origin}: $.{key} differs between layer types: not supported")
        raw = nested[0]
    s = convert(raw, Scaling, f"{origin} {key}")
    kind = s.rope_type or s.type or "default"
    if kind not in _ROPE_KINDS or s.partial_rotary_factor != 1.0:
        raise ConfigError(
            f"{origin}: $.{key}: rope_type {kind!r} with partial_rotary_factor "
            f"{s.partial_rotary_factor} is not supported: there are {', '.join(_ROPE_KINDS)} on "
            "whole heads (dynamic and longrope change the keys that are already cached)"
        )
    return Rope(
        theta=s.rope_theta or c.rope_theta,
        interleaved=latent and c.rope_interleave,
        scaling=None if kind == "default" else _scaling(kind, s, c, f"{origin}: $.{key}"),
    )


def _scaling(kind: str, s: Scaling, c: Config, where: str) -> Linear | Llama3 | Yarn:
    needed = {
        "linear": ("factor",),
        "yarn": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor",
                   "original_max_position_embeddings"),
    }[kind]  # fmt: skip
    missing = [key for key in needed if getattr(s, key) is None]
    if missing:
        raise ConfigError(f"{where}: rope_type {kind!r} needs {', '.join(missing)}")
    factor = s.factor or 1.0
    if kind == "linear":
        return Linear(factor=factor)
    original = s.original_max_position_embeddings or c.max_position_embeddings
    if kind == "llama3":
        low, high = s.low_freq_factor or 1.0, s.high_freq_factor or 1.0
        if high <= low:
            raise ConfigError(f"{where}: high_freq_factor {high} is not above {low}")
        return Llama3(
            factor=factor,
            low_frequency_factor=low,
            high_frequency_factor=high,
            original_positions=original,
        )
    return Yarn(
        factor=factor,
        original_positions=original,
        beta_fast=s.beta_fast or 32.0,
        beta_slow=s.beta_slow or 1.0,
        attention_factor=s.attention_factor or _yarn_attention_factor(factor, s),
        mscale_all_dim=s.mscale_all_dim or 0.0,
        truncate=s.truncate,
    )


def _yarn_attention_factor(factor: float, s: Scaling) -> float:
    """``m(mscale) / m(mscale_all_dim)``, else ``m(1)``; ``m(x) = 1 + x ln(factor) / 10``."""
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    if s.mscale and s.mscale_all_dim:
        return (1.0 + s.mscale * growth) / (1.0 + s.mscale_all_dim * growth)
    return 1.0 + growth


def _mla(c: Config) -> dict[str, int | None]:
    return {
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
    }


def _moe(c: Config, model_type: str) -> dict[str, Any] | None:
    if model_type not in _EXPERTS:
        return None
    mixtral, latent = model_type == "mixtral", model_type == "deepseek_v3"
    return {
        "experts": c.n_routed_experts or c.num_experts or c.num_local_experts,
        "experts_per_token": c.num_experts_per_tok,
        "shared_experts": (c.n_shared_experts or 0) if latent else 0,
        "expert_intermediate_size": c.intermediate_size if mixtral else c.moe_intermediate_size,
        "dense_layers": _dense_layers(c, model_type),
        # mixtral renormalises in the code, whatever the file says
        "norm_topk_prob": mixtral or c.norm_topk_prob,
        "scoring": "sigmoid" if latent else "softmax",
        "routed_scaling_factor": c.routed_scaling_factor if latent else 1.0,
        "n_group": c.n_group if latent else 1,
        "topk_group": c.topk_group if latent else 1,
    }


def _dense_layers(c: Config, model_type: str) -> list[bool]:
    layers = range(c.num_hidden_layers)
    if model_type == "deepseek_v3":
        return [layer < c.first_k_dense_replace for layer in layers]
    if model_type == "qwen3_moe":
        dense = c.mlp_only_layers or []
        return [layer in dense or (layer + 1) % c.decoder_sparse_step != 0 for layer in layers]
    return [False for _ in layers]
