"""Weights of a model: from safetensors (one file or sharded), or seeded random ones of its shape.

Names are those of Hugging Face checkpoints. A tensor is read, or drawn, when it is asked for and
comes as float32, which holds every float16 and bfloat16 exactly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from wafer_emu.checkpoint import stored_tensors
from wafer_emu.model import Model
from wafer_kernels.errors import ConfigError

__all__ = ["Weights", "weight_shapes"]

Float32 = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Shape = tuple[int, ...]


def weight_shapes(model: Model) -> dict[str, Shape]:
    """Name and shape of every tensor that the model's forward pass uses, in its order."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": model.embedding_shape}
    for layer in range(model.layers):
        for name, shape in model.layer_weight_shapes(layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = model.final_norm_shape
    if not model.tied_embeddings:
        shapes[model.head_name] = model.head_shape
    return shapes


class Weights(Mapping[str, Float32]):
    """The tensors of a model by name; ``weights[name]`` is a float32 array."""

    def __init__(self, shapes: Mapping[str, Shape], source: Callable[[str], Float32]) -> None:
        self.shapes = shapes
        self._source = source

    def __getitem__(self, name: str) -> Float32:
        if name not in self.shapes:
            raise KeyError(name)
        return self._source(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    @classmethod
    def open(cls, path: str | Path, model: Model) -> Weights:
        """Weights of ``model`` in a folder, a ``.safetensors`` file or an ``.index.json`` file.

        Tensors that the model does not use are ignored.

        Raises
        ------
        FileError
            If a file is absent, truncated or not in the safetensors format.
        ConfigError
            If a tensor of the model is missing, or has another shape or an unsupported type.
        """
        shapes = weight_shapes(model)
        stored = stored_tensors(Path(path))
        missing = [name for name in shapes if name not in stored]
        if missing:
            raise ConfigError(
                f"{path}: {len(missing)} of the {len(shapes)} tensors of {model.name} are missing, "
                f"the first is {missing[0]}; the checkpoint must be of this model",
                missing=missing[:20],
            )
        for name, shape in shapes.items():
            stored[name].check(name, shape)
        return cls(shapes, lambda name: stored[name].read())

    @classmethod
    def random(cls, model: Model, seed: int = 0, dtype: str = "float32") -> Weights:
        """Seeded weights of the model's shape that ``dtype`` represents exactly.

        A matrix has the deviation ``1 / sqrt(inputs)``, so that activations keep their size from
        layer to layer; norm weights are near one. A tensor depends on the seed and its own name
        only.

        Raises
        ------
        ConfigError
            If ``dtype`` is none of float32, float16, bfloat16.
        """
        if dtype not in ("float32", "float16", "bfloat16"):
            raise ConfigError(f"weights of type {dtype}: use float32, float16 or bfloat16")
        shapes = weight_shapes(model)
        return cls(shapes, lambda name: _rounded(_drawn(name, shapes[name], seed), dtype))


def _drawn(name: str, shape: Shape, seed: int) -> Float32:
    digest = hashlib.sha256(name.encode()).digest()
    rng = np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * noise
    if len(shape) == 1:
        return np.float32(0.1) * noise
    if name == "model.embed_tokens.weight":
        return noise
    return noise / np.float32(math.sqrt(shape[1]))


def _rounded(values: Float32, dtype: str) -> Float32:
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
