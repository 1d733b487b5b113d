"""Attention as matrix products: every head on its columns of cores, key block after key block.

The other form of the ring of key tiles. Heads lie side by side over the columns, ``width`` columns
a head; where there are more heads than columns, ``turns`` heads take turns on a column. Keys come
in blocks of at most as many tokens as the chunk has, its own block first. A block is

    S = Q K^T    rows of cores keep Q, keys travel, partial sums add up along a head's columns,
    P = exp(S - max S)    with a maximum and a sum over a head's columns,
    O = O e + P V         a compute-shift product, e the online softmax's correction.

The mask is not skipped inside the chunk's own block; keys after the chunk are never met.
Source: the prefill program of WaferLLM (OSDI 2025, arXiv 2502.04563), which has one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from wafer_emu.program import Attention
from wafer_emu.tiling import FLOAT_BYTES
from wafer_kernels.attention import RESCALE_OPERATIONS, SCORE_OPERATIONS
from wafer_kernels.gemm import gemm
from wafer_kernels.mesh import part_size

if TYPE_CHECKING:
    from wafer_emu.clock import Clock

__all__ = ["BlockAttention"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BlockAttention:
    """One attention in this form, on the region of a clock."""

    clock: Clock
    operation: Attention
    _known: dict[int, int] = field(default_factory=dict, repr=False)

    @cached_property
    def width(self) -> int:
        """Columns of cores that share one head."""
        return max(1, self.clock.region.columns // self.operation.heads)

    @cached_property
    def turns(self) -> int:
        """Heads that take turns on the same columns."""
        return -(-self.operation.heads // (self.clock.region.columns // self.width))

    @cached_property
    def head(self) -> Clock:
        """Clock of the columns of one head."""
        region = replace(self.clock.region, columns=self.width)
        return replace(self.clock, region=region, _memo={})

    @property
    def slices(self) -> int:
        """Slices that the keys of a block are cut into, one a step."""
        return max(self.head.region.rows, self.width)

    def blocks(self, earlier_keys: int) -> Iterator[tuple[int, int]]:
        """(keys, how many) of the blocks in front of the chunk's own: full ones and a last one."""
        full, rest = divmod(earlier_keys, self.operation.chunk)
        yield from ((keys, times) for keys, times in ((self.operation.chunk, full), (rest, 1)))

    def cycles(self, earlier_keys: Int64) -> Int64:
        """Cycles after many numbers of earlier keys (P,)."""
        full, rest = np.divmod(earlier_keys, self.operation.chunk)
        last = np.array([self.block_cycles(int(keys)) for keys in rest], np.int64)
        return (full + 1) * self.block_cycles(self.operation.chunk) + last

    def block_cycles(self, keys: int) -> int:
        """Cycles of a block of keys."""
        if keys not in self._known:
            self._known[keys] = self._block_cycles(keys) if keys > 0 else 0
        return self._known[keys]

    def _block_cycles(self, keys: int) -> int:
        head, operation = self.head, self.operation
        scores = gemm(head.timing_grid, operation.chunk, operation.key_width, keys, "gemm-t").cycles
        values = head.compute_shift(operation.chunk, keys, operation.value_width)
        row_tokens = part_size(operation.chunk, head.region.rows, 0)
        summed = head.reduce(self.width, row_tokens * FLOAT_BYTES)
        softmax = (
            head.vector(operation.chunk, keys, SCORE_OPERATIONS)
            + head.vector(operation.chunk, operation.value_width, RESCALE_OPERATIONS)
            + 2 * summed
        )
        return self.turns * (scores + softmax + values) + self._spread(keys)

    @property
    def sharing_columns(self) -> int:
        """Columns over which the heads lie that share a key head."""
        group = self.operation.heads // self.operation.kv_heads
        return -(-group * self.width // self.turns)

    def _spread(self, keys: int) -> int:
        """Cycles until all columns that share a key head have a block's keys and values."""
        if self.sharing_columns == self.width:
            return 0
        head, operation = self.head, self.operation
        row_keys = part_size(keys, head.region.rows, 0)
        elements = row_keys * (operation.key_width + operation.value_width)
        link = self.clock.slowest_link
        arriving = link.transfer_cycles(elements * head.grid.element_bytes)
        ramps = 2 * self.clock.wafer.link.ramp_cycles
        return arriving + self.sharing_columns * link.hop_cycles + ramps

    @property
    def row_bytes(self) -> int:
        """Memory of a core for each of its queries: scores, sums that arrive, softmax state."""
        operation, element = self.operation, self.clock.grid.element_bytes
        scores = part_size(operation.chunk, self.width, 0) * element
        state = (part_size(operation.value_width, self.width, 0) + 2) * FLOAT_BYTES
        return self.turns * (scores + state) + part_size(operation.chunk, self.slices, 0) * element

    @property
    def slice_bytes(self) -> int:
        """Memory of a core for a slice of keys and one of values, each in use and arriving."""
        operation, element = self.operation, self.clock.grid.element_bytes
        width = part_size(operation.key_width, self.width, 0) + part_size(
            operation.value_width, self.width, 0
        )
        return 2 * part_size(operation.chunk, self.slices, 0) * width * element
