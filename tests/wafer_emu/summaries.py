"""Summaries of runs that nobody emulated: plausible figures for what reads them."""

from __future__ import annotations

from typing import Any

from wafer_emu.placement import place_regions
from wafer_emu.wafer import Wafer


def a_summary(
    policy: str = "mocap", wafer: str = "wse-2", stages: int = 8, **settings: object
) -> dict[str, Any]:
    """A run of llama-3-8b's 32,768 tokens in equal chunks."""
    fabric = Wafer.preset(wafer)
    regions = place_regions(fabric, stages, None, 32)
    used = sum(region.cores for region in regions)
    return {
        "policy": policy,
        "makespan_cycles": 1_357_400_123,
        "makespan_seconds": 1.234000112,
        "time_to_first_token_seconds": dict.fromkeys(("mean", "p50", "p95", "p99", "max"), 1.234),
        "requests_per_second": 0.81037,
        "tokens_per_second": 26554.2,
        "bubble_fraction": 0.4667,
        "stage_busy_fraction": [0.5333] * stages,
        "chunk_tokens": [[32768 // stages] * stages],
        "chunk_cycles": [[80_000_000 + 1_000_000 * k for k in range(stages)]] * stages,
        "sram_peak_bytes_per_core": 40_123,
        "sram_capacity_bytes_per_core": 49_152,
        "kv_peak_bytes_per_stage": [536_870_912] * stages,
        "kv_capacity_bytes_per_stage": [1_200_000_000] * (stages - 1) + [700_000_000],
        "reallocated_bytes": 123_456_789,
        "remote_read_bytes": 987_654_321,
        "noc_byte_hops": 12_345_678_901_234,
        "links": {
            "busiest": {
                "from": [0, 0],
                "to": [0, 375],
                "bytes": 268_435_456,
                "busy_fraction": 0.125,
            },
            "contention_cycles": 1_234_567,
        },
        "stall_cycles": {"input": 5_000_000_000, "memory": 0, "transfer": 12_345},
        "energy_joules": {"mac": 120.5, "sram": 980.25, "mesh": 33.0, "dram": 0.0, "idle": 4200.0},
        "macs": 250_123_456_789_012,
        "invariants": [
            {"name": "MACs", "holds": True, "detail": "over tiles = closed form"},
            {"name": "time", "holds": True, "detail": "busy + stall + idle = makespan, each core"},
        ],
        "settings": {
            "wafer": wafer,
            "model": "llama-3-8b",
            "policy": policy,
            "policy_options": {"partner": "offset", "trigger": "overflow", "step_tokens": None},
            "tokens": 32_768,
            "prefix_tokens": 0,
            "requests": 1,
            "workload": "1 x 32768 tokens",
            "stages": stages,
            "region": f"{regions[0].rows}x{regions[0].columns}",
            "chunks": stages,
            "layers_emulated": 32,
            "layers": 32,
            "cores": fabric.cores,
            "cores_used": used,
            "cores_unused": fabric.cores - used,
            "weights_tier": "sram",
            "kv_tier": "sram",
            "activations_tier": "sram",
            "weights_dtype": "bfloat16",
            "kv_dtype": "bfloat16",
            "kv_budget_bytes": None,
            "embedding": "host",
            "attention": "ring",
            "placement": "serpentine",
            "causal_skip": True,
            "contention": True,
            "page_tokens": 16,
            "kv_freed": "request",
            "gpipe_tile_tokens": 4096 if policy == "gpipe" else None,
            "requests_in_flight": 1,
            "beyond_model_positions": True,
            "unused": ["chunks"] if policy == "gpipe" else [],
            "clock_hz": fabric.core.clock_hz,
            "seed": 0,
            "weight_bytes_per_stage": [1_744_863_232] * stages,
            "stage_layers": [32 // stages] * stages,
            "regions": [[r.row, r.column, r.rows, r.columns] for r in regions],
            "kv_bytes_per_token_per_stage": [16_384] * stages,
            **settings,
        },
    }


def a_row(policy: str, ratio: float, **settings: object) -> dict[str, Any]:
    """A row of a comparison."""
    ratios = {"latency_ratio": ratio, "throughput_ratio": 1 / ratio}
    return {**a_summary(policy, **settings), **ratios}  # type: ignore[arg-type]


def a_refusal(policy: str) -> dict[str, Any]:
    """A row of a policy that does not fit."""
    sentence = (
        "stage 7 does not fit: core (374, 993) needs 51,234 B of its 49,152 B, 2,082 B too many "
        "(code 6,144 B, weights 30,000 B, activations 15,090 B, buffers 0 B); what would help: "
        "more stages or larger regions; smaller chunks (--chunks)"
    )
    error = {"kind": "CapacityError", "message": sentence}
    return {"policy": policy, "error": error, "latency_ratio": None, "throughput_ratio": None}
