"""Cycles of a matrix product on a grid of cores, by any of the algorithms: the way in."""

from __future__ import annotations

from wafer_kernels.errors import ConfigError, UsageError
from wafer_kernels.gemm_line import allgather_gemm, summa_gemm, transposed_gemm
from wafer_kernels.gemm_shift import shift_gemm
from wafer_kernels.mesh import (
    CANNON,
    COMMON_MULTIPLE,
    MESHGEMM,
    GemmTiming,
    GridCost,
    GridDetail,
    even_detail,
)

__all__ = ["ALGORITHMS", "gemm", "utilization"]

SHIFTS = {"meshgemm": MESHGEMM, "cannon": CANNON, "waferllm-lcm": COMMON_MULTIPLE}
ALGORITHMS = (*SHIFTS, "summa", "allgather", "gemm-t")


def gemm(
    grid: GridCost,
    m: int,
    k: int,
    n: int,
    algorithm: str = "meshgemm",
    *,
    aligned_a: bool = False,
    aligned_b: bool = True,
    detail: GridDetail | None = None,
) -> GemmTiming:
    """Timing of C[m, n] = A[m, k] B[k, n] on a grid of cores, core by core.

    Parameters
    ----------
    grid
        The cores and links that are alike.
    m, k, n
        Sizes [elements].
    algorithm
        One of `ALGORITHMS`; ``gemm-t`` takes B as [n, k] and multiplies by its transpose.
    aligned_a, aligned_b
        The operand is stored as the algorithm needs it (skewed, or gathered for ``allgather``).
        SUMMA and gemm-t need nothing of the kind.
    detail
        Slow cores and links; by default all are alike.

    Raises
    ------
    UsageError
        A size is below one, there are more than 2^50 MACs, or the algorithm is unknown.
    ConfigError
        The grid is empty, a cost is negative, or `detail` has other shapes than the grid.
    """
    if algorithm not in ALGORITHMS:
        names = ", ".join(ALGORITHMS)
        raise UsageError(f"algorithm {algorithm!r} is unknown; choose one of {names}")
    if min(m, k, n) < 1 or m * k * n > 2**50:
        raise UsageError(f"a product needs sizes >= 1 and at most 2^50 MACs, got {m} x {k} x {n}")
    _require_grid(grid)
    if detail is None:
        detail = even_detail(grid)
    _require_shapes(grid, detail)
    if algorithm == "summa":
        return summa_gemm(grid, detail, m, k, n)
    if algorithm == "allgather":
        return allgather_gemm(grid, detail, m, k, n, aligned_b=aligned_b)
    if algorithm == "gemm-t":
        return transposed_gemm(grid, detail, m, k, n)
    kind = SHIFTS[algorithm]
    return shift_gemm(grid, detail, m, k, n, kind, aligned_a=aligned_a, aligned_b=aligned_b)


def utilization(grid: GridCost, timing: GemmTiming, peak_macs_per_cycle: int) -> float:
    """Useful MACs over what all cores of the grid could have done in the makespan."""
    peak = grid.rows * grid.columns * peak_macs_per_cycle * timing.cycles
    return timing.useful_macs / peak


def _require_grid(grid: GridCost) -> None:
    if min(grid.rows, grid.columns, grid.element_bytes) < 1:
        raise ConfigError(
            f"a grid of {grid.rows} x {grid.columns} cores with elements of {grid.element_bytes} "
            "bytes needs sizes of at least 1"
        )
    for name in ("step_cycles", "link_bytes_per_cycle", "hop_cycles", "ramp_cycles", "routes"):
        if getattr(grid, name) < 0:
            raise ConfigError(f"{name} of a grid must be >= 0, got {getattr(grid, name)}")


def _require_shapes(grid: GridCost, detail: GridDetail) -> None:
    shapes = {
        "core_extra_cycles": (grid.rows, grid.columns),
        "x_link_bytes_per_cycle": (grid.columns - 1,),
        "x_link_extra_cycles": (grid.columns - 1,),
        "y_link_bytes_per_cycle": (grid.rows - 1,),
        "y_link_extra_cycles": (grid.rows - 1,),
    }
    for name, shape in shapes.items():
        values = getattr(detail, name)
        if values.shape != shape or values.min(initial=0) < 0:
            raise ConfigError(f"{name} must be (shape {shape}) and >= 0, has shape {values.shape}")
