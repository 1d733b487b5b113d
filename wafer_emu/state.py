"""What a run file holds, variable by variable, and how to open one.

The registry drives the writer (`recorder.py`), the validator and the tables of ``docs/metrics.md``.
A run file is netCDF4-shaped HDF5: ``xarray.open_datatree`` reads it without any code of ours.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wafer_emu.seal import broken
from wafer_kernels.errors import FileError, KernelError

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "ATTRIBUTES",
    "CLASSES",
    "SCHEMA_VERSION",
    "TABLES",
    "UNSIGNED",
    "VARIABLES",
    "Attribute",
    "Variable",
    "group_variables",
    "open_run",
    "register",
    "validate_run",
]

SCHEMA_VERSION = 2
CLASSES = ("code", "weights", "activations", "own_kv", "hosted_kv", "buffers")
TABLES = {
    "tasks": "task",
    "requests": "request",
    "stages": "stage",
    "kv_blocks": "block",
    "links": "link",
}
UNSIGNED = "unsigned"  # the narrowest unsigned type that holds the capacity of a core
NEVER = ((-1, "never"),)


@dataclass(frozen=True)
class Variable:
    """One variable of the run file.

    Parameters
    ----------
    group, name
        Where it stands.
    dims
        Names of its dimensions; a variable named like its only dimension is a coordinate.
    dtype
        A NumPy name, ``str``, or ``unsigned``: the narrowest that holds the capacity of a core.
    units
        ``byte``, or ``1`` for text, flags, counts, fractions and cycles.
    long_name
        What it is, in words.
    flags
        Values with a meaning of their own, each with one word.
    """

    group: str
    name: str
    dims: tuple[str, ...]
    dtype: str
    units: str
    long_name: str
    flags: tuple[tuple[int, str], ...] | None = None


@dataclass(frozen=True)
class Attribute:
    """One root attribute of the run file; ``json`` ones hold a document as text."""

    name: str
    kind: Literal["text", "integer", "json"]
    meaning: str


def register(variables: Iterable[Variable]) -> Mapping[tuple[str, str], Variable]:
    """Index variables by group and name.

    Raises
    ------
    KernelError
        If two of them share group and name.
    """
    registry: dict[tuple[str, str], Variable] = {}
    for variable in variables:
        key = (variable.group, variable.name)
        if key in registry:
            raise KernelError(f"The variable {variable.group}/{variable.name} is registered twice.")
        registry[key] = variable
    return registry


def _count(group: str, name: str, long_name: str) -> Variable:
    return Variable(group, name, (TABLES[group],), "int32", "1", long_name)


def _cycles(
    group: str, name: str, long_name: str, flags: tuple[tuple[int, str], ...] | None = None
) -> Variable:
    return Variable(group, name, (TABLES[group],), "int64", "1", long_name, flags)


def _size(group: str, name: str, long_name: str) -> Variable:
    return Variable(group, name, (TABLES[group],), "int64", "byte", long_name)


def _state(name: str, dims: str, dtype: str, units: str, long_name: str) -> Variable:
    return Variable("state", name, tuple(dims.split()), dtype, units, long_name)


VARIABLES = register(
    [
        _count("tasks", "request", "request, a row of requests"),
        _count("tasks", "stage", "stage, a row of stages"),
        _count("tasks", "chunk", "chunk of the request, from 0"),
        _count("tasks", "tokens", "tokens of the chunk"),
        _count("tasks", "prefix_tokens", "earlier tokens that the chunk attends to"),
        _cycles("tasks", "input_ready_cycle", "cycle at which the whole input had arrived"),
        _cycles("tasks", "start_cycle", "cycle at which the stage began the task"),
        _cycles("tasks", "end_cycle", "cycle at which the stage ended the task"),
        _cycles("tasks", "stall_input_cycles", "cycles the free stage waited for the input"),
        _cycles(
            "tasks",
            "stall_memory_cycles",
            "cycles waited for memory, before the task and between its layers",
        ),
        _cycles("tasks", "stall_transfer_cycles", "cycles the task waited for KV moves and reads"),
        _count("requests", "tokens", "tokens of the whole prompt, prefix included"),
        _count("requests", "prefix_tokens", "leading tokens that were already resident"),
        _count("requests", "chunks", "chunks that the computed tokens were cut into"),
        _cycles("requests", "arrival_cycle", "cycle at which the request arrived"),
        _cycles("requests", "start_cycle", "cycle at which its first task began"),
        _cycles("requests", "end_cycle", "cycle at which its last task ended"),
        _count("stages", "first_layer", "first layer of the stage, from 0"),
        _count("stages", "layers", "consecutive layers of the stage"),
        _count("stages", "row", "first fabric row of the stage's region"),
        _count("stages", "column", "first fabric column of the stage's region"),
        _count("stages", "rows", "fabric rows of the stage's region"),
        _count("stages", "columns", "fabric columns of the stage's region"),
        _cycles("stages", "busy_cycles", "cycles in which the stage worked"),
        _size("stages", "weight_bytes", "weights held for the stage's layers"),
        _size("stages", "kv_peak_bytes", "largest KV, own and hosted, in the region at one time"),
        _size("stages", "kv_capacity_bytes", "KV that the region can hold"),
        _size("stages", "sram_peak_bytes", "largest SRAM use of the region's fullest core"),
        _count("kv_blocks", "request", "request, a row of requests"),
        _count("kv_blocks", "layer", "layer whose keys and values these are, from 0"),
        _count("kv_blocks", "token", "first token of the block in its prompt"),
        _count("kv_blocks", "tokens", "tokens of the block"),
        _count("kv_blocks", "home", "stage whose layers made the block"),
        _count("kv_blocks", "host", "stage in whose region the bytes are kept last"),
        _cycles("kv_blocks", "born_cycle", "cycle at which the block was allocated"),
        _cycles("kv_blocks", "moved_cycle", "cycle at which it had arrived at its host", NEVER),
        _cycles("kv_blocks", "freed_cycle", "cycle at which the block was freed", NEVER),
        _size("kv_blocks", "bytes", "keys and values of the block"),
        _count("links", "row", "first fabric row of the region where the link begins"),
        _count("links", "column", "first fabric column of the region where the link begins"),
        _count("links", "to_row", "first fabric row of the neighbour that it leads to"),
        _count("links", "to_column", "first fabric column of the neighbour that it leads to"),
        _size("links", "bytes", "hand-offs, KV and queries that crossed it"),
        _cycles("links", "busy_cycles", "cycles in which a flow was crossing it"),
        _state("time", "time", "int64", "1", "cycle of the frame"),
        _state("class", "class", "str", "1", "what the bytes are used for"),
        _state("row", "row", "int32", "1", "fabric row of the core"),
        _state("column", "column", "int32", "1", "fabric column of the core"),
        _state("sram_bytes", "time class row column", UNSIGNED, "byte", "SRAM in use, by class"),
        _state("busy_fraction", "time row column", "float32", "1", "share of the cycles worked"),
        _state("sram_peak_bytes", "row column", UNSIGNED, "byte", "largest use of the core's SRAM"),
        _state("sram_peak_cycle", "row column", "int64", "1", "first cycle of that largest use"),
    ]
)

ATTRIBUTES = (
    Attribute("Conventions", "text", "the conventions that names and units follow"),
    Attribute("title", "text", "model, wafer and policy of the run"),
    Attribute("history", "text", "when and by which command the file was made"),
    Attribute("source", "text", "name and version of the program that wrote the file"),
    Attribute("wafer_schema_version", "integer", "version of this list of variables"),
    Attribute("configuration", "json", "wafer, model, workload, policy: all that repeats the run"),
    Attribute("summary", "json", "the result of the run, with the keys above"),
    Attribute("versions", "json", "version of each library that took part"),
    Attribute("seed", "integer", "seed of every random draw"),
    Attribute("provenance", "json", "where each value of the wafer comes from"),
    Attribute("complete", "integer", "1 once the run was written to its end, else 0"),
)


def group_variables(group: str) -> dict[str, Variable]:
    """Variables of one group, by name."""
    return {name: variable for (owner, name), variable in VARIABLES.items() if owner == group}


def _dtype_fits(wanted: str, found: str) -> bool:
    if wanted == UNSIGNED:
        return found in {"uint8", "uint16", "uint32", "uint64"}
    if wanted == "str":
        return found == "object" or found.startswith(("<U", "StringDType"))
    return found == wanted


def _variable_faults(tree: xr.DataTree, variable: Variable) -> list[str]:
    where = f"{variable.group}/{variable.name}"
    group = tree.children.get(variable.group)
    if group is None or variable.name not in group.variables:
        return [f"{where} is missing"]
    found = group[variable.name]
    faults = []
    if found.dims != variable.dims:
        faults.append(f"{where} has dimensions {found.dims}, not {variable.dims}")
    if not _dtype_fits(variable.dtype, str(found.dtype)):
        faults.append(f"{where} has type {found.dtype}, not {variable.dtype}")
    if found.attrs.get("units") != variable.units:
        faults.append(f"{where} has units {found.attrs.get('units')}, not {variable.units}")
    if not found.attrs.get("long_name"):
        faults.append(f"{where} has no long_name")
    return faults


def _attribute_faults(tree: xr.DataTree, attribute: Attribute) -> list[str]:
    value = tree.attrs.get(attribute.name)
    if value is None:
        return [f"the attribute {attribute.name} is missing"]
    if attribute.kind == "json":
        try:
            json.loads(value)
        except (TypeError, ValueError):
            return [f"the attribute {attribute.name} is not JSON"]
    return []


def validate_run(tree: xr.DataTree) -> None:
    """Hold names, dimensions, types and units of a run against the registry.

    An interrupted run (`complete` 0) needs no attributes yet.

    Raises
    ------
    FileError
        Naming everything that differs.
    """
    faults = [fault for wanted in VARIABLES.values() for fault in _variable_faults(tree, wanted)]
    if tree.attrs.get("complete") != 0:
        faults += [fault for wanted in ATTRIBUTES for fault in _attribute_faults(tree, wanted)]
    if faults:
        raise FileError(f"This is not a valid run: {'; '.join(faults)}.", faults=faults)


def open_run(path: str | os.PathLike[str]) -> xr.DataTree:
    """Open a run file; values are read when they are asked for.

    Warns (`UserWarning`) if the run was interrupted before its end.

    Raises
    ------
    FileError
        If the file is missing, truncated, damaged, not HDF5, or not a run of this program.
    """
    import xarray as xr

    file = Path(path)
    try:
        _check_schema(file)
        tree = xr.open_datatree(file, engine="h5netcdf")
    except FileError:
        raise
    except Exception as error:  # what a damaged file raises depends on where the damage is
        message = f"{file} cannot be read, it is truncated or damaged: {error}"
        raise FileError(message, file=str(file)) from error
    try:
        validate_run(tree)
    except FileError as error:
        tree.close()
        raise FileError(f"{file}: {error.message}", file=str(file), **error.details) from None
    if tree.attrs["complete"] != 1:
        warnings.warn(f"{file} is incomplete: its run was interrupted.", stacklevel=2)
    return tree


def _check_schema(file: Path) -> None:
    """Refuse, before xarray looks at it, a file that is not a run of this schema."""
    import h5py

    if not file.is_file():
        raise FileError(
            f"There is no run file {file}: `run -o FILE.h5` writes one.", file=str(file)
        )
    if broken(file):
        raise FileError(f"{file} is damaged: its checksum does not match.", file=str(file))
    if not h5py.is_hdf5(file):
        raise FileError(f"{file} is not an HDF5 file, so it is not a run file.", file=str(file))
    with h5py.File(file, "r") as raw:
        found = raw.attrs.get("wafer_schema_version")
        source = raw.attrs.get("source", "an unknown version")
    if found is None:
        raise FileError(f"{file} is an HDF5 file, but not a run of wafer-emu.", file=str(file))
    if found != SCHEMA_VERSION:
        message = (
            f"{file} was written by {source} with schema version {found}, this program reads "
            f"version {SCHEMA_VERSION}: repeat the run, or read it with the program that wrote it."
        )
        raise FileError(message, file=str(file))
