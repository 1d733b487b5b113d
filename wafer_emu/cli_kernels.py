"""Commands that time one thing: a matrix product on a core or a grid of cores, a collective."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from wafer_emu import quantities
from wafer_emu.cli_options import Output
from wafer_emu.cli_values import Bytes, Count, Dtype, Grid, Name, Natural, Switch
from wafer_emu.terminal import Answer, Ui
from wafer_kernels.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wafer_emu.wafer import Wafer
    from wafer_kernels.mesh import GridCost, GridDetail
    from wafer_kernels.systolic import CoreCost

__all__ = ["collective", "gemm", "tile"]

Terminal = Annotated[Ui, Parameter(parse=False)]
M = Annotated[Count, Parameter(name="-m")]
N = Annotated[Count, Parameter(name="-n")]
K = Annotated[Count, Parameter(name="-k")]


def tile(
    output: Output | None = None,
    *,
    m: M,
    n: N,
    k: K,
    array: Grid | None = None,
    dataflow: Literal["os", "ws", "is"] = "os",
    drain: Literal["overlapped", "explicit"] = "overlapped",
    depth: Count = 1,
    read_bytes_per_cycle: Natural = 0,
    write_bytes_per_cycle: Natural = 0,
    wafer: Name | None = None,
    dtype: Dtype = "bfloat16",
    ui: Terminal,
) -> Answer:
    """Time C[m, n] = A[m, k] B[k, n] on one core.

    Parameters
    ----------
    m
        Rows of A and C.
    n
        Columns of B and C.
    k
        Columns of A, rows of B.
    array
        Systolic array, ROWSxCOLUMNS.
    dataflow
        What stays in the array: output, weight or input stationary.
    drain
        Whether an output-stationary result leaves beside the next fold or after its own.
    depth
        Multiply-accumulates in series per cell.
    read_bytes_per_cycle
        What the SRAM delivers; 0: no bound.
    write_bytes_per_cycle
        What the SRAM takes; 0: no bound.
    wafer
        Take the core of this wafer instead of --array and what belongs to it.
    dtype
        Type of the elements.
    """
    from wafer_emu.model import dtype_bytes
    from wafer_kernels.systolic import systolic_core
    from wafer_kernels.systolic import tile as time_tile

    if (array is None) == (wafer is None):
        raise UsageError("tile needs the core: either --array ROWSxCOLUMNS or --wafer NAME")
    core: CoreCost
    if array is not None:
        core = systolic_core(
            *array,
            dataflow,
            depth=depth,
            explicit_drain=drain == "explicit",
            read_bytes_per_cycle=read_bytes_per_cycle,
            write_bytes_per_cycle=write_bytes_per_cycle,
        )
    else:
        from wafer_emu.tiling import core_cost
        from wafer_emu.wafer import Wafer

        assert wafer is not None
        core = core_cost(Wafer.load(wafer))
    timing = time_tile(core, m, k, n, dtype_bytes(dtype))._asdict()
    result = {"cycles": timing.pop("cycles"), "macs": timing.pop("useful_macs"), **timing}
    title = f"C[{m:,}, {n:,}] = A[{m:,}, {k:,}] B[{k:,}, {n:,}] on one core"
    return Answer(result, lambda: _report(title, result))


def gemm(
    output: Output | None = None,
    *,
    m: M,
    n: N,
    k: K,
    wafer: Name,
    grid: Grid,
    algorithm: Name = "meshgemm",
    dtype: Dtype = "bfloat16",
    align_a: Switch = False,
    align_b: Switch = False,
    ui: Terminal,
) -> Answer:
    """Time C[m, n] = A[m, k] B[k, n] on a grid of cores at the wafer's corner.

    Parameters
    ----------
    m
        Rows of A and C.
    n
        Columns of B and C.
    k
        Columns of A, rows of B.
    wafer
        Name of a preset (show wafers), or FILE.toml.
    grid
        Cores, ROWSxCOLUMNS.
    algorithm
        meshgemm, cannon, summa, allgather, gemm-t (B is [n, k]) or waferllm-lcm.
    dtype
        Type of the elements.
    align_a
        A is not stored as the algorithm needs it: charge its alignment.
    align_b
        The same for B.
    """
    ui.progress(f"{algorithm} on {grid[0]}x{grid[1]} cores", 0.0)

    from wafer_emu.model import dtype_bytes
    from wafer_emu.wafer import Wafer
    from wafer_kernels.gemm import gemm as time_gemm
    from wafer_kernels.gemm import utilization
    from wafer_kernels.systolic import peak_macs_per_cycle

    fabric = Wafer.load(wafer)
    cost, detail, shares = _grid(fabric, grid, dtype_bytes(dtype))
    timing = time_gemm(
        cost, m, k, n, algorithm, aligned_a=not align_a, aligned_b=not align_b, detail=detail
    )
    result = {
        "cycles": timing.cycles,
        "seconds": timing.cycles / fabric.core.clock_hz,
        "macs": timing.useful_macs,
        "padded_macs": timing.padded_macs,
        "utilization": utilization(cost, timing, peak_macs_per_cycle(cost.core)),
        "steps": timing.steps,
        "alignment_cycles": timing.alignment_cycles,
        "first_start_cycle": int(timing.start_cycles.min()),
        "first_finish_cycle": int(timing.finish_cycles.min()),
        "busiest_core_cycles": int(timing.busy_cycles.max()),
        "mean_busy_cycles": float(timing.busy_cycles.mean()),
        "longest_stall_cycles": int(timing.stall_cycles.max()),
        "noc_byte_hops": timing.byte_hops // shares,
    }
    title = (
        f"C[{m:,}, {n:,}] = A[{m:,}, {k:,}] B[{k:,}, {n:,}], {algorithm} on {grid[0]}x{grid[1]} "
        f"cores of {fabric.name}"
    )
    return Answer(result, lambda: _report(title, result))


def collective(
    output: Output | None = None,
    *,
    pattern: Name,
    pes: Count,
    payload: Annotated[Bytes, Parameter(name="--bytes")],
    wafer: Name,
    ui: Terminal,
) -> Answer:
    """Time one collective on a row of cores.

    Parameters
    ----------
    pattern
        broadcast, chain_reduce, star_reduce, tree_reduce, two_phase_reduce or ring_allreduce.
    pes
        Cores in the row.
    payload
        Vector of each core.
    wafer
        Name of a preset (show wafers), or FILE.toml.
    """
    from wafer_emu.links import slowest_link
    from wafer_emu.placement import Region
    from wafer_emu.wafer import Wafer
    from wafer_kernels.collective import collective as time_collective

    fabric = Wafer.load(wafer)
    if pes > fabric.core_columns:
        raise UsageError(
            f"{pes:,} cores in a row: a row of {fabric.name} has {fabric.core_columns:,}"
        )
    link = slowest_link(fabric, Region(0, 0, 1, pes))
    wavelets = link.transfer_cycles(payload)
    timing = time_collective(pattern, pes, wavelets, fabric.link.ramp_cycles, link.hop_cycles)
    moving = timing.serialisation_cycles / timing.cycles if timing.cycles else None
    result = {
        "cycles": timing.cycles,
        "seconds": timing.cycles / fabric.core.clock_hz,
        "macs": 0,
        "utilization": moving,
        "wavelets": wavelets,
        **timing._asdict(),
    }
    title = f"{pattern} of {payload:,} B on {pes:,} cores of {fabric.name}"
    return Answer(result, lambda: _report(title, result))


def _grid(
    wafer: Wafer, shape: tuple[int, int], element_bytes: int
) -> tuple[GridCost, GridDetail, int]:
    """Cores and links of the wafer's first rows and columns, with the dies' edges where they lie.

    The cores along a die's edge share its link. Bytes are counted in shares, so many of them a
    byte, that an edge core's part of the link is a whole number of.
    """
    from wafer_emu.links import LinkRate, edge_share, in_shares_of_a_byte
    from wafer_emu.tiling import core_cost
    from wafer_kernels.mesh import GridCost, even_detail

    rows, columns = shape
    if rows > wafer.core_rows or columns > wafer.core_columns:
        raise UsageError(
            f"a grid of {rows}x{columns} cores does not fit on {wafer.name}, which has "
            f"{wafer.core_rows}x{wafer.core_columns}"
        )
    core, link = wafer.core, wafer.link
    cost = GridCost(
        rows=rows,
        columns=columns,
        core=core_cost(wafer),
        element_bytes=element_bytes,
        step_cycles=core.step_cycles,
        link_bytes_per_cycle=link.bytes_per_cycle,
        hop_cycles=link.hop_cycles,
        ramp_cycles=link.ramp_cycles,
        shared_ramp=0,
    )
    if wafer.die_link is None:
        return cost, even_detail(cost), 1
    across, down = edge_share(wafer, wafer.die.core_rows), edge_share(wafer, wafer.die.core_columns)
    shares = math.lcm(across.cycles, down.cycles)
    within = LinkRate(link.bytes_per_cycle * shares, shares, link.hop_cycles)
    cost = in_shares_of_a_byte(cost, within)
    detail = even_detail(cost)
    for rate, extra, step, edge in (
        (detail.x_link_bytes_per_cycle, detail.x_link_extra_cycles, wafer.die.core_columns, across),
        (detail.y_link_bytes_per_cycle, detail.y_link_extra_cycles, wafer.die.core_rows, down),
    ):
        rate[step - 1 :: step] = edge.bytes * shares // edge.cycles
        extra[step - 1 :: step] = edge.hop_cycles - link.hop_cycles
    return cost, detail, shares


def _report(title: str, result: Mapping[str, Any]) -> RenderableType:
    """One line a figure, the unit taken from its name."""
    from rich.console import Group
    from rich.table import Table

    from wafer_emu.report import heading

    table = Table(box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in result.items():
        if name == "utilization":
            shown = quantities.percent(value)
        elif name == "seconds":
            shown = quantities.seconds(value)
        else:
            shown = quantities.count(round(value))
        table.add_row(name.replace("_", " "), shown)
    return Group(heading(title), table)
