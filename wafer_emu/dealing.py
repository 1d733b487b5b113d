"""Balanced parts of tensors on a region, by the few kinds of rows and columns that they give."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from wafer_kernels import mesh

__all__ = ["Dealing", "dealt", "groups_on_core"]

Int64 = npt.NDArray[np.int64]


def dealt(total: int, lines: int) -> Int64:
    """Sizes of the balanced parts of ``total`` on the physical lines of a folded ring."""
    sizes = np.full(lines, total // lines, np.int64)
    sizes[: total % lines] += 1
    physical = np.empty(lines, np.int64)
    physical[mesh.ring_places(mesh.MESHGEMM, lines)] = sizes
    return physical


class Dealing:
    """Kinds of rows and columns under which given totals are dealt to a region.

    ``counts`` (row kind, column kind) cores; arrays of that shape ``expand`` to (rows, columns).
    """

    def __init__(
        self, rows: int, columns: int, row_totals: Iterable[int], column_totals: Iterable[int]
    ) -> None:
        self._rows, self._row_kind, row_counts = _kinds(rows, row_totals)
        self._columns, self._column_kind, column_counts = _kinds(columns, column_totals)
        self.counts = np.multiply.outer(row_counts, column_counts)

    def rows(self, total: int) -> Int64:
        """Parts of a total dealt over the rows (row kind, 1)."""
        return self._rows[total][:, np.newaxis]

    def columns(self, total: int) -> Int64:
        """Parts of a total dealt over the columns (1, column kind)."""
        return self._columns[total][np.newaxis, :]

    def matrix(self, rows: int, columns: int) -> Int64:
        """Elements of a matrix dealt over the region (row kind, column kind)."""
        return self.rows(rows) * self.columns(columns)

    def expand(self, kinds: Int64) -> Int64:
        """Values of every core (rows, columns) from values of every kind."""
        full = np.broadcast_to(kinds, self.counts.shape)
        return full[self._row_kind][:, self._column_kind]


def _kinds(lines: int, totals: Iterable[int]) -> tuple[dict[int, Int64], Int64, Int64]:
    """Parts per kind for each total, kind of each line, lines of each kind."""
    distinct = sorted(set(totals))
    table = np.array([dealt(total, lines) for total in distinct])
    parts, kind, counts = np.unique(table, axis=1, return_inverse=True, return_counts=True)
    return dict(zip(distinct, parts, strict=True)), kind.ravel(), counts


def groups_on_core(columns: Int64, groups: int, width: int) -> Int64:
    """Most of equal groups of ``width`` columns that cores with so many ``columns`` may meet."""
    size = width // groups
    return np.where(columns > 0, np.minimum(groups, (columns + size - 2) // size + 1), 0)
