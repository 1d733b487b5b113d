"""Products of a stage: by shifts of both operands, or row by row with weights that stay."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wafer_emu.arena import storage_kind
from wafer_emu.dealing import groups_on_core
from wafer_emu.layout import Rows, element_bytes, no_matrix
from wafer_emu.program import Experts, Norm, Product
from wafer_emu.stage_tensors import Job, StageTensors
from wafer_emu.threads import share_out
from wafer_emu.tiling import FLOAT_BYTES
from wafer_kernels.region import Kind, Matrix
from wafer_kernels.region_product import compute_shift, row_vectors
from wafer_kernels.region_vector import norm as norm_rows

__all__ = ["answer", "multiply", "norm", "norm_bytes", "product", "product_bytes"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
LATENT_NORM_EPSILON = 1e-6  # of MLA's two latent norms, whatever the config says (DeepSeek-V3 code)


def arriving_bytes(here: StageTensors, operation: Product | Experts) -> Int64:
    """Bytes of the buffers for arriving slices of A and of B on every core (2, core)."""
    region = here.layout.region
    element = element_bytes(here.kind)
    depth = -(-operation.source.columns // max(region.rows, region.columns))
    rows = here.layout.rows(operation.most_rows).sizes * depth * element
    columns = here.layout.column_sizes(operation.target.columns) * depth
    columns = columns * element_bytes(storage_kind(here.clock.weights_dtype))
    return np.stack([np.repeat(rows, region.columns), np.tile(columns, region.rows)])


def product_bytes(here: StageTensors, operation: Product | Experts) -> tuple[Int64, Int64 | int]:
    """Bytes of a product's buffers, and of its sums beside the target, on every core (core,).

    Buffers of arriving slices, then an expert's sums; or the sums of a row vector's product.
    """
    alone, element = isinstance(operation, Product), element_bytes(here.kind)
    rows, width = here.layout.rows(operation.most_rows), operation.target.columns
    sums = here.layout.size(rows, width, FLOAT_BYTES - element if alone else FLOAT_BYTES)
    together = arriving_bytes(here, operation).sum(axis=0) + sums
    together = np.maximum(together, _row_sums(here, width))
    if isinstance(operation, Product):
        m, n, k = operation.shape
        if not here.clock.weights_stay(m, k, n):
            return together - sums, sums
    return together, 0


def norm_bytes(here: StageTensors, operation: Norm) -> Int64:
    """Bytes of a norm's sums of squares on every core (core,)."""
    rows = here.layout.rows(operation.source.rows).sizes
    return np.multiply.outer(rows, _kept_sums(here, operation)).ravel() * FLOAT_BYTES


def _kept_sums(here: StageTensors, operation: Norm) -> Int64:
    """Sums of squares that a core of each column keeps for a row (column of cores,)."""
    columns = operation.source.columns
    return groups_on_core(here.layout.column_sizes(columns), operation.groups, columns)


def norm(
    here: StageTensors, operation: Norm, source: Matrix, target: Matrix, job: Job, work: Int64
) -> None:
    """Carry out a norm, with its sums of squares at ``work`` (core,)."""
    latent = operation.weight.endswith("_a_layernorm.weight")
    norm_rows(
        here.arena.bytes, here.layout.grid, source, target,
        here.weight(operation.weight, job.layer), operation.groups, operation.width,
        LATENT_NORM_EPSILON if latent else here.model.norm_epsilon, work,
        _kept_sums(here, operation),
    )  # fmt: skip


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
        products = _row_vectors(here, source, source_rows, weight, bias, work)
        rows = target._replace(line=target.line[target_rows], place=target.place[target_rows])
        if shares.size:
            products = here.read(rows) + shares[:, np.newaxis] * products
        here.write(rows, products)
        return
    arriving_a, arriving_b = arriving_bytes(here, operation)
    sums = target.address if isinstance(operation, Product) else work + arriving_a + arriving_b
    share_out(
        compute_shift, here.layout.region.cores, source_rows.size * inner * width,
        here.arena.bytes, here.layout.grid, source, source_rows, weight, target, target_rows,
        bias, shares, work, work + arriving_a, sums,
    )  # fmt: skip


def _row_vectors(
    here: StageTensors, source: Matrix, rows: Int64, weight: Matrix, bias: Matrix, work: Int64
) -> Float32:
    """Products (row, width), each as it lies in float32 at ``work`` of the last row of cores."""
    products = np.empty((rows.size, int(weight.bounds[-1])), np.float32)
    share_out(
        row_vectors, here.layout.region.columns, products.size * weight.line.size,
        products, here.arena.bytes, here.layout.grid, source, rows, weight, bias,
    )  # fmt: skip
    last = Rows(here.layout.grid.row_place[-1:], np.zeros(1, np.int64), np.zeros(0, np.int64))
    sums = here.layout.matrix(Kind.FLOAT32, last, products.shape[1], work)
    for row in products:
        here.write(sums, row[np.newaxis])
        row[:] = here.read(sums)[0]
    return products


def answer(here: StageTensors, last: Norm, head: Product, job: Job) -> tuple[Float32, Float32]:
    """Final norm and head of a tile's last token, or of all its tokens: (token, width) each.

    Where all are asked for, row after row passes through the one row of logits that the memory
    has room for, and leaves for the host.
    """
    tile, width = last.source.rows, head.target.columns
    hidden = here.allocate("hidden", here.layout.rows(tile), last.source.columns, job.cycle)
    work = here.area.allocate("working buffers", norm_bytes(here, last), job.cycle)
    norm(here, last, job.stream, hidden, job, work)
    here.area.free("working buffers")
    one = here.allocate("logits", here.layout.rows(1), width, job.cycle)
    work = here.area.allocate("working buffers", _row_sums(here, width), job.cycle)
    rows = np.arange(tile - 1 if head.last_row else 0, tile)
    table = here.weight(head.weight, job.layer)
    logits = _row_vectors(here, hidden, rows, table, no_matrix(), work)
    for row in logits:
        here.write(one, row[np.newaxis])
        row[:] = here.read(one)[0]
    values = here.read(hidden)[rows]
    for name in ("working buffers", "logits", "hidden"):
        here.area.free(name)
    return values, logits


def _row_sums(here: StageTensors, columns: int) -> Int64:
    """Bytes of a row vector's sums on every core (core,)."""
    return np.tile(here.layout.column_sizes(columns) * FLOAT_BYTES, here.layout.region.rows)
