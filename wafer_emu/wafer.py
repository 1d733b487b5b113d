"""The wafer: dies of cores on a mesh, with the provenance of every number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from wafer_emu._data import preset_names, preset_path
from wafer_emu.hardware import (
    Core,
    Die,
    DieLink,
    Dram,
    Energy,
    Link,
    OffWafer,
    Program,
    Simd,
    Systolic,
)
from wafer_emu.strict import (
    Count,
    apply_changes,
    convert,
    load_toml,
    toml_values,
)
from wafer_kernels.errors import ConfigError

__all__ = [
    "Core",
    "Die",
    "DieLink",
    "Dram",
    "Energy",
    "Link",
    "OffWafer",
    "Program",
    "Simd",
    "Systolic",
    "Wafer",
]

_GRADE = re.compile(r"(published|derived|assumed|calibrated): \S")
_LABELS = ("name", "title", "provenance")


class Wafer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wafer: ``die_rows x die_columns`` dies, alike, on one mesh of cores.

    ``provenance`` maps a dotted path, or the prefix of one, to ``published|derived|assumed|
    calibrated: source``; the longest prefix counts. A value that nothing covers is an error.

    Examples
    --------
    >>> wafer = Wafer.preset("wse-2")
    >>> wafer.cores
    745500
    >>> wafer.replace({"core.sram_bytes": 65536}).core.sram_bytes
    65536
    """

    name: str
    title: str
    die_rows: Count
    die_columns: Count
    die: Die
    core: Core
    link: Link
    die_link: DieLink | None = None
    dram: Dram | None = None
    off_wafer: OffWafer
    energy: Energy
    program: Program | None = None
    provenance: dict[str, str]

    def __post_init__(self) -> None:
        if self.dies > 1 and self.die_link is None:
            raise ValueError(f"{self.dies} dies need a die_link")
        faults = [
            f"provenance of {key} must start with published:, derived:, assumed: or calibrated:, "
            f"not {source[:30]!r}"
            for key, source in self.provenance.items()
            if not _GRADE.match(source)
        ]
        faults += [f"no provenance for {path}" for path in self.paths() if not self._source(path)]
        if faults:
            raise ValueError("; ".join(faults))

    @classmethod
    def presets(cls) -> list[str]:
        """Names of the shipped wafers."""
        return preset_names("wafers", ".toml")

    @classmethod
    def preset(cls, name: str) -> Wafer:
        """Shipped wafer of that name; ConfigError with near names if there is none."""
        return cls.from_toml(preset_path("wafers", ".toml", name))

    @classmethod
    def from_toml(cls, path: str | Path) -> Wafer:
        """Wafer of a TOML file of the form of the shipped presets.

        Raises
        ------
        FileError
            If the file cannot be read.
        ConfigError
            If a value is wrong, missing, unknown or without provenance.
        """
        wafer = load_toml(Path(path), cls)
        paths = wafer.paths()
        idle = [key for key in wafer.provenance if not any(_covers(key, leaf) for leaf in paths)]
        if idle:
            raise ConfigError(f"{path}: provenance of no value of this wafer: {', '.join(idle)}")
        return wafer

    @classmethod
    def load(cls, name: str | Path) -> Wafer:
        """File if the name ends in ``.toml``, else the preset of that name."""
        return cls.from_toml(name) if Path(name).suffix == ".toml" else cls.preset(str(name))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Wafer:
        """Wafer of what :meth:`to_dict` gave."""
        return convert(raw, cls, "wafer")

    def to_dict(self) -> dict[str, Any]:
        """Plain mapping of all values, as kept in run files."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def replace(self, changes: Mapping[str, object] | None = None, /, **fields: object) -> Wafer:
        """Copy with values replaced: dotted paths in a mapping, or whole fields by name.

        Raises
        ------
        ConfigError
            If a path does not exist or a value does not fit.
        """
        return self._changed({**(changes or {}), **fields}, "replace")

    def with_overrides(self, overrides: Mapping[str, str], origin: str = "--set wafer") -> Wafer:
        """Copy with ``{dotted path: TOML text}`` applied, as ``--set wafer.PATH=VALUE`` does."""
        return self._changed(toml_values(overrides, origin), origin)

    def paths(self) -> list[str]:
        """Dotted paths of all values that need a provenance."""
        plain = self.to_dict()
        return list(_leaves({key: plain[key] for key in plain if key not in _LABELS}))

    def provenance_of(self, path: str) -> str:
        """Where the value at a dotted path comes from.

        Raises
        ------
        ConfigError
            If there is no such value.
        """
        source = self._source(path)
        if source is None or path not in self.paths():
            raise ConfigError(f"wafer {self.name}: no value at {path!r}")
        return source

    def _source(self, path: str) -> str | None:
        keys = [key for key in self.provenance if _covers(key, path)]
        return self.provenance[max(keys, key=len)] if keys else None

    def _changed(self, changes: Mapping[str, object], origin: str) -> Wafer:
        mine = [path for path in changes if path.split(".")[0] not in _LABELS]
        kept = {
            key: source
            for key, source in self.provenance.items()
            if not any(_covers(path, key) for path in mine)
        }
        provenance = kept | dict.fromkeys(mine, "assumed: set by the user")
        return apply_changes(self, {"provenance": provenance, **changes}, origin)

    @property
    def dies(self) -> int:
        """Dies of the wafer."""
        return self.die_rows * self.die_columns

    @property
    def core_rows(self) -> int:
        """Rows of cores of the whole fabric."""
        return self.die_rows * self.die.core_rows

    @property
    def core_columns(self) -> int:
        """Columns of cores of the whole fabric."""
        return self.die_columns * self.die.core_columns

    @property
    def cores(self) -> int:
        """Cores of the wafer."""
        return self.core_rows * self.core_columns

    @property
    def sram_capacity_bytes(self) -> int:
        """SRAM of all cores, code reserve included [bytes]."""
        return self.cores * self.core.sram_bytes

    @property
    def dram_capacity_bytes(self) -> int:
        """Die memory of the wafer [bytes]; 0 without any."""
        return self.dies * self.dram.capacity_bytes if self.dram else 0

    @property
    def attention(self) -> str:
        """How attention is computed: ``ring`` or ``products``."""
        return "ring" if self.program is None else self.program.attention

    @property
    def request_cycles(self) -> int:
        """Cycles that pass once a request, before its first chunk starts."""
        return 0 if self.program is None else self.program.request_cycles

    @property
    def peak_macs_per_second(self) -> int:
        """Multiply-accumulates per second of all cores at their best."""
        return self.cores * self.core.compute.macs_per_cycle * self.core.clock_hz


def _leaves(value: object, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif value is not None:
        yield path


def _covers(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}.")
