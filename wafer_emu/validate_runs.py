"""Suites that hold whole runs against wafers: measured prefills, and what a layer takes of SRAM."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wafer_emu.clock import Clock, Tiers
from wafer_emu.dealing import Dealing
from wafer_emu.emulation import emulate
from wafer_emu.memory import StageMemory
from wafer_emu.model import Model
from wafer_emu.placement import Region, Stage
from wafer_emu.validate import Case, Role, Suite, published
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload

__all__ = [
    "chunked_prefill_cycles",
    "prefill_tokens_per_second",
    "sram_footprint",
    "waferllm_prefill",
    "waferllm_rows",
    "wse3_chunked_prefill",
]

MODELS = {"LLaMA3-8B": "llama-3-8b", "LLaMA2-13B": "llama-2-13b"}
EMULATED_LAYERS = 2
CALIBRATED_TOKENS = 8192


def waferllm_rows() -> list[dict[str, str]]:
    """WaferLLM's own rows of the table that also has its competitors."""
    return [row for row in published("waferllm_prefill") if row["system"] == "WaferLLM"]


def prefill_tokens_per_second(wafer: Wafer, row: dict[str, str]) -> float:
    """Throughput of one prompt on a square of cores that runs layer after layer [tokens/s]."""
    run = emulate(
        wafer,
        Model.preset(MODELS[row["model"]]),
        Workload.single(int(row["tokens"])),
        "layerwise",
        region=(int(row["grid_rows"]), int(row["grid_cols"])),
        layers=EMULATED_LAYERS,
    )
    return float(run.summary["tokens_per_second"])


def waferllm_prefill() -> Suite:
    """Prefill throughput on WSE-2 against WaferLLM's measurements."""
    wafer = Wafer.preset("wse-2")
    cases = tuple(
        Case(
            f"{row['model']}, {row['grid_rows']}x{row['grid_cols']} cores",
            float(row["tokens_per_second"]),
            prefill_tokens_per_second(wafer, row),
            "calibrated",
        )
        for row in waferllm_rows()
    )
    return Suite(
        "waferllm-prefill",
        "tokens/s",
        "WaferLLM (OSDI 2025, arXiv 2502.04563), Table 3: 4,096 tokens, measured on WSE-2",
        cases,
        (
            f"{EMULATED_LAYERS} layers emulated and scaled; embedding and head, which the "
            "measurements leave out, are 0.2 % of the emulated time or less",
        ),
    )


def chunked_prefill_cycles(wafer: Wafer, row: dict[str, str]) -> int:
    """Makespan of one prompt in chunks on blocks of 256 x 256 cores [cycles]."""
    chunk = int(row["chunk_tokens"])
    run = emulate(
        wafer,
        Model.preset("qwen3-1.7b"),
        Workload.single(int(row["tokens"]), chunk * int(row["reused_chunks"])),
        "uniform",
        region=(256, 256),
        chunk_tokens=chunk,
    )
    return int(run.summary["makespan_cycles"])


def wse3_chunked_prefill() -> Suite:
    """A measured pipeline of chunks on WSE-3, with and without resident prefixes."""
    wafer = Wafer.preset("wse-3-pipeline")
    cases = []
    for row in published("wse3_chunked_prefill"):
        tokens, reused = int(row["tokens"]), int(row["reused_chunks"])
        role: Role = "calibrated" if tokens == CALIBRATED_TOKENS else "predicted"
        name = f"Qwen3-1.7B, {tokens:,} tokens, {reused} chunks of {row['chunk_tokens']} resident"
        cases.append(Case(name, int(row["cycles"]), chunked_prefill_cycles(wafer, row), role))
    return Suite(
        "wse3-chunked-prefill",
        "cycles",
        "public developer notes of WaferEngine-staging: Qwen3-1.7B on WSE-3, one run a point",
        tuple(cases),
        ("informal measurements; three constants on four rows",),
    )


def sram_footprint() -> Suite:
    """Bytes of the fullest core for one layer of WaferLLM's prefill program."""
    cases = [case for shape in FOOTPRINT_SHAPES for case in _footprint(*shape)]
    return Suite(
        "sram-footprint",
        "bytes per core",
        "source of WaferLLM's prefill program (MeshInfra/WaferLLM): its declared tensors",
        tuple(cases),
        (
            "their program keeps every tensor for good; the emulator frees a tensor after its last "
            "use and needs about 0.6 times these bytes for the same layer",
        ),
    )


# Side of the square of cores, hidden and feed-forward width, tokens.
FOOTPRINT_SHAPES = (
    (660, 4096, 14336, 4096),
    (480, 4096, 14336, 4096),
    (600, 5120, 13824, 4096),
    (720, 5120, 13824, 4096),
)
HALF_BYTES = 2


def _footprint(side: int, hidden: int, wide: int, tokens: int) -> Iterator[Case]:
    """Tensors of a layer, and its weights alone, dealt by the emulator against their formula."""
    s, d, f = (-(-total // side) for total in (tokens, hidden, wide))
    declared = 14 * s * d + 5 * d * d + 4 * d * f + 4 * s * f + 2 * s * s + 4 * d + 2 * s
    name = f"{side}x{side} cores, widths {hidden:,} and {wide:,}, {tokens:,} tokens"
    dealing = Dealing(side, side, {tokens, hidden}, {tokens, hidden, wide})
    tensors = (
        14 * dealing.matrix(tokens, hidden)
        + 5 * dealing.matrix(hidden, hidden)
        + 4 * dealing.matrix(hidden, wide)
        + 4 * dealing.matrix(tokens, wide)
        + 2 * dealing.matrix(tokens, tokens)
        + 4 * dealing.columns(hidden)
        + 2 * dealing.rows(tokens)
    )
    placed = HALF_BYTES * int(np.max(tensors))
    yield Case(f"all tensors, {name}", HALF_BYTES * declared, placed, "exact")
    weights = HALF_BYTES * (4 * d * d + 3 * d * f + 2 * d)
    resident = int(_layer(side, hidden, wide, tokens).load(tokens).weights.max())
    yield Case(f"weights and norms, {name}", weights, resident, "exact")


def _layer(side: int, hidden: int, wide: int, tokens: int) -> StageMemory:
    """Memory of one layer of multi-head attention on a square of cores of WSE-2."""
    heads = 32
    model = Model.from_hf(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": wide,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "vocab_size": hidden,
            "torch_dtype": "float16",
        }
    )
    wafer, region = Wafer.preset("wse-2"), Region(0, 0, side, side)
    clock = Clock(
        wafer, model, region, Tiers(), wafer.core.data_bytes // 2, model.dtype, model.dtype
    )
    return StageMemory(clock, Stage(0, 0, 1, region), False, False, tokens, 0)
