"""The result of a run: metrics by the formulas of docs/metrics.md, invariants, settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from wafer_emu.activity import Activity
from wafer_emu.deployment import PAGE_TOKENS
from wafer_emu.engine import free_cycles, input_stall, memory_stall, transfer_stall
from wafer_emu.link_use import links_summary
from wafer_emu.memory import kv_quantum_bytes
from wafer_emu.model import Model
from wafer_emu.options import CHUNK_OPTIONS
from wafer_emu.plan import Plan
from wafer_emu.replay import Books
from wafer_emu.work import Work
from wafer_emu.workload import Workload
from wafer_kernels import pipeline

__all__ = ["summarise"]

Int64 = npt.NDArray[np.int64]
PICO = 1e-12


def summarise(
    plan: Plan,
    schedule: pipeline.Schedule,
    books: Books,
    activity: Activity,
    model: Model,
    workload: Workload,
) -> dict[str, Any]:
    """Plain mapping of a run's results."""
    wafer = plan.deployment.wafer
    clock_hz = wafer.core.clock_hz
    makespan = int(schedule.end.max())
    seconds = makespan / clock_hz
    stall = transfer_stall(plan, schedule)
    busy = plan.tasks.duration.sum(axis=1)
    arrival = np.array([request.arrival_cycle for request in plan.requests], np.int64)
    last = np.flatnonzero(plan.tasks.last)
    waits = (schedule.end[-1, last] - arrival) / clock_hz
    work = activity.total()
    fullest = max(books.cores, key=lambda book: int(book.peak.max()))
    core = int(np.argmax(fullest.peak))
    quantum = kv_quantum_bytes(plan.deployment.clocks[0])
    first = plan.request == 0
    return {
        "policy": plan.policy.name,
        "makespan_cycles": makespan,
        "makespan_seconds": seconds,
        "time_to_first_token_seconds": {
            "mean": float(np.mean(waits)),
            "p50": float(np.quantile(waits, 0.5)),
            "p95": float(np.quantile(waits, 0.95)),
            "p99": float(np.quantile(waits, 0.99)),
            "max": float(np.max(waits)),
        },
        "requests_per_second": len(plan.requests) / seconds,
        "tokens_per_second": sum(request.tokens for request in plan.requests) / seconds,
        "bubble_fraction": 1 - int(busy.sum()) / (busy.size * makespan),
        "stage_busy_fraction": [int(each) / makespan for each in busy],
        "chunk_tokens": [list(cuts) for cuts in plan.cuts],
        "chunk_cycles": (schedule.end - schedule.start)[:, first].tolist(),
        "sram_peak_bytes_per_core": int(fullest.peak[core]),
        "sram_capacity_bytes_per_core": int(fullest.capacity[core]),
        "kv_peak_bytes_per_stage": [int(each) * quantum for each in schedule.peak],
        "kv_capacity_bytes_per_stage": [
            int(each) * quantum for each in plan.tasks.capacity[:, plan.tokens.size - 1]
        ],
        "reallocated_bytes": int(plan.transfers.written_bytes.sum()),
        "remote_read_bytes": int(plan.transfers.read_bytes.sum()),
        "noc_byte_hops": work.hop_bytes,
        "links": links_summary(plan, schedule),
        "stall_cycles": {
            "input": int(input_stall(plan, schedule).sum()),
            "memory": int(memory_stall(schedule).sum()),
            "transfer": int(stall.sum()),
        },
        "energy_joules": _energy(plan, work, seconds),
        "macs": work.macs,
        "padded_macs": work.padded_macs,
        "invariants": _invariants(plan, schedule, books, activity, work, model),
        "settings": _settings(plan, model, workload),
    }


def _energy(plan: Plan, work: Work, seconds: float) -> dict[str, float]:
    """Energy by class of event: exact counts times the preset's constants [J]."""
    wafer = plan.deployment.wafer
    energy = wafer.energy
    return {
        "compute": work.macs * energy.mac_picojoules * PICO,
        "sram": work.sram_bytes * energy.sram_byte_picojoules * PICO,
        "mesh": 8 * work.hop_bytes * energy.hop_bit_picojoules * PICO,
        "die_crossing": 8 * work.die_hop_bytes * energy.die_crossing_bit_picojoules * PICO,
        "dram": 8 * work.dram_bytes * energy.dram_bit_picojoules * PICO,
        "idle": energy.idle_watts_per_core * wafer.cores * seconds,
    }


def _closed_form_macs(plan: Plan, model: Model) -> int:
    """MACs of the workload by the model's formula.

    The whole request at once, whatever its cuts; where cuts change the work (MLA expands its
    latents anew for every tile, an unmasked chunk does not see later ones) the sum over tiles.
    """
    deployment = plan.deployment
    skip = deployment.options.causal_skip
    pieces: list[tuple[int, int]] = []
    if skip and model.mla is None:
        pieces = [(request.new_tokens, request.prefix_tokens) for request in plan.requests]
    else:
        for chunk, prefix in zip(plan.tokens, plan.prefix, strict=True):
            pieces += [(tile, int(prefix) + at) for tile, at in deployment.tiles(int(chunk))]
    layers = 0
    for layer in range(deployment.model.layers):
        for chunk, prefix in pieces:
            layers += deployment.model.layer_macs(layer, chunk, prefix, causal_skip=skip)
    whole, placed = deployment.scale
    return layers * whole // placed + len(plan.requests) * model.head_macs()


def _invariants(
    plan: Plan,
    schedule: pipeline.Schedule,
    books: Books,
    activity: Activity,
    work: Work,
    model: Model,
) -> list[dict[str, Any]]:
    """What must hold at the end of every run, with the figures it was held against."""
    expected = _closed_form_macs(plan, model)
    cores = sum(book.capacity.size for book in books.cores)
    spare = min(int((book.capacity - book.peak).min()) for book in books.ledgers())
    written = sum(int(book.written.sum()) for book in books.cores)
    freed = sum(int(book.freed.sum()) for book in books.cores)
    resident = sum(int(book.resident.sum()) for book in books.cores)
    left = books.resident_kv()
    tight, accounted = _time_budget(plan, schedule, activity)
    return [
        {
            "name": "MACs over tiles = closed form",
            "holds": work.macs == expected,
            "detail": f"{work.macs:,} = {expected:,}",
        },
        {
            "name": "busy + stall + idle = makespan on every core",
            "holds": tight >= 0 and accounted,
            "detail": f"{cores:,} cores; least stall inside a task {tight:,} cycles",
        },
        {
            "name": "bytes written - freed = resident",
            "holds": books.balanced() and left == 0,
            "detail": f"{written:,} - {freed:,} = {resident:,} B; KV left {left:,} B",
        },
        {
            "name": "peak <= capacity on every core",
            "holds": spare >= 0,
            "detail": f"{cores:,} cores; least room left {spare:,} B",
        },
    ]


def _time_budget(plan: Plan, schedule: pipeline.Schedule, activity: Activity) -> tuple[int, bool]:
    """Least (task time - busy time) of any core in any task, and whether all cycles have a state.

    On every core of a stage: a task's cycles are busy or stalled; cycles between tasks are stalled
    for input or memory, or idle. The states tile the makespan if tasks never overlap and no core is
    busy for longer than its task lasts.
    """
    stages, count = schedule.start.shape
    tight: int | None = None
    for stage in range(stages):
        for task in range(count):
            duration = int(schedule.end[stage, task] - schedule.start[stage, task])
            room = duration - int(activity.busy(stage, task).max())
            tight = room if tight is None else min(tight, room)
    makespan = schedule.end.max()
    free = free_cycles(schedule)
    between = schedule.start - free
    waiting = np.maximum(0, schedule.input_ready - free) + schedule.memory_wait
    inside = (schedule.end - schedule.start).sum(axis=1)
    after = makespan - schedule.end[:, -1]
    accounted = bool(
        np.all(between >= 0)
        and np.array_equal(between, waiting)
        and np.all(inside + between.sum(axis=1) + after == makespan)
    )
    assert tight is not None
    return tight, accounted


def _settings(plan: Plan, model: Model, workload: Workload) -> dict[str, Any]:
    """Everything needed to repeat the run, and what a reader must know beside a speed-up."""
    deployment, policy = plan.deployment, plan.policy
    options, placement = deployment.options, deployment.placement
    region = deployment.stages[0].region
    lengths = sorted({request.tokens for request in plan.requests})
    quantum = kv_quantum_bytes(deployment.clocks[0])
    unused = [
        name
        for name in CHUNK_OPTIONS
        if getattr(options, name) is not None and name not in policy.uses
    ]
    unused += [
        name
        for name in ("stages", "region")
        if name == "stages"
        and isinstance(options.stages, int)
        and policy.stage_count not in (None, options.stages)
    ]
    unused += [f"policy.{name}" for name in options.policy if name not in policy.option_types()]
    return {
        "wafer": deployment.wafer.name,
        "model": model.name,
        "policy": policy.name,
        "policy_options": policy.options(),
        "tokens": lengths[0] if len(lengths) == 1 else lengths[-1],
        "prefix_tokens": max(request.prefix_tokens for request in plan.requests),
        "requests": len(plan.requests),
        "workload": workload.source,
        "stages": len(deployment.stages),
        "region": f"{region.rows}x{region.columns}",
        "regions": [
            [each.region.row, each.region.column, each.region.rows, each.region.columns]
            for each in deployment.stages
        ],
        "stage_layers": [each.layers for each in deployment.stages],
        "chunks": max(len(cuts) for cuts in plan.cuts),
        "layers": model.layers,
        "layers_emulated": deployment.model.layers,
        "cores": deployment.wafer.cores,
        "cores_used": placement.cores_used,
        "cores_unused": placement.cores_unused,
        "weights_tier": deployment.tiers.weights,
        "kv_tier": "budget" if options.kv_budget is not None else deployment.tiers.kv,
        "activations_tier": deployment.tiers.activations,
        "weights_dtype": deployment.clocks[0].weights_dtype,
        "kv_dtype": deployment.clocks[0].kv_dtype,
        "kv_budget_bytes": options.kv_budget,
        "kv_bytes_per_token_per_stage": [
            each * quantum for each in deployment.kv_quanta_per_token()
        ],
        "kv_freed": "layer" if policy.frees_by_layer() else "request",
        "embedding": options.embedding,
        "placement": options.placement,
        "attention": deployment.wafer.attention,
        "causal_skip": options.causal_skip,
        "contention": options.contention,
        "diagonal_tiles": "charged in full",
        "page_tokens": PAGE_TOKENS,
        "tile_tokens": min(deployment.tile_tokens, int(plan.tokens.max())),
        "gpipe_tile_tokens": deployment.tile_tokens if policy.streams_tokens else None,
        "attention_bytes_per_core": [clock.attention_bytes for clock in deployment.clocks],
        "requests_in_flight": _in_flight(plan),
        "beyond_model_positions": lengths[-1] > model.max_positions,
        "expert_tokens": _expert_tokens(plan),
        "unused": unused,
        "clock_hz": deployment.wafer.core.clock_hz,
        "weight_bytes_per_stage": [memory.weight_bytes for memory in plan.memories],
        "seed": options.seed,
    }


def _expert_tokens(plan: Plan) -> str | None:
    """What the experts' loads were taken from; None where there are no experts."""
    if plan.deployment.model.moe is None:
        return None
    return "routed" if plan.routing else "uniform"


def _in_flight(plan: Plan) -> int:
    """Most requests that the plan has on the pipeline at one time, in slots."""
    if len(plan.requests) == 1:
        return 1
    stages = plan.compute.shape[0]
    first = np.searchsorted(plan.request, np.arange(len(plan.requests)))
    begin = plan.slot[first]
    end = plan.slot[np.append(first[1:], plan.tokens.size) - 1] + stages
    return max(int(np.sum((begin <= at) & (end > at))) for at in begin)
