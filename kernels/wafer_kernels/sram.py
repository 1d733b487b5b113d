"""The per-core ledger: what fills each core's memory, and the most it ever held.

KV is stored in quanta (one vector of one head, or one latent, of one token). A core with ``room``
bytes holds ``floor(room / quantum)`` quanta wherever the blocks before went, so that the capacity
of a region is one integer, and filling the emptiest cores first overflows none while another has
room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wafer_kernels._jit import kernel

__all__ = ["FITS", "OVERFLOW", "Ledger", "add", "capacity_quanta", "ledger", "spread"]

Int64 = npt.NDArray[np.int64]

FITS, OVERFLOW = 0, 1


class Ledger(NamedTuple):
    """Bytes of every core of a region, all int64.

    ``resident`` (class, core), ``total`` (core), ``capacity`` (core), ``peak`` (core) and
    ``peak_cycle`` (core); ``written`` and ``freed`` (class) count bytes for the balance.
    """

    resident: Int64
    total: Int64
    capacity: Int64
    peak: Int64
    peak_cycle: Int64
    written: Int64
    freed: Int64


def ledger(classes: int, capacity: Int64) -> Ledger:
    """Return an empty ledger of ``classes`` classes over cores of ``capacity`` bytes."""
    cores = capacity.size
    return Ledger(
        np.zeros((classes, cores), np.int64),
        np.zeros(cores, np.int64),
        capacity.astype(np.int64),
        np.zeros(cores, np.int64),
        np.zeros(cores, np.int64),
        np.zeros(classes, np.int64),
        np.zeros(classes, np.int64),
    )


@kernel()
def capacity_quanta(room: Int64, quantum: int) -> int:
    """Quanta that cores with ``room`` bytes hold together."""
    total = 0
    for core in range(room.size):
        total += max(0, room[core]) // quantum
    return total


@kernel()
def _held_above(room: Int64, quantum: int, level: int) -> int:
    """Quanta that cores take if each keeps ``level`` bytes of its room."""
    held = 0
    for core in range(room.size):
        if room[core] > level:
            held += (room[core] - level) // quantum
    return held


@kernel()
def spread(room: Int64, quantum: int, quanta: int, taken: Int64) -> int:
    """Deal ``quanta`` to cores so that the fullest is as empty as can be.

    The level is the largest room that every receiving core keeps; quanta too many at that level are
    given back by the first cores that stand exactly at it. ``taken`` (core) [bytes] is overwritten.
    Returns FITS or OVERFLOW (then nothing is taken).
    """
    taken[:] = 0
    if quanta == 0:
        return FITS
    if capacity_quanta(room, quantum) < quanta:
        return OVERFLOW
    # Rounding each core down loses less than a quantum: the level is at least what an even share
    # leaves. From there it is found by doubling steps, then by bisection.
    total = 0
    for core in range(room.size):
        total += max(0, room[core])
    low = max(0, (total - room.size * (quantum - 1) - quanta * quantum) // room.size)
    step = quantum
    while _held_above(room, quantum, low + step) >= quanta:
        low += step
        step *= 2
    high = low + step - 1
    while low < high:
        level = (low + high + 1) // 2
        if _held_above(room, quantum, level) >= quanta:
            low = level
        else:
            high = level - 1
    surplus = -quanta
    for core in range(room.size):
        if room[core] > low:
            taken[core] = (room[core] - low) // quantum * quantum
            surplus += taken[core] // quantum
    for core in range(room.size):
        if surplus > 0 and taken[core] > 0 and room[core] - taken[core] == low:
            taken[core] -= quantum
            surplus -= 1
    return FITS


@kernel()
def add(book: Ledger, kind: int, amount: Int64, sign: int, cycle: int) -> int:
    """Allocate (``sign`` 1) or free (-1) ``amount`` (core) bytes of class ``kind`` at ``cycle``.

    Returns FITS, or 1 + the first core that would hold more than its capacity, or less than
    nothing; the ledger is then left as far as it got.
    """
    for core in range(amount.size):
        change = amount[core]
        if change == 0:
            continue
        book.resident[kind, core] += sign * change
        book.total[core] += sign * change
        if sign > 0:
            book.written[kind] += change
        else:
            book.freed[kind] += change
        if book.total[core] > book.capacity[core] or book.resident[kind, core] < 0:
            return 1 + core
        if book.total[core] > book.peak[core]:
            book.peak[core] = book.total[core]
            book.peak_cycle[core] = cycle
    return FITS
