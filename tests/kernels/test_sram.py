"""The per-core ledger: how quanta are dealt to cores, and what adds up at all times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import sram as naive
from wafer_kernels.sram import FITS, OVERFLOW, add, capacity_quanta, ledger, spread

few = settings(max_examples=60, deadline=None)
rooms = st.lists(st.integers(0, 90), min_size=1, max_size=8)
quantum = st.integers(1, 12)
CLASSES = 3


def dealt(room, quantum, quanta):
    taken = np.full(len(room), -7, np.int64)
    status = spread(np.array(room, np.int64), quantum, quanta, taken)
    return status, taken.tolist()


@few
@given(rooms, quantum, st.integers(0, 60))
def test_spread_hands_out_what_the_twin_hands_out(room, quantum, quanta):
    expected = naive.spread(room, quantum, quanta)
    if expected is None:
        assert dealt(room, quantum, quanta) == (OVERFLOW, [0] * len(room))
    else:
        assert dealt(room, quantum, quanta) == (FITS, expected)


@few
@given(rooms, quantum)
def test_a_region_holds_its_capacity_and_not_one_quantum_more(room, quantum):
    capacity = capacity_quanta(np.array(room, np.int64), quantum)
    assert capacity == sum(bytes_free // quantum for bytes_free in room)
    status, taken = dealt(room, quantum, capacity)
    assert (status, sum(taken)) == (FITS, capacity * quantum)
    assert dealt(room, quantum, capacity + 1)[0] == OVERFLOW


@few
@given(rooms, quantum, st.data())
def test_no_core_fills_up_while_another_has_more_room(room, quantum, data):
    quanta = data.draw(st.integers(0, capacity_quanta(np.array(room, np.int64), quantum)))
    _, taken = dealt(room, quantum, quanta)
    left = [before - more for before, more in zip(room, taken, strict=True)]
    assert min(left) >= 0
    assert all(more % quantum == 0 for more in taken)
    assert sum(taken) == quanta * quantum
    fullest = min((rest for rest, more in zip(left, taken, strict=True) if more), default=None)
    if fullest is not None:  # moving a quantum from the fullest core elsewhere gains nothing
        assert all(rest - quantum <= fullest for rest in left)


@few
@given(st.integers(1, 8), quantum, st.integers(0, 60))
def test_equal_cores_differ_by_at_most_one_quantum(cores, quantum, quanta):
    _, taken = dealt([quantum * 60] * cores, quantum, quanta)
    assert max(taken) - min(taken) in ((0,) if quanta % cores == 0 else (quantum,))
    assert taken == sorted(taken)  # the first cores give back what is too many


def test_the_emptiest_core_is_filled_to_the_level_of_the_next():
    assert dealt([100, 40, 40], 10, 6) == (FITS, [60, 0, 0])
    assert dealt([100, 40, 40], 10, 8) == (FITS, [60, 10, 10])
    assert dealt([100, 40, 40], 10, 7) == (FITS, [60, 0, 10])
    assert dealt([9, 9, 9], 10, 1) == (OVERFLOW, [0, 0, 0])
    assert dealt([9, 9, 9], 10, 0) == (FITS, [0, 0, 0])


class Books:
    """The kernel's ledger and the twin's cores, kept side by side."""

    def __init__(self, capacity):
        self.book = ledger(CLASSES, np.array(capacity, np.int64))
        self.cores = [naive.Core(limit, CLASSES) for limit in capacity]
        self.written, self.freed = [0] * CLASSES, [0] * CLASSES

    def add(self, kind, amount, sign, cycle):
        """Return the kernel's answer and the first core at which the twin refuses, from 1."""
        refused = 0
        for number, (core, more) in enumerate(zip(self.cores, amount, strict=True)):
            if not core.add(kind, sign * more, cycle):
                refused = number + 1
                break
            (self.written if sign > 0 else self.freed)[kind] += more
        status = add(self.book, kind, np.array(amount, np.int64), sign, cycle)
        return status, refused

    def agree(self):
        found, cores = self.book, self.cores
        assert found.resident.T.tolist() == [core.resident for core in cores]
        assert found.total.tolist() == [core.total for core in cores]
        assert found.peak.tolist() == [core.peak for core in cores]
        assert found.peak_cycle.tolist() == [core.peak_cycle for core in cores]
        assert found.written.tolist() == self.written
        assert found.freed.tolist() == self.freed


changes = st.tuples(st.integers(0, CLASSES - 1), st.sampled_from([1, -1]), st.integers(0, 5))


@few
@given(st.lists(st.integers(0, 60), min_size=1, max_size=4), st.data())
def test_ledger_is_the_twin_after_every_change(capacity, data):
    books = Books(capacity)
    cycle = 0
    for kind, sign, later in data.draw(st.lists(changes, max_size=12)):
        cycle += later
        size = st.integers(0, 25)
        amount = data.draw(st.lists(size, min_size=len(capacity), max_size=len(capacity)))
        status, refused = books.add(kind, amount, sign, cycle)
        assert status == refused
        if refused:
            return
        books.agree()
        book = books.book
        assert (book.resident.sum(1) == book.written - book.freed).all()
        assert (book.total <= book.peak).all()
        assert (book.peak <= book.capacity).all()


def test_peak_is_the_first_cycle_of_the_most():
    book = ledger(1, np.array([10], np.int64))
    for cycle, (amount, sign) in enumerate([(6, 1), (4, 1), (4, -1), (4, 1)]):
        assert add(book, 0, np.array([amount], np.int64), sign, cycle) == FITS
    assert (book.peak.tolist(), book.peak_cycle.tolist()) == ([10], [1])


@pytest.mark.parametrize(
    ("kind", "amount", "sign", "core"), [(0, [2, 5], 1, 2), (1, [1, 0], -1, 1)]
)
def test_a_refused_change_names_the_first_core(kind, amount, sign, core):
    """Two cores of 10 bytes hold 4 and 6 bytes of class 0: no room for 5, nothing of class 1."""
    book = ledger(2, np.array([10, 10], np.int64))
    assert add(book, 0, np.array([4, 6], np.int64), 1, 0) == FITS
    assert add(book, kind, np.array(amount, np.int64), sign, 1) == core
