"""The ledger of a run: every allocation and free on every core, in the order of the schedule.

The engine grants KV in quanta a stage; the replay places each grant on the cores of its host,
emptiest first, keeps each core's high-water mark and the cycle of it, and checks that no core is
ever over its capacity and that bytes written less bytes freed are resident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wafer_emu.memory import StageMemory, kv_quantum_bytes
from wafer_emu.plan import Plan
from wafer_emu.state import CLASSES
from wafer_kernels import pipeline, sram
from wafer_kernels.errors import KernelError

__all__ = ["Books", "events", "replay"]

Int64 = npt.NDArray[np.int64]
END, START = 0, 1
CODE, WEIGHTS, ACTIVATIONS, OWN, HOSTED, BUFFERS = (
    CLASSES.index(name)
    for name in ("code", "weights", "activations", "own_kv", "hosted_kv", "buffers")
)


@dataclass
class Books:
    """Ledgers of all stages: of cores, of die memories, and whichever of the two holds KV.

    That of the die memories is empty where a stage uses none.
    """

    cores: list[sram.Ledger]
    dies: list[sram.Ledger]
    places: list[sram.Ledger]

    def ledgers(self) -> list[sram.Ledger]:
        """All that are not empty, each once."""
        return [book for book in (*self.cores, *self.dies) if book.capacity.size]

    def resident_kv(self) -> int:
        """KV bytes in memory now."""
        return sum(int(book.resident[[OWN, HOSTED]].sum()) for book in self.places)

    def balanced(self) -> bool:
        """Whether written less freed bytes are resident, in every class of every ledger."""
        return all(
            np.array_equal(book.written - book.freed, book.resident.sum(axis=1))
            for book in self.ledgers()
        )


def _open(memory: StageMemory, chunk: int) -> tuple[sram.Ledger, sram.Ledger]:
    """Ledgers of cores and dies with everything that never changes."""
    load = memory.load(chunk)
    if memory.budget_bytes is not None:
        capacity = memory.kv_places
    else:
        capacity = np.full(load.dealing.counts.sum(), memory.clock.wafer.core.sram_bytes, np.int64)
    cores = sram.ledger(len(CLASSES), capacity)
    for kind, kinds in ((CODE, load.code), (WEIGHTS, load.weights), (BUFFERS, load.buffers)):
        _post(cores, kind, load.dealing.expand(kinds).ravel(), 1, 0)
    dies = sram.ledger(len(CLASSES), memory.die_places)
    if memory.die_places.size:
        _post(dies, WEIGHTS, memory.die_weights, 1, 0)
        _post(dies, BUFFERS, memory.die_buffers, 1, 0)
    return cores, dies


def _post(book: sram.Ledger, kind: int, amount: Int64, sign: int, cycle: int) -> None:
    status = sram.add(book, kind, amount, sign, cycle)
    if status != sram.FITS:
        core = status - 1
        raise KernelError(
            f"place {core} of a region holds {book.total[core]:,} B of its {book.capacity[core]:,} "
            f"B at cycle {cycle:,} after {CLASSES[kind]} changed by {sign * amount[core]:,} B: the "
            "plan admitted what the ledger does not hold; please report this"
        )


def events(
    tasks: pipeline.Tasks, schedule: pipeline.Schedule
) -> Iterator[tuple[int, int, int, int, int]]:
    """(cycle, END or START, stage, task, layer) in the order in which the engine met them.

    Where a task's memory is granted and freed at once, layer 0 stands for all of them.
    """
    most = schedule.layer_start.shape[2]
    stage, task, layer = np.nonzero(
        np.broadcast_to(
            np.arange(most) < tasks.layers[:, np.newaxis, np.newaxis], schedule.layer_start.shape
        )
    )
    cycles = np.concatenate(
        [schedule.layer_end[stage, task, layer], schedule.layer_start[stage, task, layer]]
    )
    kinds = np.repeat([END, START], stage.size)
    order = np.lexsort((np.tile(stage, 2), kinds, cycles))
    for index in order:
        cell = index % stage.size
        yield (
            int(cycles[index]), int(kinds[index]), int(stage[cell]), int(task[cell]),
            int(layer[cell]),
        )  # fmt: skip


def replay(
    plan: Plan,
    schedule: pipeline.Schedule,
    before: Callable[[int, Books], None] = lambda cycle, books: None,
) -> Books:
    """Replay a schedule on the ledgers of all cores.

    Parameters
    ----------
    plan, schedule
        The plan and when its tasks ran.
    before
        Called with the cycle of the next event and the books as they stand before it.

    Raises
    ------
    KernelError
        If a core would hold more than it can: the plan's check and the ledger disagree.
    """
    memories, tasks = plan.memories, plan.tasks
    opened = [_open(memory, int(plan.largest_chunks[0])) for memory in memories]
    in_dies = [not each.kv_among_cores and each.budget_bytes is None for each in memories]
    books = Books(
        [cores for cores, _ in opened],
        [dies for _, dies in opened],
        [pair[kind] for pair, kind in zip(opened, in_dies, strict=True)],
    )
    quanta = [kv_quantum_bytes(clock) for clock in plan.deployment.clocks]
    per_layer = plan.deployment.kv_quanta_per_token() // tasks.layers
    current = [0] * len(memories)
    # Bytes of every place by (stage, layer), then by (host, task that pushes them away or -1).
    held: dict[tuple[int, int], dict[tuple[int, int], Int64]] = {}
    active: dict[int, Int64] = {}
    passing: dict[int, Int64] = {}  # activations in die memory
    # The last spread on every host: one layer often takes the place of the layer before it.
    spreads: dict[int, tuple[int, Int64, Int64]] = {}

    def place(stage: int, part: int, need: int, cycle: int) -> Int64:
        host = int(tasks.host[stage, part])
        memory, book = memories[host], books.places[host]
        room = memory.kv_room(int(plan.largest_chunks[current[host]]))
        room = room - book.resident[OWN] - book.resident[HOSTED]
        known = spreads.get(host)
        if known is not None and known[0] == need and np.array_equal(known[1], room):
            taken = known[2]
        else:
            taken = np.zeros_like(room)
            if sram.spread(room, quanta[stage], need, taken) != sram.FITS:
                raise KernelError(
                    f"stage {host} has no room for {need:,} KV quanta at cycle {cycle:,}"
                )
            spreads[host] = need, room, taken
        _post(book, OWN if part == 0 else HOSTED, taken, 1, cycle)
        return taken

    def free(stage: int, part: int, taken: Int64, cycle: int) -> None:
        host = int(tasks.host[stage, part])
        _post(books.places[host], OWN if part == 0 else HOSTED, taken, -1, cycle)

    for cycle, kind, stage, task, layer in events(tasks, schedule):
        before(cycle, books)
        here = held.setdefault((stage, layer), {})
        if kind == START:
            if layer == 0:
                load = memories[stage].load(int(plan.tokens[task]))
                active[stage] = load.dealing.expand(load.activations).ravel()
                _post(books.cores[stage], ACTIVATIONS, active[stage], 1, cycle)
                if books.dies[stage].capacity.size:
                    passing[stage] = memories[stage].die_activations(int(plan.tokens[task]))
                    _post(books.dies[stage], ACTIVATIONS, passing[stage], 1, cycle)
            for piece, part in plan.pieces.arriving[stage][task]:
                taken = place(stage, part, piece.tokens * int(per_layer[stage]), cycle)
                key = (part, piece.pushed if piece.late and part == 0 else -1)
                here[key] = here.get(key, 0) + taken
            continue
        if layer + 1 == tasks.layers[stage]:
            current[stage] += 1
            _post(books.cores[stage], ACTIVATIONS, active.pop(stage), -1, cycle)
            if stage in passing:
                _post(books.dies[stage], ACTIVATIONS, passing.pop(stage), -1, cycle)
        if (0, task) in here:
            free(stage, 0, here.pop((0, task)), cycle)
        if tasks.last[task]:
            for (part, _), taken in here.items():
                free(stage, part, taken, cycle)
            here.clear()
    return books
