"""Matrices in the memories of a region's cores: spans of their rows, loaded and stored.

All memories are one array of bytes (core, byte). Values are float32, float16 or bfloat16 in memory
and float32 where they are computed with; bytes are copied one by one, so that an address needs no
alignment.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from wafer_kernels._jit import kernel
from wafer_kernels.numeric import Float32, Int64
from wafer_kernels.numeric_storage import (
    narrow_bfloat16,
    narrow_float16,
    widen_bfloat16,
    widen_float16,
)

__all__ = [
    "Bytes",
    "Grid",
    "Kind",
    "Matrix",
    "copy_block",
    "copy_bytes",
    "copy_rows",
    "fill",
    "load",
    "load_span",
    "part_start",
    "read_columns",
    "read_rows",
    "store",
    "store_span",
    "values_at",
    "write_rows",
]

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class Kind(IntEnum):
    """How a value is stored."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2


class Grid(NamedTuple):
    """A region: its first core in the array of memories, and where logical lines lie."""

    first_core: int
    row_place: Int64
    """Physical row of each logical row of cores (rows,)."""
    column_place: Int64
    """Physical column of each logical column of cores (columns,)."""


class Matrix(NamedTuple):
    """A matrix dealt to the cores of a region.

    Row r is the ``place[r]``-th that the cores of physical row ``line[r]`` hold; of its columns the
    logical column of cores j holds ``bounds[j]`` to ``bounds[j + 1]``.
    """

    kind: int
    line: Int64
    place: Int64
    bounds: Int64
    address: Int64
    """First byte of the matrix on each core, in physical order (core,)."""


@kernel()
def part_start(total: int, parts: int, index: int) -> int:
    """First element of part ``index`` of ``total`` dealt to ``parts``, the first ones larger."""
    return index * (total // parts) + min(index, total % parts)


@kernel()
def copy_bytes(target: Bytes, to: int, source: Bytes, start: int, count: int) -> None:
    """Copy ``count`` bytes between two memories (byte,), or within one if they do not overlap."""
    there, here = target[to : to + count], source[start : start + count]
    for i in range(count):
        there[i] = here[i]


@kernel()
def _element(kind: int) -> int:
    """Bytes of a stored value."""
    return 4 if kind == Kind.FLOAT32 else 2


@kernel()
def load(wide: Float32, memory: Bytes, address: int, kind: int) -> None:
    """Load values (count,) from an address of a core's memory (byte,)."""
    if kind == Kind.FLOAT32:
        copy_bytes(wide.view(np.uint8), 0, memory, address, 4 * wide.size)
        return
    narrow = memory[address : address + 2 * wide.size].view(np.uint16)
    if kind == Kind.FLOAT16:
        widen_float16(wide, narrow)
    else:
        widen_bfloat16(wide, narrow)


@kernel()
def values_at(scratch: Float32, memory: Bytes, address: int, kind: int) -> Float32:
    """Values (count,) at an address of a core's memory: in place if they can be, else copied."""
    if kind == Kind.FLOAT32 and address % 4 == 0:
        return memory[address : address + 4 * scratch.size].view(np.float32)
    load(scratch, memory, address, kind)
    return scratch


@kernel()
def store(memory: Bytes, address: int, kind: int, wide: Float32) -> None:
    """Store values (count,), rounded to their kind, at an address of a core's memory (byte,)."""
    if kind == Kind.FLOAT32:
        copy_bytes(memory, address, wide.view(np.uint8), 0, 4 * wide.size)
        return
    narrow = memory[address : address + 2 * wide.size].view(np.uint16)
    if kind == Kind.FLOAT16:
        narrow_float16(narrow, wide)
    else:
        narrow_bfloat16(narrow, wide)


@kernel()
def _locate(grid: Grid, matrix: Matrix, row: int, column: int) -> tuple[int, int, int]:
    """Core and address of an element, and how many elements of its row are there from it on."""
    part = np.searchsorted(matrix.bounds, column, "right") - 1
    local = matrix.line[row] * grid.column_place.size + grid.column_place[part]
    width = matrix.bounds[part + 1] - matrix.bounds[part]
    element = matrix.place[row] * width + column - matrix.bounds[part]
    address = matrix.address[local] + element * _element(matrix.kind)
    return grid.first_core + local, address, matrix.bounds[part + 1] - column


@kernel()
def load_span(
    wide: Float32, arena: Bytes, grid: Grid, matrix: Matrix, row: int, column: int
) -> None:
    """Load elements (count,) of a row from ``column`` on, from all cores that hold some."""
    done = 0
    while done < wide.size:
        core, address, there = _locate(grid, matrix, row, column + done)
        count = min(there, wide.size - done)
        load(wide[done : done + count], arena[core], address, matrix.kind)
        done += count


@kernel()
def store_span(
    arena: Bytes, grid: Grid, matrix: Matrix, row: int, column: int, wide: Float32
) -> None:
    """Store elements (count,) of a row from ``column`` on."""
    done = 0
    while done < wide.size:
        core, address, there = _locate(grid, matrix, row, column + done)
        count = min(there, wide.size - done)
        store(arena[core], address, matrix.kind, wide[done : done + count])
        done += count


@kernel()
def copy_rows(
    arena: Bytes,
    to_core: int,
    to: int,
    grid: Grid,
    matrix: Matrix,
    rows: Int64,
    column: int,
    count: int,
) -> None:
    """Copy the stored bytes of ``count`` elements of chosen rows to an address of a core."""
    element, done, columns = _element(matrix.kind), 0, grid.column_place.size
    part = np.searchsorted(matrix.bounds, column, "right") - 1
    target = arena[to_core]
    while done < count:
        first, end = matrix.bounds[part], matrix.bounds[part + 1]
        here = min(end - column - done, count - done)
        for r in range(rows.size):
            local = matrix.line[rows[r]] * columns + grid.column_place[part]
            start = matrix.place[rows[r]] * (end - first) + column + done - first
            address = matrix.address[local] + start * element
            source = arena[grid.first_core + local]
            copy_bytes(target, to + (r * count + done) * element, source, address, here * element)
        done += here
        part += 1


@kernel()
def copy_block(
    arena: Bytes,
    to_core: int,
    to: int,
    grid: Grid,
    matrix: Matrix,
    row: int,
    rows: int,
    part: int,
) -> None:
    """Copy the stored bytes of ``rows`` rows in one logical column of cores to an address."""
    width = (matrix.bounds[part + 1] - matrix.bounds[part]) * _element(matrix.kind)
    done = 0
    while done < rows:
        line, count = matrix.line[row + done], 1
        while done + count < rows and matrix.line[row + done + count] == line:
            count += 1
        local = line * grid.column_place.size + grid.column_place[part]
        start = matrix.address[local] + matrix.place[row + done] * width
        source = arena[grid.first_core + local]
        copy_bytes(arena[to_core], to + done * width, source, start, count * width)
        done += count


@kernel()
def read_rows(values: Float32, arena: Bytes, grid: Grid, matrix: Matrix) -> None:
    """Read a whole matrix (rows, columns)."""
    for row in range(values.shape[0]):
        load_span(values[row], arena, grid, matrix, row, 0)


@kernel()
def write_rows(arena: Bytes, grid: Grid, matrix: Matrix, values: Float32) -> None:
    """Write a whole matrix (rows, columns)."""
    for row in range(values.shape[0]):
        store_span(arena, grid, matrix, row, 0, values[row])


@kernel()
def read_columns(values: Float32, arena: Bytes, grid: Grid, matrix: Matrix, columns: Int64) -> None:
    """Read chosen columns of a matrix as rows (chosen, rows): an embedding table's tokens."""
    one = np.empty(1, np.float32)
    for chosen in range(columns.size):
        for row in range(values.shape[1]):
            load_span(one, arena, grid, matrix, row, columns[chosen])
            values[chosen, row] = one[0]


@kernel()
def fill(arena: Bytes, first_core: int, address: Int64, count: Int64, byte: int) -> None:
    """Set bytes (core,) from an address on (core,) on consecutive cores."""
    for core in range(address.size):
        arena[first_core + core, address[core] : address[core] + count[core]] = byte
