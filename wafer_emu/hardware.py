"""Parts of a wafer: arithmetic, core, die, links, memories, energy; units stand in the names."""

from __future__ import annotations

from typing import Literal

import msgspec

from wafer_emu.strict import Amount, Count, Natural

__all__ = [
    "Core",
    "Die",
    "DieLink",
    "Dram",
    "Energy",
    "Link",
    "OffWafer",
    "Program",
    "Simd",
    "Systolic",
]


class Systolic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
               tag_field="kind", tag="systolic"):  # fmt: skip
    """Systolic array of ``rows x columns`` cells, each of ``depth`` MACs per cycle along K."""

    rows: Count
    columns: Count
    depth: Count = 1
    dataflow: Literal["os", "ws", "is"] = "os"
    drain: Literal["overlapped", "explicit"] = "overlapped"

    @property
    def macs_per_cycle(self) -> int:
        """Peak multiply-accumulates per cycle."""
        return self.rows * self.columns * self.depth


class Simd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
           tag_field="kind", tag="simd"):  # fmt: skip
    """Vector unit: an instruction on ``n`` elements takes ``ceil(n / lanes)`` cycles + issue.

    A product C[m, n] takes vectors along its rows (m) or its columns (n).
    """

    lanes: Count
    issue_millicycles: Natural
    vector_axis: Literal["m", "n"] = "m"

    @property
    def macs_per_cycle(self) -> int:
        """Peak multiply-accumulates per cycle, issue cost left out."""
        return self.lanes


class Core(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One core: clock [Hz], SRAM [bytes], SRAM width [bytes/cycle], arithmetic.

    ``code_bytes`` of the SRAM hold program and stack; ``step_cycles`` is the fixed cost of one
    compute-shift step; the vector unit does what is not a product of matrices.
    """

    clock_hz: Count
    sram_bytes: Count
    code_bytes: Natural
    sram_read_bytes_per_cycle: Count
    sram_write_bytes_per_cycle: Count
    step_cycles: Natural
    compute: Systolic | Simd
    vector_lanes: Count
    vector_issue_millicycles: Natural

    def __post_init__(self) -> None:
        if self.code_bytes >= self.sram_bytes:
            raise ValueError(
                f"code_bytes {self.code_bytes} leaves nothing of sram_bytes {self.sram_bytes}"
            )

    @property
    def data_bytes(self) -> int:
        """SRAM left for weights, activations and KV [bytes]."""
        return self.sram_bytes - self.code_bytes


class Die(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Grid of cores on one die."""

    core_rows: Count
    core_columns: Count


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mesh link of one direction [bytes/cycle]; cycles per hop; cycles between core and router."""

    bytes_per_cycle: Count
    hop_cycles: Natural
    ramp_cycles: Natural


class DieLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One die edge in one direction [bytes/s], shared by the cores along it; latency [s]."""

    bytes_per_second: Count
    latency_seconds: Amount


class Dram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of one die: capacity [bytes], bandwidth [bytes/s], latency [s]."""

    capacity_bytes: Count
    bytes_per_second: Count
    latency_seconds: Amount


class OffWafer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Link between the wafer and its host or next wafer: bandwidth [bytes/s], latency [s]."""

    bytes_per_second: Count
    latency_seconds: Amount


class Energy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Energy of one event [pJ] and the power of a core that only waits [W]."""

    mac_picojoules: Amount
    sram_byte_picojoules: Amount
    hop_bit_picojoules: Amount
    die_crossing_bit_picojoules: Amount
    dram_bit_picojoules: Amount
    idle_watts_per_core: Amount


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the wafer's software works, where that differs from the emulator's own way.

    ``attention``: key tiles travel around a ``ring`` of rows and masked tiles cost nothing, or
    matrix ``products`` over the region, key block after key block, the mask not skipped inside a
    chunk. ``request_cycles`` pass once between a request's arrival and its first chunk's start.
    """

    attention: Literal["ring", "products"]
    request_cycles: Natural
