"""Emulated SRAM: every core's bytes, what lies where, and what may not lie there.

A core's memory holds, from the bottom: code, the activations of the running task, free room, slots
for KV vectors (counted downwards), weights and hand-off buffers. What is freed is filled with 0xFF
bytes, a NaN in every supported type, and a slot is tagged with the vector that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wafer_emu.placement import Region
from wafer_kernels.errors import ConfigError, KernelError, UsageError
from wafer_kernels.region import Kind, fill
from wafer_kernels.region_cache import erase

__all__ = ["Area", "Arena", "storage_kind"]

Int64 = npt.NDArray[np.int64]
FREED = 0xFF
APART_BYTES = 4160  # between memories, so that equal addresses share no set of the host's caches
MOST_BYTES = 16 * 2**30  # of host memory for emulated SRAM
KINDS = {"float32": Kind.FLOAT32, "float16": Kind.FLOAT16, "bfloat16": Kind.BFLOAT16}


def storage_kind(dtype: str) -> Kind:
    """How the kernels store a dtype; ConfigError if they can only count its bytes."""
    if dtype not in KINDS:
        raise ConfigError(f"values of type {dtype} cannot be computed: use {', '.join(KINDS)}")
    return KINDS[dtype]


class Arena:
    """Memories of all cores of a plan, and the slots for KV vectors in them.

    Parameters
    ----------
    regions
        Regions of the stages; their cores are numbered one region after another.
    sram_bytes
        Memory of a core [byte].
    quantum_bytes
        Size of a KV slot [byte].
    """

    def __init__(self, regions: list[Region], sram_bytes: int, quantum_bytes: int) -> None:
        self.regions = regions
        self.quantum_bytes = quantum_bytes
        self.first_core = np.cumsum([0, *(region.cores for region in regions)])
        cores = int(self.first_core[-1])
        if cores * sram_bytes > MOST_BYTES:
            raise UsageError(
                f"numbers hold every core's memory: {cores:,} cores of {sram_bytes:,} B are more "
                f"than {MOST_BYTES:,} B; use a smaller wafer (check-32x32) or --region"
            )
        self.bytes = np.full((cores, sram_bytes + APART_BYTES), FREED, np.uint8)
        self.tags = np.zeros((cores, sram_bytes // quantum_bytes), np.int64)
        self.taken = np.zeros(self.tags.shape, np.bool_)
        self.top = np.full(cores, sram_bytes, np.int64)
        """Byte behind the first KV slot of each core (core,)."""
        self.used = np.zeros(cores, np.int64)
        self.peak = np.zeros(cores, np.int64)

    def label(self, core: int) -> str:
        """Place of a core on the fabric, for people."""
        stage = int(np.searchsorted(self.first_core, core, "right")) - 1
        region = self.regions[stage]
        row, column = divmod(core - int(self.first_core[stage]), region.columns)
        return f"core ({region.row + row}, {region.column + column}) of stage {stage}"

    def post(self, first_core: int, size: Int64) -> None:
        """Count allocated (or, if negative, freed) bytes of consecutive cores (core,)."""
        cores = slice(first_core, first_core + size.size)
        self.used[cores] += size
        np.maximum(self.peak[cores], self.used[cores], out=self.peak[cores])

    def kv_bytes(self, stage: int) -> Int64:
        """KV bytes, own and hosted, on every core of a stage (core,)."""
        cores = slice(self.first_core[stage], self.first_core[stage + 1])
        return self.taken[cores].sum(axis=1) * self.quantum_bytes

    def take_slots(self, stage: int, size: Int64, floor: Int64) -> tuple[Int64, Int64]:
        """Take the topmost free slots on cores of a stage: core and slot of each (slot,).

        Parameters
        ----------
        stage, size
            Where, and how many bytes on each core (core,).
        floor
            Byte of each core below which activations lie (core,).

        Raises
        ------
        KernelError
            If slots would reach into the activations.
        """
        first = int(self.first_core[stage])
        cores, slots = [], []
        for local in np.flatnonzero(size):
            core = first + int(local)
            count = int(size[local]) // self.quantum_bytes
            free = np.flatnonzero(~self.taken[core])[:count]
            lowest = self.top[core] - (int(free.max(initial=-1)) + 1) * self.quantum_bytes
            if free.size < count or lowest < floor[local]:
                raise KernelError(
                    f"{self.label(core)}: KV reaches byte {lowest:,}, activations lie up to byte "
                    f"{floor[local]:,}",
                    core=core,
                )
            self.taken[core, free] = True
            cores.append(np.full(count, core))
            slots.append(free)
        self.post(first, size)
        return np.concatenate(cores), np.concatenate(slots)

    def free_slots(self, core: Int64, slot: Int64) -> None:
        """Empty slots (slot,), each once."""
        erase(self.bytes, core, slot, self.top, self.tags, self.quantum_bytes, FREED)
        self.taken[core, slot] = False
        np.subtract.at(self.used, core, self.quantum_bytes)


@dataclass
class Holding:
    """A block of memory on every core of a region: address and size (core,) [byte]."""

    address: Int64
    size: Int64

    @property
    def end(self) -> Int64:
        """Byte behind the block on each core (core,)."""
        return self.address + self.size


class Area:
    """What one stage keeps in the memories of its region.

    Blocks that never change are placed from the top. Activations live in a reservation above the
    code, made for each task; where free room there is in pieces that are too small, live blocks are
    moved together.
    """

    def __init__(self, arena: Arena, stage: int, code_bytes: int) -> None:
        self.arena, self.stage = arena, stage
        self.first_core = int(arena.first_core[stage])
        cores = arena.regions[stage].cores
        self._base = np.full(cores, code_bytes, np.int64)
        self._limit = self._base.copy()
        self._live: dict[str, Holding] = {}
        self.high_water = np.zeros(cores, np.int64)
        """Most bytes of activations that were ever live on each core (core,)."""
        self.compactions = 0
        arena.post(self.first_core, self._base)

    @property
    def _cores(self) -> slice:
        return slice(self.first_core, self.first_core + self._base.size)

    @property
    def floor(self) -> Int64:
        """Byte behind the activations on each core (core,)."""
        return self._limit

    def place(self, size: Int64) -> Int64:
        """Place a block that stays, below those placed before: its address (core,)."""
        self.arena.top[self._cores] -= size
        self.arena.post(self.first_core, size)
        return self.arena.top[self._cores].copy()

    def reserve(self, size: Int64, cycle: int) -> None:
        """Reserve the memory for a task's activations (core,)."""
        self._limit = self._base + size
        slots = self.arena.tags.shape[1] - np.argmax(self.arena.taken[self._cores, ::-1], axis=1)
        slots = np.where(self.arena.taken[self._cores].any(axis=1), slots, 0)
        lowest = self.arena.top[self._cores] - slots * self.arena.quantum_bytes
        if (self._limit > lowest).any():
            core = int(np.argmax(self._limit - lowest))
            raise KernelError(
                f"{self.arena.label(self.first_core + core)} at cycle {cycle:,}: activations reach "
                f"byte {self._limit[core]:,}, KV and weights begin at byte {lowest[core]:,}",
                core=self.first_core + core,
                cycle=cycle,
            )
        self.arena.post(self.first_core, size)

    def release(self) -> None:
        """Free the reservation; whatever is still in it is lost."""
        size = self._limit - self._base
        fill(self.arena.bytes, self.first_core, self._base, size, FREED)
        self._live.clear()
        self.arena.post(self.first_core, -size)
        self._limit = self._base.copy()

    def allocate(self, name: str, size: Int64, cycle: int) -> Int64:
        """Allocate a block inside the reservation: its address, which later moves change (core,).

        Raises
        ------
        KernelError
            If it does not fit, or would lie on a live block: names core, block and cycle.
        """
        address = self._first_fit(size)
        lacking = address < 0
        if lacking.any():
            self._compact(np.flatnonzero(lacking))
            top = np.max([held.end for held in self._live.values()], axis=0, initial=0)
            address = np.where(lacking, np.maximum(top, self._base), address)
        block = Holding(address, size)
        self._refuse_overlap(name, block, cycle)
        self._live[name] = block
        live = sum(held.size for held in self._live.values())
        np.maximum(self.high_water, live, out=self.high_water)
        return address

    def shrink(self, name: str, size: Int64) -> None:
        """Free what a block has beyond its first bytes (core,)."""
        block = self._live[name]
        fill(self.arena.bytes, self.first_core, block.address + size, block.size - size, FREED)
        block.size = size

    def free(self, name: str) -> None:
        """Free a block."""
        block = self._live.pop(name)
        fill(self.arena.bytes, self.first_core, block.address, block.size, FREED)

    def _first_fit(self, size: Int64) -> Int64:
        """Lowest address with enough room on each core, -1 where there is none (core,)."""
        best = np.full(size.size, -1, np.int64)
        live = list(self._live.values())
        for start in (self._base, *(held.end for held in live)):
            fits = start + size <= self._limit
            for held in live:
                fits &= (start + size <= held.address) | (start >= held.end) | (held.size == 0)
            best = np.where(fits & ((best < 0) | (start < best)), start, best)
        return best

    def _compact(self, cores: Int64) -> None:
        """Move the live blocks of some cores down, in order, so that all free room is on top."""
        self.compactions += 1
        for core in cores:
            memory, end = self.arena.bytes[self.first_core + core], int(self._base[core])
            for held in sorted(self._live.values(), key=lambda held: int(held.address[core])):
                start, size = int(held.address[core]), int(held.size[core])
                memory[end : end + size] = memory[start : start + size].copy()
                held.address[core] = end
                end += size
            memory[end : self._limit[core]] = FREED

    def _refuse_overlap(self, name: str, block: Holding, cycle: int) -> None:
        """KernelError if a new block lies on a live one or outside the reservation."""
        for other, held in self._live.items():
            both = (block.size > 0) & (held.size > 0)
            shared = both & (block.address < held.end) & (held.address < block.end)
            if shared.any():
                core = int(np.argmax(shared))
                raise KernelError(
                    f"{self.arena.label(self.first_core + core)} at cycle {cycle:,}: {name} at "
                    f"byte {block.address[core]:,} lies on {other}, which is live at byte "
                    f"{held.address[core]:,} to {held.end[core]:,}",
                    core=self.first_core + core,
                    block=name,
                    cycle=cycle,
                )
        over = block.end - self._limit
        if (over > 0).any():
            core = int(np.argmax(over))
            raise KernelError(
                f"{self.arena.label(self.first_core + core)} at cycle {cycle:,}: {name} needs "
                f"{block.size[core]:,} B of activations, {over[core]:,} B more than the ledger "
                "reserved",
                core=self.first_core + core,
                block=name,
                cycle=cycle,
            )
