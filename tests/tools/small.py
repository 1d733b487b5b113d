"""A wafer of four small dies and a model for it, so that a measurement takes seconds."""

from __future__ import annotations

from tests.small_model import CONFIG
from tools.mocap_bench import Bench
from wafer_emu.model import Model
from wafer_emu.wafer import Wafer

DIES = Wafer.preset("wsc-54").replace(
    {
        "die_rows": 2,
        "die_columns": 2,
        "die.core_rows": 3,
        "die.core_columns": 3,
        "core.sram_bytes": 131_072,
    }
)


def bench() -> Bench:
    """Four dies of nine cores, four layers, two layouts."""
    return Bench(DIES, Model.from_hf(CONFIG), ((2, 2), (4, 4)))
