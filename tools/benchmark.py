"""Speeds of the emulator's inner loops on this machine: medians of several runs, warm.

python tools/benchmark.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

import mocap.policy
from mocap.policy import Request
from wafer_emu.clock import Tiers
from wafer_emu.deployment import deploy
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.tiling import core_cost
from wafer_emu.wafer import Wafer
from wafer_kernels import pipeline
from wafer_kernels.gemm import gemm
from wafer_kernels.mesh import GridCost

RUNS = 5
SIDE, SIZE = 720, 8192
TOKENS, STEP = 32_768, 256
STAGES, TASKS = 16, 20_000


def median_seconds(work: Callable[[], object]) -> float:
    """Median duration of several runs, after one that compiles."""
    work()
    durations = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        work()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations)


def dataflow_updates_per_second(wafer: Wafer) -> float:
    """(core, step) updates of the double-buffered dataflow kernel, MeshGEMM on 720 x 720 cores.

    The whole call is timed: costs of the steps, kernel, and the plane of each core's finish.
    """
    link = wafer.link
    grid = GridCost(
        SIDE, SIDE, core_cost(wafer), 2, wafer.core.step_cycles,
        link.bytes_per_cycle, link.hop_cycles, link.ramp_cycles, 0,
    )  # fmt: skip
    return SIDE**3 / median_seconds(lambda: gemm(grid, SIZE, SIZE, SIZE))


def table_entries_per_second(wafer: Wafer) -> float:
    """Costs t(chunk, prefix) of the slowest stage that a policy's table holds, from nothing."""
    model, options = Model.preset("llama-3-8b"), Options(stages=8)
    units = TOKENS // STEP
    chunks, prefixes = np.meshgrid(np.arange(1, units + 1), np.arange(units), indexing="ij")
    feasible = chunks + prefixes <= units
    sizes, before = chunks[feasible] * STEP, prefixes[feasible] * STEP

    def table() -> None:
        policy = mocap.policy.get("terapipe")
        deployment = deploy(wafer, model, options, policy, Tiers(), 0, Request(0, TOKENS), {})
        deployment.slowest_cost().table(sizes, before)

    return sizes.size / median_seconds(table)


def tasks_per_second() -> float:
    """(stage, task) events of the pipeline's loop, requests of eight chunks."""
    last = (np.arange(TASKS) % 8 == 7).astype(np.int64)
    duration = 1000 + np.arange(STAGES * TASKS, dtype=np.int64).reshape(STAGES, TASKS) % 97
    tasks = pipeline.Tasks(
        arrival=np.zeros(TASKS, np.int64),
        last=last,
        duration=duration,
        handoff=np.full((STAGES, TASKS), 10, np.int64),
        host=np.arange(STAGES, dtype=np.int64)[:, np.newaxis],
        need=np.ones((STAGES, 1, TASKS), np.int64),
        leave=np.zeros((STAGES, TASKS), np.int64),
        layers=np.ones(STAGES, np.int64),
        capacity=np.full((STAGES, TASKS + 1), 64, np.int64),
    )
    slot = np.arange(TASKS, dtype=np.int64)
    nothing = pipeline.no_traffic(tasks)

    def run() -> None:
        pipeline.run(tasks, slot, *nothing, pipeline.schedule(tasks))

    return STAGES * TASKS / median_seconds(run)


def main() -> None:
    """Print one line a loop."""
    wafer = Wafer.preset("wse-2")
    print(f"dataflow kernel, {SIDE}x{SIDE} cores, {SIZE}^3: ", end="", flush=True)
    print(f"{dataflow_updates_per_second(wafer):.3g} (core, step) updates/s", flush=True)
    print(f"cost table, {TOKENS:,} tokens in steps of {STEP}: ", end="", flush=True)
    print(f"{table_entries_per_second(wafer):.3g} entries/s", flush=True)
    print(f"engine, {STAGES} stages, {TASKS:,} tasks: ", end="", flush=True)
    print(f"{tasks_per_second():.3g} tasks/s", flush=True)


if __name__ == "__main__":
    main()
