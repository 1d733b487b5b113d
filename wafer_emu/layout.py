"""How tensors are dealt to the cores of a region: which line holds which row, and the bytes."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_emu.dealing import dealt
from wafer_emu.placement import Region
from wafer_kernels import mesh
from wafer_kernels.region import Grid, Kind, Matrix

__all__ = ["Layout", "Rows", "element_bytes", "no_matrix"]

Int64 = npt.NDArray[np.int64]


def element_bytes(kind: Kind) -> int:
    """Bytes of a stored value."""
    return 4 if kind == Kind.FLOAT32 else 2


def no_matrix() -> Matrix:
    """Return a matrix without rows, where a kernel's operand is left out."""
    empty = np.zeros(0, np.int64)
    return Matrix(int(Kind.FLOAT32), empty, empty, np.zeros(1, np.int64), empty)


class Rows(NamedTuple):
    """Rows dealt to lines of cores: physical line and place there (row,), rows of each line."""

    line: Int64
    place: Int64
    sizes: Int64

    def of(self, first: int, count: int) -> Rows:
        """Some consecutive rows; lines keep their sizes."""
        chosen = slice(first, first + count)
        return Rows(
            np.ascontiguousarray(self.line[chosen]),
            np.ascontiguousarray(self.place[chosen]),
            self.sizes,
        )


class Layout:
    """The balanced dealing of a region; logical lines of cores lie on folded rings."""

    def __init__(self, region: Region, first_core: int) -> None:
        self.region = region
        self.grid = Grid(
            first_core,
            mesh.ring_places(mesh.MESHGEMM, region.rows),
            mesh.ring_places(mesh.MESHGEMM, region.columns),
        )
        self._rows: dict[int, Rows] = {}
        self._bounds: dict[int, Int64] = {}

    def rows(self, total: int) -> Rows:
        """Rows in balanced parts."""
        if total not in self._rows:
            sizes = dealt(total, self.region.rows)
            logical = sizes[self.grid.row_place]
            first = np.repeat(np.cumsum(logical) - logical, logical)
            line = np.repeat(self.grid.row_place, logical)
            self._rows[total] = Rows(line, np.arange(total) - first, sizes)
        return self._rows[total]

    def stacked(self, first: int, second: int) -> Rows:
        """Rows of which the first ones and the others are dealt one after another."""
        one, other = self.rows(first), self.rows(second)
        return Rows(
            np.concatenate([one.line, other.line]),
            np.concatenate([one.place, one.sizes[other.line] + other.place]),
            one.sizes + other.sizes,
        )

    @cached_property
    def copies(self) -> Rows:
        """One row on every line: a vector that all rows of cores hold."""
        lines = np.arange(self.region.rows)
        return Rows(lines, np.zeros_like(lines), np.ones_like(lines))

    def bounds(self, total: int) -> Int64:
        """First column of each logical part, and the total (columns + 1,)."""
        if total not in self._bounds:
            logical = self.column_sizes(total)[self.grid.column_place]
            self._bounds[total] = np.concatenate([[0], np.cumsum(logical)])
        return self._bounds[total]

    def column_sizes(self, total: int) -> Int64:
        """Columns that each physical column of cores holds (columns,)."""
        return dealt(total, self.region.columns)

    def size(self, rows: Rows, columns: int, element: int) -> Int64:
        """Bytes of a matrix on every core (core,)."""
        return np.multiply.outer(rows.sizes, self.column_sizes(columns)).ravel() * element

    def matrix(self, kind: Kind, rows: Rows, columns: int, address: Int64) -> Matrix:
        """Return a matrix at an address of every core (core,)."""
        return Matrix(int(kind), rows.line, rows.place, self.bounds(columns), address)
