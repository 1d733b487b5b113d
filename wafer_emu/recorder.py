"""Streaming writer of run files: frames, tables and peaks go to disk as they come, none is kept.

The file grows as ``PATH.partial`` and becomes ``PATH`` in one step at the end, so that no half of a
run is ever found under its name.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wafer_emu.seal import seal
from wafer_emu.sink import Sink, interrupt_held
from wafer_emu.state import (
    ATTRIBUTES,
    CLASSES,
    SCHEMA_VERSION,
    TABLES,
    UNSIGNED,
    VARIABLES,
    Variable,
    group_variables,
)
from wafer_kernels.errors import FileError, KernelError

__all__ = ["Recorder"]

TABLE_CHUNK_ROWS = 65_536
GZIP_LEVEL = 1
ROWS_LIMIT = 2**40  # h5netcdf reads dimensions that may grow without limit ten times slower
DIMENSION_ONLY = "This is a netCDF dimension but not a netCDF variable."
LIBRARIES = ("wafer-emu", "numpy", "numba", "llvmlite", "xarray", "h5py", "h5netcdf")


class Recorder:
    """Context manager that writes one run file; what leaves it unfinished is removed.

    Parameters
    ----------
    path
        The run file; its folder must exist. An older file of this name is replaced at the end.
    rows, columns
        Cores of the whole fabric.
    sram_bytes
        Capacity of a core [byte]; the narrowest unsigned type that holds it is used.

    Raises
    ------
    FileError
        If the file cannot be written: on entering, before any work, or later if the disk is full.
    KernelError
        If values have the wrong shape, do not fit their type or are not registered.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, rows: int, columns: int, sram_bytes: int
    ) -> None:
        self.path = Path(path)
        self._partial = Path(f"{self.path}.partial")
        self._sizes = {"class": len(CLASSES), "row": rows, "column": columns}  # the rest grows
        self._chunks = dict.fromkeys(TABLES.values(), TABLE_CHUNK_ROWS)
        self._chunks |= {"time": 1, "class": 1, "row": rows, "column": columns}
        self._unsigned = np.min_scalar_type(sram_bytes)
        self._last_cycle = -1
        self._packed: dict[
            tuple[str, Any], tuple[NDArray[Any], bytes]
        ] = {}  # planes as last written
        self._open = ExitStack()

    def __enter__(self) -> Self:
        import h5py

        if self.path.is_dir():
            raise FileError(f"{self.path} is a folder: name a file in it.", file=str(self.path))
        try:
            self._sink = self._open.enter_context(Sink(self._partial, "w+"))
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            with self._writing():
                file = h5py.File(self._sink, "w", track_order=True)
                self._file = self._open.enter_context(file)
                self._create()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._discard()

    def frame(self, cycle: int, planes: NDArray[Any], busy: NDArray[Any]) -> None:
        """Append the state of all cores at one cycle.

        Parameters
        ----------
        cycle
            Instant of the frame, later than the last frame's.
        planes
            SRAM in use (class, row, column) [byte], classes in the order of `state.CLASSES`.
        busy
            Share of the cycles since the last frame in which a core worked (row, column).
        """
        if cycle <= self._last_cycle:
            raise KernelError(f"The frame at cycle {cycle} follows one at {self._last_cycle}.")
        kept = self._exact(VARIABLES["state", "sram_bytes"], planes[None])[0]
        worked = self._exact(VARIABLES["state", "busy_fraction"], busy[None])
        with self._writing():
            frame = len(self._file["state"]["time"])
            self._append("state", "time", {"time": np.array([cycle])})
            self._planes("sram_bytes", frame, enumerate(kept))
            self._planes("busy_fraction", frame, [((), worked[0])])
            self._file.flush()
        self._last_cycle = cycle

    def _planes(self, name: str, frame: int, planes: Iterable[tuple[Any, NDArray[Any]]]) -> None:
        """Write planes, one a chunk, as HDF5's filters would: shuffle, then gzip.

        Shuffled are first the first bytes of all elements, then the second ones and so on. A plane
        that has not changed since the last frame is not packed again.
        """
        target = self._file["state"][name]
        target.resize(frame + 1, axis=0)
        for index, plane in planes:
            before, packed = self._packed.get((name, index), (None, b""))
            if before is None or not np.array_equal(before, plane):
                shuffled = np.ascontiguousarray(plane).reshape(-1, 1).view(np.uint8).T
                packed = zlib.compress(shuffled.tobytes(), GZIP_LEVEL)
                self._packed[name, index] = (plane.copy(), packed)
            at = (frame, 0, 0) if index == () else (frame, index, 0, 0)
            target.id.write_direct_chunk(at, packed)

    def table(self, group: str, columns: Mapping[str, NDArray[Any]]) -> None:
        """Append rows to a table: all its columns, equally long, as many rows as there are."""
        _require(columns.keys(), group_variables(group).keys(), f"columns of {group}")
        with self._writing():
            self._append(group, TABLES[group], columns)

    def peaks(self, peak_bytes: NDArray[Any], cycle: NDArray[Any]) -> None:
        """Write each core's largest SRAM use [byte] and the cycle of it, both (row, column)."""
        with self._writing():
            for name, values in (("sram_peak_bytes", peak_bytes), ("sram_peak_cycle", cycle)):
                self._file["state"][name][...] = self._exact(VARIABLES["state", name], values)

    def finish(self, attributes: Mapping[str, object]) -> None:
        """Write the root attributes, mark the run complete and give the file its name.

        Parameters
        ----------
        attributes
            ``title``, ``history``, ``configuration``, ``summary``, ``seed``, ``provenance``;
            mappings are kept as JSON. The other attributes are known here.
        """
        values: dict[str, object] = {
            **attributes,
            "Conventions": "CF-1.11",
            "source": f"wafer-emu {version('wafer-emu')}",
            "wafer_schema_version": SCHEMA_VERSION,
            "versions": {"python": python_version()} | {name: version(name) for name in LIBRARIES},
            "complete": np.uint8(1),
        }
        kinds = {attribute.name: attribute.kind for attribute in ATTRIBUTES}
        _require(values.keys(), kinds.keys(), "attributes")
        for name, kind in kinds.items():
            if kind == "json":
                values[name] = json.dumps(values[name], sort_keys=True, allow_nan=False)
        with self._writing():
            for name in kinds:
                self._file.attrs[name] = values[name]
            self._open.close()
        with self._writing():
            seal(self._partial)
            self._partial.replace(self.path)

    def _unwritable(self, error: BaseException) -> FileError:
        return FileError(
            f"{self.path} cannot be written ({error}): name a file in an existing folder that you "
            "may write to, on a disk with room.",
            file=str(self.path),
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn what the file system refused into one error that says which file."""
        with interrupt_held():
            try:
                yield
            except Exception as error:
                cause = self._sink.failure or error
                if isinstance(cause, OSError):
                    raise self._unwritable(cause) from cause
                raise
            if self._sink.failure is not None:
                raise self._unwritable(self._sink.failure) from self._sink.failure

    def _create(self) -> None:
        for owner in dict.fromkeys(owner for owner, _ in VARIABLES):
            group = self._file.create_group(owner, track_order=True)
            variables = group_variables(owner)
            if owner in TABLES:
                dim = TABLES[owner]
                scale = group.create_dataset(dim, (0,), ">f4", maxshape=(ROWS_LIMIT,))
                scale.make_scale(f"{DIMENSION_ONLY}{0:10d}")
            for name, variable in variables.items():
                made = self._create_variable(group, variable)
                if variable.dims == (name,):
                    made.make_scale(name)
            for name, variable in variables.items():
                for axis, dim in enumerate(variable.dims):
                    if dim != name:
                        group[name].dims[axis].attach_scale(group[dim])
        state = self._file["state"]
        state["class"][...] = CLASSES
        for dim in ("row", "column"):
            state[dim][...] = np.arange(self._sizes[dim])
        self._file.attrs["wafer_schema_version"] = SCHEMA_VERSION
        self._file.attrs["complete"] = np.uint8(0)
        self._file.flush()

    def _create_variable(self, group: Any, variable: Variable) -> Any:
        made = group.create_dataset(
            variable.name,
            shape=[self._sizes.get(dim, 0) for dim in variable.dims],
            maxshape=[self._sizes.get(dim, ROWS_LIMIT) for dim in variable.dims],
            dtype=self._dtype(variable),
            chunks=tuple(self._chunks[dim] for dim in variable.dims),
            compression="gzip",
            compression_opts=GZIP_LEVEL,
            shuffle=True,
        )
        made.attrs["units"] = variable.units
        made.attrs["long_name"] = variable.long_name
        if variable.flags is not None:
            values, words = zip(*variable.flags, strict=True)
            made.attrs["flag_values"] = np.array(values, dtype=variable.dtype)
            made.attrs["flag_meanings"] = " ".join(words)
        return made

    def _dtype(self, variable: Variable) -> np.dtype[Any]:
        import h5py

        if variable.dtype == "str":
            return h5py.string_dtype()
        return self._unsigned if variable.dtype == UNSIGNED else np.dtype(variable.dtype)

    def _exact(self, variable: Variable, values: NDArray[Any]) -> NDArray[Any]:
        """Values in the type of their variable; integers must not change by it."""
        where = f"{variable.group}/{variable.name}"
        wanted = tuple(self._sizes.get(dim) for dim in variable.dims)
        if len(wanted) != values.ndim or any(
            size not in {None, found} for size, found in zip(wanted, values.shape, strict=True)
        ):
            raise KernelError(f"{where} has shape {values.shape}, not {wanted} (None: any).")
        kept = values.astype(self._dtype(variable), copy=False)
        if kept is not values and kept.dtype.kind != "f" and not np.array_equal(kept, values):
            raise KernelError(f"{where} holds values that {kept.dtype} cannot hold.")
        return kept

    def _append(self, group: str, dim: str, columns: Mapping[str, NDArray[Any]]) -> None:
        kept = {name: self._exact(VARIABLES[group, name], v) for name, v in columns.items()}
        lengths = {name: len(values) for name, values in kept.items()}
        if len(set(lengths.values())) != 1:
            raise KernelError(f"The columns of {group} differ in length: {lengths}.")
        target = self._file[group]
        first = len(target[dim])
        last = first + max(lengths.values())
        target[dim].resize(last, axis=0)
        for name, values in kept.items():
            target[name].resize(last, axis=0)
            target[name][first:last] = values

    def _discard(self) -> None:
        """Close; remove what did not get its final name."""
        with interrupt_held():
            self._open.close()
            self._partial.unlink(missing_ok=True)


def _require(found: Iterable[str], wanted: Iterable[str], what: str) -> None:
    odd = set(found) ^ set(wanted)
    if odd:
        raise KernelError(f"Of the {what}, missing or not registered: {', '.join(sorted(odd))}.")
