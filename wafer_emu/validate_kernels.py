"""Suites that hold single kernels against oracles: a core, collectives, a mesh, the pipeline."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wafer_emu.validate import Case, Suite, published
from wafer_kernels import pipeline
from wafer_kernels.collective import collective, mean_uniform_hops, zero_load_cycles
from wafer_kernels.systolic import systolic_core, tile

__all__ = ["collectives", "noc_latency", "pipeline_identity", "systolic"]

Int64 = npt.NDArray[np.int64]
BOOKSIM_HOP_CYCLES, BOOKSIM_OFFSET_CYCLES = 4, 2  # of BookSim2's default router
LOW_LOAD = 0.05  # flits per node and cycle at which packets hardly meet
MICROSECONDS = 1000  # per millisecond


def systolic() -> Suite:
    """Tile products on systolic arrays against SCALE-Sim."""
    cases = []
    for row in published("scalesim_cycles"):
        rows, columns = int(row["array_rows"]), int(row["array_cols"])
        m, n, k = (int(row[name]) for name in "mnk")
        duration = int(row["total_cycles"]) + 1
        timing = tile(systolic_core(rows, columns, row["dataflow"]), m, k, n, 2)
        name = f"{row['dataflow']} {rows}x{columns}, m={m} n={n} k={k}"
        cases.append(Case(name, duration, timing.cycles, "exact"))
    return Suite(
        "systolic",
        "cycles",
        "SCALE-Sim 3.0.0",
        tuple(cases),
        ("SCALE-Sim prints the index of the last cycle: one is added to make it a duration",),
    )


def collectives() -> Suite:
    """Broadcast, reduces and all-reduce on a row of cores."""
    cases = []
    for row in published("mesh_collectives"):
        pes, wavelets, ramp = (int(row[name]) for name in ("pes", "wavelets", "t_r"))
        name = f"{row['pattern']}, {pes} cores, {wavelets} wavelets"
        cycles = collective(row["pattern"], pes, wavelets, ramp).cycles
        cases.append(Case(name, int(row["cycles"]), cycles, "exact"))
    return Suite(
        "collectives",
        "cycles",
        "closed forms of Luczynski et al. (arXiv 2404.15888)",
        tuple(cases),
        ("their authors report less than 4 % between these forms and a WSE-2",),
    )


def noc_latency() -> Suite:
    """Latency of a mesh that is hardly loaded, against BookSim2."""
    rows = [
        row
        for row in published("booksim_mesh")
        if row["packet_size_flits"] == "1"
        and row["traffic"] == "uniform"
        and float(row["injection_rate"]) <= LOW_LOAD
    ]
    hops = np.array([float(row["avg_hops"]) for row in rows])
    latency = np.array([float(row["avg_packet_latency"]) for row in rows])
    offset, slope = np.polynomial.Polynomial.fit(hops, latency, 1).convert().coef
    per_hop = zero_load_cycles(1, BOOKSIM_HOP_CYCLES, 0)
    cases = [
        Case("slope, cycles per hop", float(slope), per_hop, "calibrated"),
        Case("offset", float(offset), zero_load_cycles(0, per_hop, BOOKSIM_OFFSET_CYCLES),
             "calibrated"),
    ]  # fmt: skip
    for row, measured in zip(rows, latency, strict=True):
        side = int(row["k"])
        predicted = mean_uniform_hops(side, side) * per_hop + BOOKSIM_OFFSET_CYCLES
        name = f"{side}x{side} mesh, load {row['injection_rate']}"
        cases.append(Case(name, float(measured), predicted, "predicted"))
    return Suite(
        "noc-latency",
        "cycles",
        "BookSim2, uniform traffic, dimension-order routing, one-flit packets",
        tuple(cases),
        ("mean hops are counted by formula; cycles per hop and offset are those of its router",),
    )


def pipeline_identity() -> Suite:
    """Makespans of measured pipelines out of their measured chunk times, by the event loop."""
    rows = published("tenstorrent_pipeline")
    cases = [_deepseek(rows, ranks) for ranks in (1, 2)]
    cases.append(_llama(rows))
    return Suite(
        "pipeline-identity",
        "ms",
        "tenstorrent/tt-metal, issue 49903 and pull request 56690",
        tuple(cases),
        (
            "DeepSeek-V3: the mean and the last chunk's time are known, so all earlier chunks are "
            "given one time that makes the mean right",
            "Llama-3.1-8B: chunks between the measured ones are interpolated",
            "rows without chunk times (Kimi, Mistral) are not used",
        ),
    )


def _makespan_milliseconds(chunk_milliseconds: npt.NDArray[np.float64], stages: int) -> float:
    """Makespan of one request whose chunks take the same time on every stage, free hand-offs."""
    durations = np.rint(chunk_milliseconds * MICROSECONDS).astype(np.int64)
    chunks = durations.size
    zero = np.zeros(chunks, np.int64)
    last = zero.copy()
    last[-1] = 1
    tasks = pipeline.Tasks(
        arrival=zero,
        last=last,
        duration=np.tile(durations, (stages, 1)),
        handoff=np.zeros((stages, chunks), np.int64),
        host=np.arange(stages, dtype=np.int64)[:, np.newaxis],
        need=np.zeros((stages, 1, chunks), np.int64),
        leave=np.zeros((stages, chunks), np.int64),
        layers=np.ones(stages, np.int64),
        capacity=np.ones((stages, chunks + 1), np.int64),
    )
    slot = np.arange(chunks, dtype=np.int64)
    schedule = pipeline.schedule(tasks)
    pipeline.run(tasks, slot, *pipeline.no_traffic(tasks), schedule)
    return int(schedule.end.max()) / MICROSECONDS


def _deepseek(rows: list[dict[str, str]], ranks: int) -> Case:
    measured = {
        row["quantity"]: float(row["time_ms"])
        for row in rows
        if row["model"] == "DeepSeek-V3" and row["pipeline_ranks"] == str(ranks)
    }
    first = next(row for row in rows if row["model"] == "DeepSeek-V3")
    tokens, chunk = int(first["total_tokens"]), int(first["chunk_tokens"])
    chunks = tokens // chunk
    last = measured["chunk_last_mean_over_ranks"]
    mean = measured["chunk_mean_over_chunks_and_ranks"]
    times = np.full(chunks, (chunks * mean - last) / (chunks - 1))
    times[-1] = last
    name = f"DeepSeek-V3, {chunks} chunks of {chunk:,} tokens, stages: {ranks}"
    emulated = _makespan_milliseconds(times, ranks)
    return Case(name, measured["end_to_end"], emulated, "predicted")


def _llama(rows: list[dict[str, str]]) -> Case:
    own = [row for row in rows if row["model"] == "Llama-3.1-8B"]
    measured = next(float(row["time_ms"]) for row in own if row["quantity"] == "end_to_end")
    chunks = [row for row in own if row["quantity"] == "chunk"]
    tokens, size = int(own[0]["total_tokens"]), int(own[0]["chunk_tokens"])
    times = np.interp(
        np.arange(0, tokens, size),
        [int(row["prefix_tokens"]) for row in chunks],
        [float(row["time_ms"]) for row in chunks],
    )
    name = f"Llama-3.1-8B, {times.size} chunks of {size:,} tokens, stages: 1"
    return Case(name, measured, _makespan_milliseconds(times, 1), "predicted")
