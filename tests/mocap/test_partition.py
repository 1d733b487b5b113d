import csv
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocap import overhead, partition
from mocap.least_time import LeastTime
from tests.naive import partition as naive
from wafer_kernels.errors import UsageError

PUBLISHED = Path(__file__).parents[2] / "data" / "published"
SHAPES = {"causal": 0.5, "rectangular": 1.0}


def published(name):
    with (PUBLISHED / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def llama_70b_stage(shape):
    """Milliseconds of 5 Llama-3-70B-like layers at 130 TFLOP/s, 1 ms fixed."""

    def cost(chunk, prefix):
        attention = 32_768 * chunk * (prefix + SHAPES[shape] * chunk)
        return 1 + 1000 * 5 * (1_711_276_032 * chunk + attention) / 130e12

    return cost


def smooth(chunk, prefix):
    return 500_000 + 1711 * chunk + chunk * (2 * prefix + chunk) // 64


@st.composite
def staircases(draw):
    """Tile costs: rising in the chunk and in the prefix, by steps."""
    tile = draw(st.integers(1, 40))
    fixed, linear, passes = (draw(st.integers(0, 50)) for _ in range(3))

    def cost(chunk, prefix):
        return fixed + -(-chunk // tile) * (1 + linear + passes * -(-(prefix + chunk) // tile))

    return cost


# uniform


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 64))
def test_uniform_deals_whole_pages_and_one_ragged_one(tokens, chunks, page):
    sizes = partition.uniform(tokens, chunks, page)
    assert sum(sizes) == tokens
    assert len(sizes) == min(chunks, tokens)
    assert max(sizes) - min(sizes) < 2 * page
    if tokens >= chunks * page:
        assert sum(size % page != 0 for size in sizes) == (tokens % page != 0)
        assert min(sizes) >= page


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 64))
def test_one_more_token_shortens_no_uniform_chunk(tokens, chunks, page):
    longer = partition.uniform(tokens + 1, chunks, page)
    shorter = partition.uniform(tokens, chunks, page)
    assert all(a <= b for a, b in zip(shorter, longer, strict=False))
    assert partition.makespan(shorter, smooth, 8) <= partition.makespan(longer, smooth, 8)


def test_fixed_sizes_leave_the_rest_to_the_last_chunk():
    assert partition.fixed(10, 4) == [4, 4, 2]
    assert partition.fixed(8, 4) == [4, 4]
    assert partition.fixed(3, 4) == [3]


def test_counts_must_be_positive():
    for call in (
        lambda: partition.uniform(0, 4),
        lambda: partition.uniform(4, 0),
        lambda: partition.lbcp(-1, 4, smooth),
        lambda: partition.terapipe(16, 0, smooth),
        lambda: partition.terapipe(16, 2, smooth, step=0),
        lambda: partition.terapipe(16, 2, smooth, max_chunks=0),
        lambda: partition.seq1f1b(3, 4, 1.0, 1.0),
    ):
        with pytest.raises(UsageError):
            call()


# TeraPipe


@pytest.mark.parametrize(
    "row",
    published("terapipe_golden"),
    ids=lambda row: "-".join([row["b"], row["attention_form"], row["stages"]]),
)
def test_terapipe_equals_the_brute_force_of_others(row):
    t0, a, b = (float(row[key]) for key in ("t0", "a", "b"))
    share, stages = SHAPES[row["attention_form"]], int(row["stages"])

    def cost(chunk, prefix):
        return t0 + a * chunk + b * chunk * (prefix + share * chunk)

    sizes = partition.terapipe(int(row["units"]), stages, cost, step=1)
    assert partition.makespan(sizes, cost, stages) == pytest.approx(float(row["best_time"]), 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 50), st.integers(1, 8), st.integers(1, 8), staircases())
def test_terapipe_is_never_slower_than_cuts_on_its_grid(units, stages, chunks, cost):
    best = partition.terapipe(8 * units, stages, cost, step=8, max_chunks=chunks)
    assert sum(best) == 8 * units
    assert len(best) <= chunks
    if units >= chunks:
        for sizes in (
            partition.uniform(8 * units, chunks, 8),
            partition.lbcp(8 * units, chunks, cost, 8, stages=stages),
        ):
            slower = partition.makespan(sizes, cost, stages)
            assert partition.makespan(best, cost, stages) <= slower


class Rising:
    """A cost that never falls, and says so."""

    monotone = True

    def __init__(self, cost):
        self._cost = cost

    def __call__(self, chunk, prefix):
        return self._cost(chunk, prefix)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 600),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(1, 20)),
    st.integers(0, 900),
    st.one_of(st.none(), st.integers(5, 40)),
    staircases(),
)
def test_terapipe_leaves_out_no_chunk_of_a_best_cut(tokens, stages, most, prefix, step, cost):
    known = partition.terapipe(tokens, stages, Rising(cost), step, most, prefix)
    assert known == partition.terapipe(tokens, stages, cost, step, most, prefix)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(1, 6), staircases())
def test_no_cut_takes_less_than_the_least_time(sizes, stages, cost):
    bound = partition.makespan(sizes, cost, stages, 40)
    least = LeastTime(cost, sum(sizes), 40, stages).of_all(bound)
    assert 0 < least * (1 - 1e-9) <= sum(partition.times(sizes, cost, 40))


def test_on_a_smooth_cost_the_least_time_is_near():
    sizes = partition.terapipe(32_768, 4, smooth, 256, 32)
    bound = partition.makespan(sizes, smooth, 4)
    least = LeastTime(smooth, 32_768, 0, 4).of_all(bound)
    assert least > 0.8 * sum(partition.times(sizes, smooth))


def test_terapipe_lets_the_last_unit_be_shorter():
    sizes = partition.terapipe(1000, 4, smooth, step=64)
    assert sum(sizes) == 1000
    assert all(size % 64 == 0 for size in sizes[:-1])


@pytest.mark.parametrize("cost", [smooth, lambda c, p: 900 + -(-c // 256) * (64 + (p + c) // 256)])
def test_terapipe_without_a_step_refines_the_coarse_grid_to_pages(cost):
    coarse = partition.terapipe(131_072, 16, cost, 512, 16)
    fine = partition.terapipe(131_072, 16, cost, None, 16, page_tokens=16)
    assert sum(fine) == 131_072
    assert all(size % 16 == 0 for size in fine)
    assert partition.makespan(fine, cost, 16) <= partition.makespan(coarse, cost, 16)
    balanced = partition.lbcp(131_072, 16, cost, 16, stages=16)
    assert partition.makespan(fine, cost, 16) <= 1.01 * partition.makespan(balanced, cost, 16)


def test_terapipe_takes_the_whole_table_from_a_vectorised_cost():
    class Vectorised:
        calls = 0

        def __call__(self, chunk, prefix):
            raise AssertionError

        def table(self, chunks, prefixes):
            self.calls += 1
            return smooth(chunks, prefixes)

    cost = Vectorised()
    assert partition.terapipe(4096, 4, cost, 64, 8) == partition.terapipe(4096, 4, smooth, 64, 8)
    assert cost.calls == 1


def test_terapipe_counts_the_prefix():
    sizes = partition.terapipe(4096, 8, smooth, 64, 8, prefix_tokens=65_536)
    shifted = partition.terapipe(4096, 8, lambda c, p: smooth(c, p + 65_536), 64, 8)
    assert sizes == shifted


# LBCP


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 1500), st.integers(1, 9), st.integers(1, 48), st.integers(0, 200), staircases()
)
def test_no_page_move_lowers_the_slowest_chunk_of_lbcp(tokens, chunks, page, prefix, cost):
    sizes = partition.lbcp(tokens, chunks, cost, page, prefix)

    def time(size, start):
        return cost(size, prefix + start)

    step = page if tokens >= chunks * page else 1
    assert sum(sizes) == tokens
    assert len(sizes) == min(chunks, tokens)
    assert min(sizes) * 2 >= step
    assert naive.best_page_move(sizes, step, time) == naive.slowest(sizes, time)
    assert naive.slowest(sizes, time) <= naive.slowest(
        partition.uniform(tokens, chunks, page), time
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 11), st.integers(1, 5), st.integers(0, 60), st.integers(1, 9))
def test_lbcp_finds_the_least_maximum_of_all_cuts(units, chunks, fixed, attention):
    chunks = min(chunks, units)

    def cost(size, prefix):
        return fixed + 3 * size + attention * size * (2 * prefix + size)

    everything = min(naive.slowest(s, cost) for s in naive.splits(units) if len(s) == chunks)
    assert naive.slowest(partition.lbcp(units, chunks, cost), cost) == everything


@pytest.mark.parametrize(("tokens", "chunks"), [(131_072, 16), (131_072, 8), (32_768, 16)])
def test_lbcp_on_a_smooth_cost(tokens, chunks):
    sizes = partition.lbcp(tokens, chunks, smooth, page_tokens=16, stages=chunks)
    chunk_times = partition.times(sizes, smooth)
    assert len(sizes) == chunks
    assert all(size % 16 == 0 for size in sizes)
    assert max(chunk_times) < 1.01 * min(chunk_times)
    assert all(b <= a + 16 for a, b in pairwise(sizes))
    best = partition.terapipe(tokens, chunks, smooth, tokens // 512, chunks)
    lbcp_makespan = partition.makespan(sizes, smooth, chunks)
    assert lbcp_makespan < 1.01 * partition.makespan(best, smooth, chunks)
    assert max(chunk_times) <= max(partition.times(best, smooth)) * 1.001


@given(
    st.integers(1, 40),
    st.integers(1, 8),
    st.lists(st.integers(0, 30), min_size=41, max_size=41),
    st.lists(st.integers(-9, 9), min_size=41, max_size=41),
)
def test_lbcp_cuts_all_tokens_whatever_the_cost(units, chunks, steps, dips):
    """Costs that fall as a prefix grows, as where moves cost less later: bounds are not nested."""

    def cost(size, prefix):
        return sum(steps[:size]) + max(0, 10 + dips[prefix])

    sizes = partition.lbcp(units, chunks, cost)
    assert sum(sizes) == units
    assert len(sizes) == min(chunks, units)
    assert min(sizes) > 0
    even = partition.uniform(units, chunks, 1)
    assert naive.slowest(sizes, cost) <= naive.slowest(even, cost)


def test_lbcp_works_on_measured_seconds():
    seconds = partition.lbcp(131_072, 16, lambda c, p: 1e-9 * smooth(c, p), 16)
    cycles = partition.lbcp(131_072, 16, smooth, 16)
    assert partition.makespan(seconds, smooth, 16) == pytest.approx(
        partition.makespan(cycles, smooth, 16), 1e-4
    )


def test_lbcp_asks_for_few_costs():
    asked = set()

    def cost(chunk, prefix):
        asked.add((chunk, prefix))
        return smooth(chunk, prefix)

    partition.lbcp(131_072, 16, cost, 16)
    assert len(asked) < 4000  # of 8192 * 8193 / 2


def test_lbcp_keeps_uniform_cuts_where_they_are_faster():
    # a chunk of an odd number of pages stalls: equal times cost more in sum than they save
    def cost(chunk, prefix):
        return 100 + chunk + (1000 if chunk % 32 else 0) + prefix // 512

    sizes = partition.lbcp(1024, 4, cost, 16, stages=1)
    assert partition.makespan(sizes, cost, 1) <= partition.makespan([256] * 4, cost, 1)


@pytest.mark.parametrize("reading", ["a", "b", "c"])
@pytest.mark.parametrize("link", [1, 10, 50])
def test_chunks_that_pay_for_moves_shrink(reading, link):
    tokens, chunks, local, lag = 65_536, 16, 49_152, 32_768
    first, second, remote_from = {
        "a": (local, local, local),
        "b": (local + lag - tokens, local, local),
        "c": (lag, lag, lag),
    }[reading]
    price = overhead.three_case(first, second, remote_from, 4096, 64 * link)
    cost = overhead.with_overhead(smooth, price)
    plain = partition.lbcp(tokens, chunks, smooth, 16, stages=chunks)
    aware = partition.lbcp(tokens, chunks, cost, 16, stages=chunks)
    assert partition.makespan(aware, cost, chunks) <= partition.makespan(plain, cost, chunks)
    assert aware[-1] < plain[-1]
    assert aware[0] >= plain[0]


def test_three_cases_of_the_overhead():
    price = overhead.three_case(100, 200, 100, 10, 4)
    assert price(0, 99) == 0  # s = 99 < p1
    assert price(90, 20) == 25  # s = 110: 10 of 20 tokens leave
    assert price(150, 20) == 50  # s = 170: all 20 tokens leave
    assert price(190, 20) == 50 + 225  # s = 210 >= p2: 90 tokens come back as well
    assert price(150, 21) == 53  # 52.5 cycles end at the ceiling


# golden numbers of equal time and of others' rules


EQUAL_TIME = {
    (131_072, 16, "rectangular"): (
        "14919 12567 11038 9948 9122 8469 7936 7491 7113 6786 6500 6247 6021 5817 5633 5465",
        1263.48,
        48547.0,
        39167.7,
    ),
    (131_072, 16, "causal"): (
        "16016 12915 11125 9921 9039 8358 7811 7359 6978 6650 6364 6113 5889 5688 5506 5341",
        1216.81,
        47236.0,
        37721.0,
    ),
    (131_072, 8, "rectangular"): (
        "26394 20860 17708 15624 14123 12977 12066 11321",
        2616.23,
        47315.1,
        39243.4,
    ),
    (131_072, 8, "causal"): (
        "28931 21045 17398 15170 13627 12477 11577 10847",
        2432.61,
        44777.8,
        36489.2,
    ),
    (32_768, 16, "rectangular"): (
        "2602 2489 2389 2301 2221 2149 2084 2024 1969 1918 1871 1827 1786 1748 1712 1678",
        180.78,
        6197.3,
        5604.1,
    ),
}


@pytest.mark.parametrize("case", EQUAL_TIME, ids=str)
def test_equal_time_sizes(case):
    tokens, stages, shape = case
    sizes, each, even, total = EQUAL_TIME[case]
    cost = llama_70b_stage(shape)
    real = partition.equal_time(tokens, stages, cost)
    assert [round(size) for size in real] == list(map(int, sizes.split()))
    assert partition.times(real, cost) == pytest.approx([each] * stages, abs=0.006)
    assert partition.makespan(real, cost, stages) == pytest.approx(total, abs=0.06)
    uniform = partition.uniform(tokens, stages)
    assert partition.makespan(uniform, cost, stages) == pytest.approx(even, abs=0.06)
    balanced = partition.lbcp(tokens, stages, cost)
    assert max(abs(a - b) for a, b in zip(balanced, real, strict=True)) < stages
    assert max(partition.times(balanced, cost)) == pytest.approx(each, 1e-3)


def test_equal_time_of_a_short_causal_prompt():
    """The golden row that has no sizes: 32,768 tokens, 16 stages."""
    cost = llama_70b_stage("causal")
    real = partition.equal_time(32_768, 16, cost)
    assert partition.times(real, cost) == pytest.approx([178.09] * 16, abs=0.006)
    assert partition.makespan(real, cost, 16) == pytest.approx(5520.6, abs=0.06)
    uniform = partition.uniform(32_768, 16)
    assert partition.makespan(uniform, cost, 16) == pytest.approx(6115.3, abs=0.06)


def test_pipeline_of_real_chips_keeps_the_schedule_identity():
    """Tenstorrent, DeepSeek-V3, 11 chunks: sum t + (K - 1) max t from measured chunk times."""
    rows = [row for row in published("tenstorrent_pipeline") if row["model"] == "DeepSeek-V3"]
    for ranks in ("1", "2"):
        time = {
            row["quantity"]: float(row["time_ms"]) for row in rows if row["pipeline_ranks"] == ranks
        }
        mean = time["chunk_mean_over_chunks_and_ranks"]
        last = time["chunk_last_mean_over_ranks"]
        others = (11 * mean - last) / 10
        total = partition.makespan(
            partition.fixed(56_320, 5120),
            lambda _, prefix, last=last, others=others: last if prefix == 51_200 else others,
            int(ranks),
        )
        assert total == pytest.approx(time["end_to_end"], rel=0.02)


def test_hinge_of_real_chips():
    """Tenstorrent, Llama-3.1-8B: 128 chunks, flat to 40k tokens of prefix, then linear."""
    rows = [row for row in published("tenstorrent_pipeline") if row["model"] == "Llama-3.1-8B"]
    measured = {int(r["prefix_tokens"]): float(r["time_ms"]) for r in rows if r["prefix_tokens"]}
    (total,) = (float(r["time_ms"]) for r in rows if r["quantity"] == "end_to_end")

    def hinge(chunk, prefix):
        return max(123.5, 42.6 + 2.008e-3 * prefix) * chunk / 1024

    for prefix, time in list(measured.items())[1:]:
        assert hinge(1024, prefix) == pytest.approx(time, rel=0.02)
    sizes = partition.fixed(131_072, 1024)
    assert partition.makespan(sizes, hinge, 1) == pytest.approx(total, 0.02)
    uniform = partition.uniform(131_072, 16, 64)
    balanced = partition.lbcp(131_072, 16, hinge, 64, stages=8)
    assert max(partition.times(balanced, hinge)) < 1.02 * min(partition.times(balanced, hinge))
    assert partition.makespan(balanced, hinge, 8) < 0.9 * partition.makespan(uniform, hinge, 8)


def test_linear_hinges_need_no_smoothness():
    cost = lambda c, p: max(1000, c * 3, (p - 500) * c // 40)  # noqa: E731
    sizes = partition.lbcp(2000, 6, cost, 10)
    assert naive.best_page_move(sizes, 10, cost) == naive.slowest(sizes, cost)
    assert np.all(np.array(sizes) > 0)
