"""Products of a stage: by shifts of both operands, or row by row with weights that stay."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wafer_emu.arena import storage_kind
from wafer_emu.layout import element_bytes, no_matrix
from wafer_emu.program import Experts, Norm, Product
from wafer_emu.stage_tensors import Job, StageTensors
from wafer_emu.threads import share_out
from wafer_emu.tiling import FLOAT_BYTES
from wafer_kernels.region import Matrix
from wafer_kernels.region_product import compute_shift, row_vectors
from wafer_kernels.region_vector import norm as norm_rows

__all__ = ["answer", "arriving_bytes", "multiply", "product"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


def arriving_bytes(here: StageTensors, operation: Product | Experts) -> Int64:
    """Bytes of the buffers for arriving slices of A and of B on every core (2, core)."""
    region = here.layout.region
    element = element_bytes(here.kind)
    depth = -(-operation.source.columns // max(region.rows, region.columns))
    rows = here.layout.rows(operation.target.rows).sizes * depth * element
    columns = here.layout.column_sizes(operation.target.columns) * depth
    columns = columns * element_bytes(storage_kind(here.clock.weights_dtype))
    return np.stack([np.repeat(rows, region.columns), np.tile(columns, region.rows)])


def product(here: StageTensors, operation: Product, job: Job, work: Int64) -> None:
    """``target = source W^T (+ bias)``, with buffers at ``work`` (core,)."""
    source, target = here.held[operation.source], here.held[operation.target]
    bias = no_matrix() if operation.bias is None else here.weight(operation.bias, job.layer)
    rows = np.arange(operation.target.rows)
    multiply(
        here, operation, source, rows, here.weight(operation.weight, job.layer), target, rows, bias,
        np.zeros(0, np.float32), work,
    )  # fmt: skip


def multiply(
    here: StageTensors,
    operation: Product | Experts,
    source: Matrix,
    source_rows: Int64,
    weight: Matrix,
    target: Matrix,
    target_rows: Int64,
    bias: Matrix,
    shares: Float32,
    work: Int64,
) -> None:
    """Multiply rows as the clock says: by shifts, or row by row with weights that stay."""
    inner, width = weight.line.size, int(weight.bounds[-1])
    if here.clock.weights_stay(source_rows.size, inner, width):
        products = _row_vectors(here, source, source_rows, weight, bias)
        rows = target._replace(line=target.line[target_rows], place=target.place[target_rows])
        if shares.size:
            products = here.read(rows) + shares[:, np.newaxis] * products
        here.write(rows, products)
        return
    arriving_a, _ = arriving_bytes(here, operation)
    share_out(
        compute_shift, here.layout.region.cores, source_rows.size * inner * width,
        here.arena.bytes, here.layout.grid, source, source_rows, weight, target, target_rows,
        bias, shares, work, work + arriving_a,
    )  # fmt: skip


def _row_vectors(
    here: StageTensors, source: Matrix, rows: Int64, weight: Matrix, bias: Matrix
) -> Float32:
    products = np.empty((rows.size, int(weight.bounds[-1])), np.float32)
    share_out(
        row_vectors, here.layout.region.columns, products.size * weight.line.size,
        products, here.arena.bytes, here.layout.grid, source, rows, weight, bias,
    )  # fmt: skip
    return products


def answer(here: StageTensors, norm: Norm, head: Product, job: Job) -> tuple[Float32, Float32]:
    """Final norm and head of a tile's last token, or of all its tokens: (token, width) each.

    Where all are asked for, row after row passes through the one row of logits that the memory
    has room for, and leaves for the host.
    """
    tile, width = norm.source.rows, head.target.columns
    hidden = here.allocate("hidden", here.layout.rows(tile), norm.source.columns, job.cycle)
    norm_rows(
        here.arena.bytes, here.layout.grid, job.stream, hidden,
        here.weight(norm.weight, job.layer), 1, norm.width, here.model.norm_epsilon,
    )  # fmt: skip
    one = here.allocate("logits", here.layout.rows(1), width, job.cycle)
    here.area.allocate("working buffers", _partial_sums(here, width), job.cycle)
    rows = np.arange(tile - 1 if head.last_row else 0, tile)
    logits = _row_vectors(here, hidden, rows, here.weight(head.weight, job.layer), no_matrix())
    for row in logits:
        here.write(one, row[np.newaxis])
        row[:] = here.read(one)[0]
    values = here.read(hidden)[rows]
    for name in ("working buffers", "logits", "hidden"):
        here.area.free(name)
    return values, logits


def _partial_sums(here: StageTensors, columns: int) -> Int64:
    """Bytes of a row vector's sums on every core (core,)."""
    return np.tile(here.layout.column_sizes(columns) * FLOAT_BYTES, here.layout.region.rows)
