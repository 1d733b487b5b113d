"""How a region shares out an attention: heads and key splits to columns, tiles, query blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from wafer_emu.placement import Region
from wafer_emu.program import Attention
from wafer_emu.wafer import Simd, Wafer
from wafer_kernels import systolic
from wafer_kernels.systolic import CoreCost, tile_cycles

__all__ = ["AttentionTiling", "core_cost", "plan_attention"]

FLOAT_BYTES = 4  # partial sums and softmax statistics
MOST_KEY_TILE = 64  # longer tiles save little and cost memory (assumed)
MOST_SPARE_UNITS = 3  # units a column beyond the fewest that are tried
USUAL_ROW_TOKENS = 16  # queries of a row at which tilings are compared


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

    def held_queries(self, rows: int, chunk: int) -> int:
        """Query tokens that memory is laid out for: never fewer for a longer chunk."""
        return min(chunk, rows * self.block_row_tokens)

    def query_blocks(self, rows: int, chunk: int) -> Iterator[tuple[int, int]]:
        """(tokens, tokens before) of the even blocks that a chunk's queries are taken in."""
        blocks = -(-chunk // (rows * self.block_row_tokens))
        before = 0
        for index in range(blocks):
            size = chunk // blocks + (1 if index < chunk % blocks else 0)
            yield size, before
            before += size


def _shared_out(
    wafer: Wafer,
    region: Region,
    operation: Attention,
    element_bytes: int,
    budget_bytes: int,
    units: int,
) -> AttentionTiling:
    """Tiles for ``units`` units a column within a budget."""
    splits = units * region.columns // operation.heads
    array = wafer.core.compute
    query_tile = 1 if isinstance(array, Simd) else array.rows
    granule = 1 if isinstance(array, Simd) else array.columns
    key_bytes = 2 * units * (operation.key_width + operation.value_width) * element_bytes
    key_tile = granule
    while 2 * key_tile <= MOST_KEY_TILE and 2 * key_tile * key_bytes <= budget_bytes // 4:
        key_tile *= 2
    query_bytes = (
        units * (operation.key_width * element_bytes + (operation.value_width + 2) * FLOAT_BYTES)
        + key_tile * FLOAT_BYTES
    )
    fitting = max(0, budget_bytes - key_tile * key_bytes) // query_bytes
    row_tokens = max(1, fitting // query_tile) * query_tile
    return AttentionTiling(
        units, splits, query_tile, key_tile, granule, row_tokens, key_tile * key_bytes, query_bytes
    )


def _cycles_per_score(wafer: Wafer, operation: Attention, tiling: AttentionTiling) -> float:
    """Cycles that a column spends on a (query, key) pair of a head, at a full step."""
    core = core_cost(wafer)
    queries = min(tiling.block_row_tokens, USUAL_ROW_TOKENS)
    keys = tiling.key_tile
    products = tile_cycles(core, queries, operation.key_width, keys, 0) + tile_cycles(
        core, queries, keys, operation.value_width, 0
    )
    step = tiling.units * products + wafer.core.step_cycles
    return step / (queries * keys * tiling.splits)


def plan_attention(
    wafer: Wafer, region: Region, operation: Attention, element_bytes: int, budget_bytes: int
) -> AttentionTiling:
    """Choose units and tiles so that attention's working set stays within a budget a core [byte].

    Two key tiles (one in use, one arriving) take at most a quarter; then as many query tokens as
    fit, each with its query, accumulator, softmax statistics and scores. One query tile and one key
    granule are the least; the ledger then tells if they do not fit. More units a column keep more
    columns busy but need more memory: of the numbers whose least fits, the one with the fewest
    cycles per score is taken, or else the smallest.
    """
    fewest = -(-operation.heads // region.columns)
    plans = [
        _shared_out(wafer, region, operation, element_bytes, budget_bytes, units)
        for units in range(fewest, fewest + MOST_SPARE_UNITS + 1)
    ]
    fitting = [plan for plan in plans if plan.bytes <= budget_bytes]
    return min(fitting or plans[:1], key=lambda plan: _cycles_per_score(wafer, operation, plan))
