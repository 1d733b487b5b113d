"""How a region shares out an attention: heads and key splits to columns, tiles, query blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from wafer_emu.placement import Region
from wafer_emu.program import Attention
from wafer_emu.wafer import Simd, Wafer
from wafer_kernels import entries, systolic
from wafer_kernels.attention import AttentionCost
from wafer_kernels.systolic import CoreCost

__all__ = [
    "AttentionTiling",
    "attention_cost",
    "attention_tilings",
    "core_cost",
    "query_tile_tokens",
]

FLOAT_BYTES = 4  # partial sums and softmax statistics
MOST_KEY_TILE = 64  # longer tiles save little and cost memory (assumed)
MOST_SPARE_UNITS = 3  # units a column beyond the fewest that are tried
USUAL_ROW_TOKENS = (
    2,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
    64,
    128,
    256,
)  # queries of a row: who is best there?
LEVELS_PER_OCTAVE = 4  # of bytes, at each of which the best tiling is kept


@cache
def _core_cost(compute: object, read: int, write: int) -> CoreCost:
    if isinstance(compute, Simd):
        return systolic.simd_core(
            compute.lanes,
            compute.issue_millicycles,
            vector_axis=0 if compute.vector_axis == "m" else 1,
            read_bytes_per_cycle=read,
            write_bytes_per_cycle=write,
        )
    return systolic.systolic_core(
        compute.rows,  # type: ignore[attr-defined]
        compute.columns,  # type: ignore[attr-defined]
        compute.dataflow,  # type: ignore[attr-defined]
        depth=compute.depth,  # type: ignore[attr-defined]
        explicit_drain=compute.drain == "explicit",  # type: ignore[attr-defined]
        read_bytes_per_cycle=read,
        write_bytes_per_cycle=write,
    )


def core_cost(wafer: Wafer) -> CoreCost:
    """Parameters of the tile kernels for a wafer's core."""
    core = wafer.core
    return _core_cost(core.compute, core.sram_read_bytes_per_cycle, core.sram_write_bytes_per_cycle)


@dataclass(frozen=True)
class AttentionTiling:
    """Heads and keys on columns, queries and keys on rows.

    ``units`` (head, key split) pairs a column; ``splits`` key splits a head; tiles in tokens;
    ``block_row_tokens`` queries that a row keeps at a time (a longer chunk makes several passes).
    A core holds ``key_buffer_bytes`` of key tiles and ``query_bytes`` for each of its queries.
    """

    units: int
    splits: int
    query_tile: int
    key_tile: int
    key_granule: int
    block_row_tokens: int
    key_buffer_bytes: int
    query_bytes: int

    @property
    def bytes(self) -> int:
        """What a full block takes of a core."""
        return self.key_buffer_bytes + self.block_row_tokens * self.query_bytes

    def held_query_tiles(self, rows: int, chunk: int) -> int:
        """Query tiles that memory is laid out for: never fewer for a longer chunk."""
        return -(-min(chunk, rows * self.block_row_tokens) // self.query_tile)

    def held_bytes(self, rows: int, chunk: int) -> int:
        """What a chunk takes of the core that holds most of it."""
        row_tiles = -(-self.held_query_tiles(rows, chunk) // rows)
        return self.key_buffer_bytes + row_tiles * self.query_tile * self.query_bytes

    def query_blocks(self, rows: int, chunk: int) -> Iterator[tuple[int, int]]:
        """(tokens, tokens before) of the even blocks that a chunk's queries are taken in."""
        blocks = self.block_count(rows, chunk)
        before = 0
        for index in range(blocks):
            size = chunk // blocks + (1 if index < chunk % blocks else 0)
            yield size, before
            before += size

    def block_count(self, rows: int, chunk: int) -> int:
        """Blocks that a chunk's queries are taken in."""
        return -(-chunk // (rows * self.block_row_tokens))


def query_tile_tokens(wafer: Wafer) -> int:
    """Queries that a core multiplies at a time."""
    array = wafer.core.compute
    return 1 if isinstance(array, Simd) else array.rows


def attention_cost(
    wafer: Wafer, region: Region, operation: Attention, element_bytes: int, hop_cycles: int
) -> AttentionCost:
    """Parameters of the attention kernels but for how work is shared out: one unit and split.

    In bytes, whatever the region's slowest link, whose hop takes ``hop_cycles``.
    """
    core, array = wafer.core, wafer.core.compute
    granule = 1 if isinstance(array, Simd) else array.columns
    return AttentionCost(
        core_cost(wafer),
        region.rows,
        1,
        1,
        query_tile_tokens(wafer),
        granule,
        granule,
        operation.key_width,
        operation.value_width,
        element_bytes,
        core.step_cycles,
        core.vector_lanes,
        core.vector_issue_millicycles,
        wafer.link.bytes_per_cycle,
        2 * hop_cycles + 2 * wafer.link.ramp_cycles,
        (operation.window or 0) if operation.causal_skip else 0,
        int(operation.causal_skip),
    )


def _ladder(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20 ... up to ``most``: four an octave."""
    value = 1
    while value <= most:
        yield value
        value += max(1, 2 ** (value.bit_length() - 3))


def _shared_out(
    cost: AttentionCost, columns: int, heads: int, units: int, key_tile: int, row_tiles: int
) -> AttentionTiling:
    """Tiles of given sizes, with two key tiles a core: one in use, one arriving."""
    key_bytes = 2 * units * (cost.key_width + cost.value_width) * cost.element_bytes
    state = cost.key_width * cost.element_bytes + (cost.value_width + 2) * FLOAT_BYTES
    return AttentionTiling(
        units,
        units * columns // heads,
        cost.query_tile,
        key_tile,
        cost.key_granule,
        row_tiles * cost.query_tile,
        key_tile * key_bytes,
        units * state + key_tile * FLOAT_BYTES,
    )


@lru_cache(maxsize=256)
def attention_tilings(cost: AttentionCost, columns: int, heads: int) -> tuple[AttentionTiling, ...]:
    """Ways of sharing out an attention, from the one of fewest bytes upwards.

    Nothing here knows how much memory there is: a core with more of it has these to choose from and
    more. More units a column keep more columns busy, larger key tiles save steps, longer query
    blocks save passes; all take memory. Of all tilings those stay that are the best which some
    number of bytes can buy at some number of queries a row, by a rough cost of a pair.
    """
    fewest = -(-heads // columns)
    key_tiles = [cost.key_granule]
    while 2 * key_tiles[-1] <= MOST_KEY_TILE:
        key_tiles.append(2 * key_tiles[-1])
    tilings = [
        _shared_out(cost, columns, heads, units, key_tile, row_tiles)
        for units in range(fewest, fewest + MOST_SPARE_UNITS + 1)
        for key_tile in key_tiles
        for row_tiles in _ladder(-(-max(USUAL_ROW_TOKENS) // cost.query_tile))
    ]
    size = np.array([tiling.bytes for tiling in tilings])
    order = np.lexsort((np.arange(size.size), size))
    tilings, size = [tilings[index] for index in order], size[order]
    steps = np.arange(np.log2(size[0]), np.log2(size[-1]) + 1, 1 / LEVELS_PER_OCTAVE)
    ends = np.unique(np.searchsorted(size, np.exp2(steps), side="right"))
    chosen = {0}
    for row_tokens in USUAL_ROW_TOKENS:
        rough = _cycles_per_pair(cost, tilings, row_tokens)
        chosen |= {int(np.argmin(rough[:end])) for end in ends if end > 0}
    return tuple(tilings[index] for index in sorted(chosen))


def _cycles_per_pair(
    cost: AttentionCost, tilings: Sequence[AttentionTiling], row_tokens: int
) -> npt.NDArray[np.float64]:
    """Cycles (T,) that a column spends on a (query, key) pair of a head at full steps."""
    units, splits, key_tile, held = np.array(
        [(each.units, each.splits, each.key_tile, each.block_row_tokens) for each in tilings]
    ).T
    blocks = -(-row_tokens // held)
    queries = -(-row_tokens // blocks)
    one_unit = entries.steps_cycles(entries.plain(cost), queries, key_tile) - cost.step_cycles
    passes = blocks * (units * one_unit + cost.step_cycles)
    rough: npt.NDArray[np.float64] = passes / (row_tokens * key_tile * splits)
    return rough
