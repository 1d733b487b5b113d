"""Cycles of one tile product, C[m, n] += A[m, k] B[k, n], on one core.

A core computes with a systolic array or with SIMD lanes; its SRAM bandwidth bounds a tile when the
operands cannot be read, or the results written, as fast as the array works. Cycles are durations,
never the index of the last cycle.
"""

from __future__ import annotations

from typing import NamedTuple

from wafer_kernels._jit import kernel
from wafer_kernels.errors import ConfigError, UsageError

__all__ = [
    "DATAFLOWS",
    "INPUT_STATIONARY",
    "OUTPUT_STATIONARY",
    "SIMD",
    "SYSTOLIC",
    "WEIGHT_STATIONARY",
    "CoreCost",
    "TileTiming",
    "ceil_div",
    "simd_core",
    "systolic_core",
    "tile",
    "tile_cycles",
    "vector_cycles",
]

SYSTOLIC, SIMD = 0, 1
OUTPUT_STATIONARY, WEIGHT_STATIONARY, INPUT_STATIONARY = 0, 1, 2
DATAFLOWS = {"os": OUTPUT_STATIONARY, "ws": WEIGHT_STATIONARY, "is": INPUT_STATIONARY}


class CoreCost(NamedTuple):
    """What the timing of a core depends on; build it with `systolic_core` or `simd_core`."""

    kind: int  # SYSTOLIC or SIMD
    rows: int  # of the array
    columns: int  # of the array
    depth: int  # MACs in series per cell of the array: k folds by it
    dataflow: int  # which operand stays in the array
    explicit_drain: int  # 1: an output-stationary fold ends with a drain of `rows` cycles
    lanes: int  # of vector instructions: MACs of a SIMD core, adds of any; 0: adds take no time
    issue_millicycles: int  # start-up of one vector instruction, in 1/1000 cycle
    vector_axis: int  # 0: vectors lie along m, 1: along n
    read_bytes_per_cycle: int  # of the SRAM; 0 is unbounded
    write_bytes_per_cycle: int  # of the SRAM; 0 is unbounded


class TileTiming(NamedTuple):
    """Duration of one tile product and what it is made of."""

    cycles: int  # max(compute, read, write)
    compute_cycles: int
    read_cycles: int
    write_cycles: int
    useful_macs: int
    padded_macs: int  # cells or lanes occupied, the idle ones included
    utilization: float  # useful MACs / (peak MACs per cycle * cycles)
    folds: int  # passes of the array, or vector instructions


def systolic_core(
    rows: int,
    columns: int,
    dataflow: str = "os",
    *,
    depth: int = 1,
    explicit_drain: bool = False,
    lanes: int = 0,
    issue_millicycles: int = 0,
    read_bytes_per_cycle: int = 0,
    write_bytes_per_cycle: int = 0,
) -> CoreCost:
    """Cost of a core with a ``rows x columns`` systolic array of cells with `depth` MACs in series.

    Its vector unit, if it has `lanes`, adds partial sums that come from other cores.

    Raises
    ------
    ConfigError
        A size is below one, a rate below zero, or the dataflow is not os, ws or is.
    """
    if dataflow not in DATAFLOWS:
        raise ConfigError(f"dataflow {dataflow!r} is unknown; choose one of os, ws, is")
    if min(rows, columns, depth) < 1 or min(lanes, issue_millicycles) < 0:
        raise ConfigError(
            f"an array needs rows, columns and depth >= 1 (got {rows}, {columns}, {depth}), "
            f"lanes and issue_millicycles >= 0 (got {lanes}, {issue_millicycles})"
        )
    _require_rates(read_bytes_per_cycle, write_bytes_per_cycle)
    return CoreCost(
        kind=SYSTOLIC,
        rows=rows,
        columns=columns,
        depth=depth,
        dataflow=DATAFLOWS[dataflow],
        explicit_drain=int(explicit_drain),
        lanes=lanes,
        issue_millicycles=issue_millicycles,
        vector_axis=0,
        read_bytes_per_cycle=read_bytes_per_cycle,
        write_bytes_per_cycle=write_bytes_per_cycle,
    )


def simd_core(
    lanes: int,
    issue_millicycles: int = 0,
    *,
    vector_axis: int = 0,
    read_bytes_per_cycle: int = 0,
    write_bytes_per_cycle: int = 0,
) -> CoreCost:
    """Cost of a core with `lanes` MACs per cycle and a start-up cost per vector instruction.

    Raises
    ------
    ConfigError
        There is no lane, a cost or rate is below zero, or the vector axis is neither 0 nor 1.
    """
    if lanes < 1 or issue_millicycles < 0 or vector_axis not in (0, 1):
        raise ConfigError(
            f"a SIMD core needs lanes >= 1 (got {lanes}), issue_millicycles >= 0 "
            f"(got {issue_millicycles}) and a vector_axis of 0 or 1 (got {vector_axis})"
        )
    _require_rates(read_bytes_per_cycle, write_bytes_per_cycle)
    return CoreCost(
        kind=SIMD,
        rows=0,
        columns=0,
        depth=0,
        dataflow=0,
        explicit_drain=0,
        lanes=lanes,
        issue_millicycles=issue_millicycles,
        vector_axis=vector_axis,
        read_bytes_per_cycle=read_bytes_per_cycle,
        write_bytes_per_cycle=write_bytes_per_cycle,
    )


def _require_rates(read_bytes_per_cycle: int, write_bytes_per_cycle: int) -> None:
    if min(read_bytes_per_cycle, write_bytes_per_cycle) < 0:
        raise ConfigError("SRAM rates are bytes per cycle >= 0, where 0 stands for unbounded")


@kernel()
def ceil_div(a: int, b: int) -> int:
    """Least integer >= a / b, for a >= 0 and b > 0."""
    return (a + b - 1) // b


@kernel()
def transfer_cycles(moved_bytes: int, bytes_per_cycle: int) -> int:
    """Cycles that a port or link is busy with `moved_bytes`; a rate of 0 is unbounded."""
    return ceil_div(moved_bytes, bytes_per_cycle) if bytes_per_cycle > 0 else 0


@kernel()
def vector_cycles(lanes: int, issue_millicycles: int, elements: int, operations: int) -> int:
    """Cycles of `operations` vector instructions on `elements` elements each."""
    if elements == 0:
        return 0
    return operations * ceil_div(elements, lanes) + ceil_div(operations * issue_millicycles, 1000)


@kernel()
def vector_calls(core: CoreCost, m: int, k: int, n: int) -> tuple[int, int]:
    """Length and number of the vector multiply-adds of one tile product on a SIMD core."""
    if core.vector_axis == 0:
        return m, k * n
    return n, k * m


@kernel()
def fold_shape(core: CoreCost, m: int, k: int, n: int) -> tuple[int, int, int]:
    """Folds over the rows and over the columns of the array, and the T that streams through it."""
    deep_k = ceil_div(k, core.depth)
    if core.dataflow == OUTPUT_STATIONARY:
        return ceil_div(m, core.rows), ceil_div(n, core.columns), deep_k
    if core.dataflow == WEIGHT_STATIONARY:
        return ceil_div(deep_k, core.rows), ceil_div(n, core.columns), m
    return ceil_div(deep_k, core.rows), ceil_div(m, core.columns), n


@kernel()
def compute_cycles(core: CoreCost, m: int, k: int, n: int) -> int:
    """Cycles of the array or of the lanes alone, with an SRAM of unbounded bandwidth."""
    if core.kind == SIMD:
        length, calls = vector_calls(core, m, k, n)
        return vector_cycles(core.lanes, core.issue_millicycles, length, calls)
    row_folds, column_folds, streamed = fold_shape(core, m, k, n)
    fold = streamed + core.rows + core.columns - 2
    if core.dataflow != OUTPUT_STATIONARY or core.explicit_drain == 1:
        fold += core.rows  # the stationary operand is loaded, or the result drained, row by row
    return row_folds * column_folds * fold


@kernel()
def sram_elements(core: CoreCost, m: int, k: int, n: int) -> tuple[int, int]:
    """Elements that one tile product reads from and writes to the SRAM."""
    if core.kind == SIMD:  # each call reads a scalar, a vector of operands, a vector of results
        length, calls = vector_calls(core, m, k, n)
        return calls * (2 * length + 1), calls * length
    row_folds, column_folds, _ = fold_shape(core, m, k, n)
    if core.dataflow == OUTPUT_STATIONARY:
        return m * k * column_folds + k * n * row_folds, m * n
    if core.dataflow == WEIGHT_STATIONARY:
        return m * k * column_folds + k * n, m * n * row_folds
    return m * k + k * n * column_folds, m * n * row_folds


@kernel()
def tile_cycles(core: CoreCost, m: int, k: int, n: int, element_bytes: int) -> int:
    """Cycles of C[m, n] += A[m, k] B[k, n] on one core; 0 for an empty product."""
    if m == 0 or k == 0 or n == 0:
        return 0
    reads, writes = sram_elements(core, m, k, n)
    return max(
        compute_cycles(core, m, k, n),
        transfer_cycles(reads * element_bytes, core.read_bytes_per_cycle),
        transfer_cycles(writes * element_bytes, core.write_bytes_per_cycle),
    )


@kernel()
def padded_macs(core: CoreCost, m: int, k: int, n: int) -> int:
    """MACs of the cells or lanes that the product occupies, the idle ones included."""
    if core.kind == SIMD:
        length, calls = vector_calls(core, m, k, n)
        return calls * ceil_div(length, core.lanes) * core.lanes
    row_folds, column_folds, streamed = fold_shape(core, m, k, n)
    return row_folds * column_folds * core.rows * core.columns * core.depth * streamed


def peak_macs_per_cycle(core: CoreCost) -> int:
    """MACs per cycle of a core that never waits."""
    return core.lanes if core.kind == SIMD else core.rows * core.columns * core.depth


def tile(core: CoreCost, m: int, k: int, n: int, element_bytes: int) -> TileTiming:
    """Duration of one tile product, with the parts that it is made of.

    Parameters
    ----------
    core
        The core's array or lanes and its SRAM rates.
    m, k, n
        Sizes of C[m, n] = A[m, k] B[k, n] [elements].
    element_bytes
        Width of an element [byte].

    Raises
    ------
    UsageError
        A size is below one, or the product has more MACs (2^50) than int64 cycles can count.

    Notes
    -----
    Sources: the SCALE-Sim v3 code for folds and SRAM counts (its cycle counts are one lower: the
    index of the last cycle); A. Samajdar et al., arXiv 1811.02883, for the explicit drain.
    """
    if min(m, k, n, element_bytes) < 1:
        raise UsageError(f"a tile product needs sizes of at least 1, got m={m}, k={k}, n={n}")
    if m * k * n > 2**50:
        raise UsageError(f"a tile product of {m} x {k} x {n} has more than 2^50 MACs")
    reads, writes = sram_elements(core, m, k, n)
    cycles = tile_cycles(core, m, k, n, element_bytes)
    if core.kind == SIMD:
        _, folds = vector_calls(core, m, k, n)
    else:
        row_folds, column_folds, _ = fold_shape(core, m, k, n)
        folds = row_folds * column_folds
    return TileTiming(
        cycles=cycles,
        compute_cycles=compute_cycles(core, m, k, n),
        read_cycles=transfer_cycles(reads * element_bytes, core.read_bytes_per_cycle),
        write_cycles=transfer_cycles(writes * element_bytes, core.write_bytes_per_cycle),
        useful_macs=m * k * n,
        padded_macs=padded_macs(core, m, k, n),
        utilization=m * k * n / (peak_macs_per_cycle(core) * cycles),
        folds=folds,
    )
