import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import partition as naive
from wafer_kernels import partition


def table_of(units, value):
    chunk, prefix = np.indices((units, units))
    return np.where(chunk + 1 + prefix <= units, value(chunk + 1, prefix), 0).astype(np.int64)


@st.composite
def tables(draw):
    units = draw(st.integers(1, 8))
    count = units * units
    values = draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    return np.array(values, np.int64).reshape(units, units)


@settings(max_examples=60, deadline=None)
@given(table=tables(), stages=st.integers(1, 9), max_chunks=st.integers(0, 5))
def test_terapipe_equals_brute_force_on_any_table(table, stages, max_chunks):
    sizes = partition.terapipe(table, stages, max_chunks)
    times = naive.chunk_times(table, sizes)
    assert sizes.sum() == len(table)
    assert not max_chunks or len(sizes) <= max_chunks
    assert sum(times) + (stages - 1) * max(times) == naive.terapipe(table, stages, max_chunks)


@pytest.mark.parametrize("stages", [1, 2, 7])
def test_terapipe_without_fixed_cost_takes_the_finest_grid(stages):
    sizes = partition.terapipe(table_of(12, lambda c, _: c), stages, 0)
    assert 12 + (stages - 1) == sizes.sum() + (stages - 1) * (sizes.max() if stages > 1 else 1)


def test_terapipe_with_fixed_cost_only_takes_one_chunk():
    assert list(partition.terapipe(table_of(12, lambda c, _: 0 * c + 5), 4, 0)) == [12]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    page=st.integers(1, 8),
    tile=st.integers(1, 9),
    fixed=st.integers(0, 50),
)
def test_best_page_move_equals_brute_force(sizes, page, tile, fixed):
    def cost(size, prefix):
        return fixed + -(-size // tile) * (2 + -(-prefix // tile))

    def shifted(chunk, prefix):
        starts = np.cumsum([0, *sizes])
        return np.array(
            [
                cost(size + chunk, start + prefix)
                if (chunk >= 0 or 2 * (size + chunk) >= page) and start + prefix >= 0
                else partition.UNREACHABLE
                for size, start in zip(sizes, starts, strict=False)
            ],
            np.int64,
        )

    times = partition.PageMoves(
        shifted(0, 0),
        shifted(-page, 0),
        shifted(page, 0),
        shifted(0, -page),
        shifted(0, page),
        shifted(page, -page),
        shifted(-page, page),
    )
    giver, taker, maximum = partition.best_page_move(times)
    expected = naive.best_page_move(sizes, page, cost)
    assert maximum == expected
    if giver < 0:
        assert taker < 0
        assert expected == naive.slowest(sizes, cost)
    else:
        sizes[giver] -= page
        sizes[taker] += page
        assert naive.slowest(sizes, cost) == expected


@pytest.mark.parametrize("max_chunks", [0, 16])
def test_terapipe_of_512_units_takes_less_than_a_second(max_chunks):
    table = table_of(512, lambda c, p: 1_000_000 + 438_000 * c + 10_700 * c * (p + c // 2))
    partition.terapipe(table[:4, :4].copy(), 16, max_chunks)
    started = time.thread_time()
    assert partition.terapipe(table, 16, max_chunks).sum() == 512
    assert time.thread_time() - started < 1.0
