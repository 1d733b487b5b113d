"""Safetensors checkpoints: one file, or shards with an index; headers are read, tensors on demand.

The format: 8 bytes of header length (little endian), a JSON header with the type, shape and byte
range of each tensor, then the bytes. Source: the safetensors README.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wafer_emu.strict import Natural
from wafer_kernels.errors import ConfigError, FileError

__all__ = ["Stored", "stored_tensors"]

Float32 = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Shape = tuple[int, ...]

STORED_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""How NumPy holds a stored type; it has no bfloat16, so those are bit patterns."""

HEADER_LIMIT = 100_000_000
"""Bytes of the largest header that the safetensors format allows."""


class _Index(msgspec.Struct):
    """Which shard holds which tensor."""

    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[Natural, ...]
    data_offsets: tuple[Natural, Natural]

    @property
    def expected_bytes(self) -> int:
        """What shape and type make, for a supported type."""
        return math.prod(self.shape) * STORED_TYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in a safetensors file."""

    path: Path
    stored_type: str
    shape: Shape
    offset: int

    def check(self, name: str, shape: Shape) -> None:
        """Raise a ConfigError unless the tensor has this shape and a supported type."""
        if self.shape != shape:
            raise ConfigError(
                f"{self.path}: {name} has the shape {list(self.shape)}, the model's configuration "
                f"makes it {list(shape)}"
            )
        if self.stored_type not in STORED_TYPES:
            raise ConfigError(
                f"{self.path}: {name} is stored as {self.stored_type}; convert the checkpoint to "
                f"one of {', '.join(STORED_TYPES)}"
            )

    def read(self) -> Float32:
        """Read the values, widened to float32."""
        raw = np.fromfile(
            self.path, STORED_TYPES[self.stored_type], math.prod(self.shape), offset=self.offset
        ).reshape(self.shape)
        if self.stored_type == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False)


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Tensors of a folder, a ``.safetensors`` file or an ``.index.json`` file, by name.

    Raises
    ------
    FileError
        If a file is absent, truncated or not in the format.
    """
    return {name: tensor for file in _files(path) for name, tensor in _header(file).items()}


def _files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    if path.is_dir():
        single, sharded = path / "model.safetensors", path / "model.safetensors.index.json"
        if not single.is_file() and not sharded.is_file():
            raise FileError(f"{path}: holds neither {single.name} nor {sharded.name}")
        path = single if single.is_file() else sharded
    if path.suffix != ".json":
        return [path]
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise FileError(f"{path}: not an index of shards with a weight_map: {error}") from error
    shards = sorted(set(index.weight_map.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise FileError(f"{path}: the shard {outside[0]} is not a file of its own folder")
    return [path.parent / shard for shard in shards]


def _header(path: Path) -> dict[str, Stored]:
    """Read a file's table: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise FileError(f"{path}: truncated, or not a safetensors file")
            table = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        table.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in table.items()}
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise FileError(f"{path}: not a safetensors file, header: {error}") from error
    data = 8 + length
    end = data + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if size != end:
        raise FileError(f"{path}: has {size} bytes, its header describes {end}: copy it again")
    for name, entry in entries.items():
        stored = entry.data_offsets[1] - entry.data_offsets[0]
        if entry.dtype in STORED_TYPES and stored != entry.expected_bytes:
            raise FileError(f"{path}: {name} has {stored} bytes, not {entry.expected_bytes}")
    return {
        name: Stored(path, entry.dtype, entry.shape, data + entry.data_offsets[0])
        for name, entry in entries.items()
    }
