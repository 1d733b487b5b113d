"""The model: shapes, counts and multiply-accumulates of a decoder, exact integers."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from wafer_emu._data import data_folder, preset_names, preset_path
from wafer_emu.architecture import Linear, Llama3, Mla, Moe, Rope, Yarn
from wafer_emu.strict import Count, Rate, apply_changes, apply_overrides, convert, read_text
from wafer_emu.weight_shapes import attention_shapes, feed_forward_shapes
from wafer_kernels.errors import ConfigError

__all__ = [
    "DTYPE_BYTES",
    "Linear",
    "Llama3",
    "Mla",
    "Model",
    "Moe",
    "Rope",
    "Yarn",
    "causal_pairs",
    "dtype_bytes",
]

Dtype = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


def dtype_bytes(name: str) -> int:
    """Bytes of one element of a dtype.

    Raises
    ------
    ConfigError
        If the dtype is unknown.
    """
    if name not in DTYPE_BYTES:
        raise ConfigError(f"unknown dtype {name!r}: allowed are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def causal_pairs(chunk: int, prefix: int, window: int | None = None) -> int:
    """(query, key) pairs of ``chunk`` tokens after ``prefix`` tokens under a causal mask.

    ``c p + c (c + 1) / 2``; with a window of w keys, the query's own among them, a query at
    position q sees ``min(q + 1, w)``.
    """
    if window is None:
        return chunk * prefix + chunk * (chunk + 1) // 2
    growing = min(max(window - prefix, 0), chunk)  # queries that still see every earlier token
    return causal_pairs(growing, prefix) + (chunk - growing) * window


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer.

    ``windows[l]`` is the number of keys a query of layer l sees, its own among them (None: all).

    Examples
    --------
    >>> model = Model.preset("llama-3-8b")
    >>> model.parameters, model.kv_bytes_per_token()
    (8030261248, 131072)
    """

    name: str
    model_type: str
    hidden_size: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    intermediate_size: Count
    vocab_size: Count
    max_positions: Count
    norm_epsilon: Rate
    tied_embeddings: bool
    dtype: Dtype
    activation: Literal["silu", "gelu", "gelu_tanh"]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[Count | None, ...]
    rope: Rope
    mla: Mla | None = None
    moe: Moe | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} kv_heads do not divide {self.heads} heads")
        if self.rotary_dim % 2:
            raise ValueError(f"rotary width {self.rotary_dim} is odd")
        tables = [("windows", self.windows)]
        if self.moe is not None:
            tables.append(("moe.dense_layers", self.moe.dense_layers))
        for path, table in tables:
            if len(table) != self.layers:
                raise ValueError(f"{path} has {len(table)} entries for {self.layers} layers")

    @classmethod
    def presets(cls) -> list[str]:
        """Names of the shipped models."""
        return preset_names("models", ".json")

    @classmethod
    def preset(cls, name: str) -> Model:
        """Shipped model of that name; ConfigError with near names if there is none."""
        return cls.from_hf(preset_path("models", ".json", name))

    @staticmethod
    def preset_provenance(name: str) -> str:
        """Where the values of a shipped model come from."""
        preset_path("models", ".json", name)
        table = tomllib.loads(read_text(data_folder() / "models" / "provenance.toml"))
        return str(table[name])

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> Model:
        """Model of a Hugging Face ``config.json``: its path, its folder, or its content.

        Raises
        ------
        FileError
            If the file cannot be read.
        ConfigError
            If the model type or a value is not supported; names path and choices.
        """
        from wafer_emu.huggingface import read_config

        return read_config(source)

    @classmethod
    def load(cls, name: str | Path) -> Model:
        """Preset by name, else a ``config.json`` or the folder that holds one."""
        if str(name) in cls.presets() or not (Path(name).exists() or Path(name).suffix == ".json"):
            return cls.preset(str(name))
        return cls.from_hf(name)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Model:
        """Model of what :meth:`to_dict` gave."""
        return convert(raw, cls, "model")

    def to_dict(self) -> dict[str, Any]:
        """Plain mapping of all values, as kept in run files."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def replace(self, changes: Mapping[str, object] | None = None, /, **fields: object) -> Model:
        """Copy with values replaced: dotted paths in a mapping, or whole fields by name."""
        return apply_changes(self, {**(changes or {}), **fields}, "replace")

    def with_overrides(self, overrides: Mapping[str, str], origin: str = "--set model") -> Model:
        """Copy with ``{dotted path: TOML text}`` applied, as ``--set model.PATH=VALUE`` does."""
        return apply_overrides(self, overrides, origin)

    def with_layers(self, layers: int) -> Model:
        """Model of the first ``layers`` layers; ConfigError if there are fewer."""
        if not 1 <= layers <= self.layers:
            raise ConfigError(f"{layers} layers of {self.name}: it has 1 to {self.layers}")
        changes: dict[str, object] = {"layers": layers, "windows": self.windows[:layers]}
        if self.moe is not None:
            changes["moe.dense_layers"] = self.moe.dense_layers[:layers]
        return self.replace(changes)

    @property
    def key_width(self) -> int:
        """Width of one head's query and key."""
        return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def value_width(self) -> int:
        """Width of one head's value."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Width of the part of a head that is rotated."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of Q K^T: ``key_width ** -0.5``, times YaRN's squared mscale under MLA."""
        scale = self.key_width**-0.5
        yarn = self.rope.scaling
        if self.mla and isinstance(yarn, Yarn) and yarn.mscale_all_dim and yarn.factor > 1:
            scale *= (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1.0) ** 2
        return scale

    @property
    def head_name(self) -> str:
        """Checkpoint name of the tensor that the head multiplies with."""
        return "model.embed_tokens.weight" if self.tied_embeddings else "lm_head.weight"

    def layer_weight_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Shapes (out, in) of a layer's tensors by Hugging Face checkpoint name.

        Names are relative to ``model.layers.<layer>.``.
        """
        h = self.hidden_size
        return {
            "input_layernorm.weight": (h,),
            **attention_shapes(self),
            "post_attention_layernorm.weight": (h,),
            **feed_forward_shapes(self, layer),
        }

    @property
    def embedding_shape(self) -> tuple[int, int]:
        """Shape of ``model.embed_tokens.weight``."""
        return (self.vocab_size, self.hidden_size)

    @property
    def head_shape(self) -> tuple[int, int]:
        """Shape of ``lm_head.weight``; the same memory as the embedding if they are tied."""
        return (self.vocab_size, self.hidden_size)

    @property
    def final_norm_shape(self) -> tuple[int]:
        """Shape of ``model.norm.weight``."""
        return (self.hidden_size,)

    def layer_weight_elements(self, layer: int) -> int:
        """Elements of all tensors of a layer."""
        return sum(math.prod(shape) for shape in self.layer_weight_shapes(layer).values())

    @property
    def parameters(self) -> int:
        """Elements of all tensors of the checkpoint; tied embeddings count once."""
        ends = math.prod(self.embedding_shape) * (1 if self.tied_embeddings else 2)
        layers = sum(self.layer_weight_elements(layer) for layer in range(self.layers))
        return ends + layers + self.hidden_size

    def kv_elements_per_token(self, layer: int) -> int:
        """Elements that a layer keeps of one token.

        ``2 kv_heads head_dim``; under MLA the latent and its rotary part,
        ``kv_lora_rank + qk_rope_head_dim``. A window bounds the tokens, not the elements.
        """
        if not 0 <= layer < self.layers:
            raise ConfigError(f"{self.name} has layers 0 to {self.layers - 1}, not {layer}")
        if self.mla:
            return self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        return 2 * self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, dtype: str | None = None) -> int:
        """Bytes that all layers keep of one token, in the model's dtype or another [bytes]."""
        elements = sum(self.kv_elements_per_token(layer) for layer in range(self.layers))
        return elements * dtype_bytes(dtype or self.dtype)

    def layer_macs(
        self, layer: int, chunk: int, prefix: int = 0, *, causal_skip: bool = True
    ) -> int:
        """Multiply-accumulates of a layer on ``chunk`` tokens after ``prefix`` tokens.

        Projections and feed-forward: elements of the matrices a token passes, times the chunk.
        Attention: ``heads (key_width + value_width)`` per (query, key) pair. MLA is taken
        re-expanded: keys and values of all p + c latents are made anew, ``kv_lora_rank heads
        (qk_nope_head_dim + v_head_dim)`` each. Norms, softmax, rotary and biases are no products
        and count nothing.

        Parameters
        ----------
        layer, chunk, prefix
            Which layer; tokens computed; tokens whose KV is resident.
        causal_skip
            False charges the masked half too: every query times every key the chunk can see.
        """
        window = self.windows[layer]
        if causal_skip:
            pairs = causal_pairs(chunk, prefix, window)
        else:
            keys = prefix if window is None else min(prefix, window - 1)
            pairs = chunk * (keys + chunk)
        attention = pairs * self.heads * (self.key_width + self.value_width)
        once, expanded = 0, 0
        for name, shape in attention_shapes(self).items():
            if name == "self_attn.kv_b_proj.weight":
                expanded = math.prod(shape)
            elif len(shape) == 2:
                once += math.prod(shape)
        feed_forward = self._feed_forward_macs_per_token(layer)
        return chunk * (once + feed_forward) + (prefix + chunk) * expanded + attention

    def head_macs(self) -> int:
        """Multiply-accumulates of the head on the last token."""
        return math.prod(self.head_shape)

    def _feed_forward_macs_per_token(self, layer: int) -> int:
        if self.moe is None or self.moe.is_dense(layer):
            return 3 * self.hidden_size * self.intermediate_size
        active = self.moe.experts_per_token + self.moe.shared_experts
        return self.hidden_size * (
            3 * active * self.moe.expert_intermediate_size + self.moe.experts
        )
