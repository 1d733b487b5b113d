"""The operations of a tile program, carried out on real tensors of one stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wafer_emu.program import (
    Add,
    Append,
    Attention,
    Experts,
    Gate,
    Norm,
    Operation,
    Product,
    Rotary,
    Route,
    Tensor,
)
from wafer_emu.rotary import rotary_tables
from wafer_emu.stage_attention import attend, attention_bytes, write_tile
from wafer_emu.stage_experts import Routes, experts, route
from wafer_emu.stage_products import norm, norm_bytes, product, product_bytes
from wafer_emu.stage_tensors import Job, StageTensors
from wafer_kernels import region_vector
from wafer_kernels.numeric import Activation
from wafer_kernels.region import Matrix

__all__ = ["run"]

Int64 = npt.NDArray[np.int64]
ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
}


def run(here: StageTensors, operations: Sequence[Operation], job: Job) -> Int64 | None:
    """Carry out operations in order; a tensor lives from the first to the last that names it.

    Returns
    -------
    array or None
        Experts of each token (token, choice), if the layer has experts.
    """
    spans: dict[Tensor, tuple[int, int]] = {}
    for index, operation in enumerate(operations):
        for tensor in operation.tensors():
            spans[tensor] = (spans.get(tensor, (index, index))[0], index)
    routes: Routes | None = None
    for index, operation in enumerate(operations):
        working, beside = _working_bytes(here, operation)
        for tensor, (first, _) in spans.items():
            if first == index:
                here.held[tensor] = _born(here, tensor, job, beside)
        work = here.area.allocate("working buffers", working, job.cycle)
        if isinstance(operation, Route):
            routes = route(here, operation, job)
        elif isinstance(operation, Experts):
            assert routes is not None
            experts(here, operation, routes, job, work)
        else:
            _carry_out(here, operation, job, work)
        here.area.free("working buffers")
        if isinstance(operation, Product):
            target = operation.target
            here.shrink(target.name, here.layout.rows(target.rows), target.columns)
        for tensor, (_, last) in spans.items():
            if last == index:
                del here.held[tensor]
                if tensor.name != "stream":
                    here.area.free(tensor.name)
    return None if routes is None else routes.chosen


def _born(here: StageTensors, tensor: Tensor, job: Job, beside: Int64 | int) -> Matrix:
    """Memory of a tensor; the residual stream has its own since the task started."""
    if tensor.name == "stream":
        return job.stream
    rows = here.layout.rows(tensor.rows)
    return here.allocate(tensor.name, rows, tensor.columns, job.cycle, beside)


def _working_bytes(here: StageTensors, operation: Operation) -> tuple[Int64, Int64 | int]:
    """Bytes of an operation's own buffers on every core (core,), and beside what it brings forth.

    A product brings forth its target alone, whose bytes and those beside it hold the sums.
    """
    match operation:
        case Product() | Experts():
            return product_bytes(here, operation)
        case Attention():
            return attention_bytes(here, operation), 0
        case Norm():
            return norm_bytes(here, operation), 0
    return np.zeros(here.layout.region.cores, np.int64), 0


def _carry_out(here: StageTensors, operation: Operation, job: Job, work: Int64) -> None:
    arena, grid, held = here.arena.bytes, here.layout.grid, here.held
    match operation:
        case Norm(source=source, target=target):
            norm(here, operation, held[source], held[target], job, work)
        case Product():
            product(here, operation, job, work)
        case Rotary(target=target):
            positions = operation.first_position + np.arange(target.rows)
            cosine, sine = rotary_tables(here.model, positions)
            interleaved = here.model.rope.interleaved
            region_vector.rotate(
                arena, grid, held[target], operation.heads, cosine, sine, interleaved
            )
        case Append():
            write_tile(here, operation, job)
        case Attention():
            attend(here, operation, job, work)
        case Gate(gate=gate, up=up, target=target):
            activation = int(ACTIVATIONS[operation.activation])
            region_vector.gate(arena, grid, held[gate], held[up], held[target], activation)
        case Add(source=source, target=target):
            region_vector.add(arena, grid, held[source], held[target])
        case _:
            raise TypeError(f"no numbers for {operation}")
