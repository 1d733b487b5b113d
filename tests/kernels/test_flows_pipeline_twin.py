"""The slow twin of a pipeline with contention: closed forms, recurrences, cases worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive.flows import Work, run, xy_route

few = settings(max_examples=60, deadline=None)


def stages_on_a_row(
    durations, *, rate=4, hop=0, layers=None, arrival=None, handoff=None, hosts=None,
    read=None, write=None, ask=None, answer=None, grains_per_byte=1, slow=None,
):  # fmt: skip
    """Stages side by side; edges of ``rate`` bytes a cycle but for those in ``slow``."""
    stages, count = len(durations), len(durations[0])
    hosts = [[] for _ in range(stages)] if hosts is None else hosts
    nothing = [[[0] * count for _ in of_stage] for of_stage in hosts]
    cells = [(0, k) for k in range(stages)]
    edges = [(a, b) for a in cells for b in cells if abs(a[1] - b[1]) == 1]
    return Work(
        durations=durations,
        layers=[1] * stages if layers is None else layers,
        arrival=[0] * count if arrival is None else arrival,
        handoff_bytes=[[0] * count for _ in range(stages)] if handoff is None else handoff,
        hosts=hosts,
        read_bytes=read or nothing,
        write_bytes=write or nothing,
        ask_bytes=ask or nothing,
        answer_bytes=answer or nothing,
        route=lambda a, b: xy_route(cells[a], cells[b]),
        latency=[[hop * abs(a - b) for b in range(stages)] for a in range(stages)],
        capacity={edge: (slow or {}).get(edge, rate) * grains_per_byte for edge in edges},
        grains_per_byte=grains_per_byte,
    )  # fmt: skip


@st.composite
def transfers(draw):
    """A task of L layers, bytes that it reads and writes a layer over two hosts, its cycles."""
    size = st.integers(0, 30)
    return {
        "cycles": draw(st.integers(0, 60)),
        "layers": draw(st.integers(1, 4)),
        "there": [draw(size), draw(size)],
        "back": [draw(size), draw(size)],
        "hop": draw(st.integers(0, 3)),
        "grains": draw(st.integers(1, 3)),
    }


def cycles_of(sizes, hop, rate=4):
    """What the transfers to or from hosts one and two stages away take one after the other."""
    return sum(-(-b // rate) + hop * n for n, b in enumerate(sizes, start=1) if b)


@given(transfers(), st.booleans())
@few
def test_alone_a_task_stalls_as_the_formula_says(task, contention) -> None:
    work = stages_on_a_row(
        [[task["cycles"] * task["layers"]], [0], [0]],
        layers=[task["layers"], 1, 1],
        hop=task["hop"],
        hosts=[[1, 2], [], []],
        read=[[[b] for b in task["back"]], [], []],
        write=[[[b] for b in task["there"]], [], []],
        grains_per_byte=task["grains"],
    )
    cycles, layers = task["cycles"], task["layers"]
    read, write = cycles_of(task["back"], task["hop"]), cycles_of(task["there"], task["hop"])
    stall = read + (layers - 1) * max(0, read + write - cycles) + max(0, write - cycles)
    ran = run(work, contention=contention)
    assert ran.start[0] == [0]
    assert ran.end[0] == [cycles * layers + stall]


@given(transfers(), st.booleans())
@few
def test_alone_remote_attention_stalls_as_the_formula_says(task, contention) -> None:
    asked, answered = [3, 5], [9, 2]
    work = stages_on_a_row(
        [[task["cycles"] * task["layers"]], [0], [0]],
        layers=[task["layers"], 1, 1],
        hop=task["hop"],
        hosts=[[1, 2], [], []],
        write=[[[b] for b in task["there"]], [], []],
        ask=[[[b] for b in asked], [], []],
        answer=[[[b] for b in answered], [], []],
    )
    exchange = cycles_of(asked, task["hop"]) + cycles_of(answered, task["hop"])
    write = cycles_of(task["there"], task["hop"])
    stall = task["layers"] * (exchange + max(0, write - task["cycles"]))
    assert run(work, contention=contention).end[0] == [task["cycles"] * task["layers"] + stall]


def test_layers_share_cycles_as_evenly_as_whole_cycles_go() -> None:
    # 7 cycles in 3 layers: 2, 2, 3. Writes of 3 cycles stall the first two by one each.
    work = stages_on_a_row(
        [[7], [0]], layers=[3, 1], hosts=[[1], []], write=[[[12]], []]
    )  # fmt: skip
    assert run(work).end[0] == [9]


@pytest.mark.parametrize("contention", [True, False])
def test_handoffs_leave_in_order_one_at_a_time(contention) -> None:
    # Ends at 2, 4, 6; each output takes 5 cycles to leave and 3 more to arrive.
    work = stages_on_a_row([[2, 2, 2], [1, 1, 1]], hop=3, handoff=[[20, 20, 20], [0, 0, 0]])
    ran = run(work, contention=contention)
    assert ran.end[0] == [2, 4, 6]
    assert ran.input_ready[1] == [10, 15, 20]
    assert ran.start[1] == [10, 15, 20]
    assert ran.makespan == 21
    assert ran.carried == {((0, 0), (0, 1)): 60, ((0, 1), (0, 0)): 0}
    assert ran.busy == {((0, 0), (0, 1)): 15, ((0, 1), (0, 0)): 0}


def test_a_handoff_shares_its_edge_with_kv() -> None:
    # The first output (8 bytes, at 4) meets the second task's write to stage 1 (8 bytes, at 4).
    work = stages_on_a_row(
        [[4, 1], [1, 1]], handoff=[[8, 0], [0, 0]], hosts=[[1], []], write=[[[0, 8]], []]
    )  # fmt: skip
    ran = run(work)
    assert (ran.end[0], ran.input_ready[1]) == ([4, 8], [8, 8])
    ran = run(work, contention=False)
    assert (ran.end[0], ran.input_ready[1]) == ([4, 6], [6, 6])
    assert ran.carried == run(work).carried
    # Read back from stage 1 it goes the other way, and meets nothing.
    work = stages_on_a_row(
        [[4, 1], [1, 1]], handoff=[[8, 0], [0, 0]], hosts=[[1], []], read=[[[0, 8]], []]
    )  # fmt: skip
    assert run(work) == run(work, contention=False)


def test_the_next_layer_is_read_before_this_one_is_written() -> None:
    # The first output goes east in 0-4. The second task reads west in 0-2 and, beside its first
    # layer, in 2-4; then it writes east in 4-6 and 6-8. Had it written first, both would meet.
    work = stages_on_a_row(
        [[0, 0], [0, 0]], layers=[2, 1], handoff=[[16, 0], [0, 0]],
        hosts=[[1], []], read=[[[0, 8]], []], write=[[[0, 8]], []],
    )  # fmt: skip
    ran = run(work)
    assert (ran.end[0], ran.input_ready[1]) == ([0, 8], [4, 8])
    assert ran == run(work, contention=False)


def test_kv_of_two_stages_meets_on_the_way() -> None:
    # Stage 0 writes to stage 2 over both edges; stage 1 to stage 2 over the second, half as fast.
    # From 0 on both go at 1: stage 1's 10 bytes are gone at 10, then stage 0 goes at 2.
    second = ((0, 1), (0, 2))
    work = stages_on_a_row(
        [[0, 0], [30, 0], [0, 0]], slow={second: 2}, arrival=[0, 0],
        hosts=[[2], [2], []], write=[[[0, 30]], [[10, 0]], []],
    )  # fmt: skip
    ran = run(work)
    assert (ran.start[0], ran.end[0]) == ([0, 0], [0, 20])
    assert (ran.start[1], ran.end[1]) == ([0, 30], [30, 30])
    assert ran.carried[second] == 40
    assert run(work, contention=False).end[0] == [0, 15]


@given(st.data())
@few
def test_a_pipeline_without_contention_follows_its_recurrences(data) -> None:
    stages, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    numbers = st.integers(0, 9)
    table = st.lists(
        st.lists(numbers, min_size=count, max_size=count), min_size=stages, max_size=stages
    )
    cycles, sizes, hop = data.draw(table), data.draw(table), data.draw(numbers)
    arrival = data.draw(st.lists(numbers, min_size=count, max_size=count))
    work = stages_on_a_row(cycles, hop=hop, arrival=arrival, handoff=sizes, rate=2)
    ran = run(work, contention=False)
    ready = arrival
    for k in range(stages):
        end, after, gone = 0, [], 0
        for i in range(count):
            start = max(end, ready[i])
            assert (ran.input_ready[k][i], ran.start[k][i]) == (ready[i], start)
            end = start + cycles[k][i]
            assert ran.end[k][i] == end
            gone = max(gone, end) - (-sizes[k][i] // 2)
            arrives = gone + (hop if sizes[k][i] else 0)
            after.append(max(arrives, after[-1]) if after else arrives)
        ready = after
    assert ran.makespan == end
    # Hand-offs along a row never meet: contention changes nothing.
    assert run(work) == ran


@st.composite
def pipelines(draw):
    """Two to five stages on two rows, back and forth, each with up to two hosts."""
    stages, count = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    cells = [(k // 3, k % 3 if k < 3 else 5 - k) for k in range(stages)]

    def table(least, most, *shape):
        if not shape:
            return draw(st.integers(least, most))
        return [table(least, most, *shape[1:]) for _ in range(shape[0])]

    hosts = [draw(st.permutations(range(stages)))[:2] for _ in range(stages)]
    hosts = [[host for host in some if host != k] for k, some in enumerate(hosts)]
    grid = [(row, column) for row in range(2) for column in range(3)]
    return Work(
        durations=table(0, 20, stages, count),
        layers=table(1, 3, stages),
        arrival=table(0, 9, count),
        handoff_bytes=table(0, 20, stages, count),
        hosts=hosts,
        read_bytes=[table(0, 12, len(some), count) for some in hosts],
        write_bytes=[table(0, 12, len(some), count) for some in hosts],
        ask_bytes=[table(0, 2, len(some), count) for some in hosts],
        answer_bytes=[table(0, 2, len(some), count) for some in hosts],
        route=lambda a, b: xy_route(cells[a], cells[b]),
        latency=table(0, 4, stages, stages),
        capacity={
            (a, b): draw(st.integers(8, 24))
            for a in grid
            for b in grid
            if abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1
        },
        grains_per_byte=draw(st.integers(1, 3)),
    )


@given(pipelines())
@few
def test_contention_makes_nothing_earlier_and_carries_the_same(work) -> None:
    # Every flow takes as long as alone, or longer; all the rest is maxima and sums of what was.
    shared, alone = run(work), run(work, contention=False)
    for one, other in [
        (alone.input_ready, shared.input_ready),
        (alone.start, shared.start),
        (alone.end, shared.end),
    ]:
        assert (np.array(one) <= np.array(other)).all()
    sent = dict.fromkeys(work.capacity, 0)

    def send(source, target, moved_bytes):
        for edge in work.route(source, target):
            sent[edge] += moved_bytes * work.grains_per_byte

    for k, hosts in enumerate(work.hosts):
        if k + 1 < len(work.hosts):
            send(k, k + 1, sum(work.handoff_bytes[k]))
        for part, host in enumerate(hosts):
            send(
                host, k, sum(work.read_bytes[k][part] + work.answer_bytes[k][part]) * work.layers[k]
            )
            send(k, host, sum(work.write_bytes[k][part] + work.ask_bytes[k][part]) * work.layers[k])
    assert shared.carried == alone.carried == sent
    for edge, grains in work.capacity.items():
        assert sent[edge] <= grains * shared.busy[edge]
        assert shared.busy[edge] <= shared.makespan


@given(pipelines())
@few
def test_where_links_take_a_cycle_for_anything_nothing_contends(work) -> None:
    work.capacity = dict.fromkeys(work.capacity, 10**6)
    assert run(work) == run(work, contention=False)
