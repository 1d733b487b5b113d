"""The pipeline's event loop and admission: against the twin, and makespans of known pipelines."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import pipeline as naive
from wafer_kernels.pipeline import DEADLOCK, DONE, Tasks, no_traffic, run, schedule
from wafer_kernels.slots import ADMITTED, admit

few = settings(max_examples=60, deadline=None)


def array(values):
    return np.array(values, dtype=np.int64)


def plan(
    duration, *, handoff=None, arrival=None, last=None, host=None, need=None, leave=None,
    layers=None, capacity=None,
):  # fmt: skip
    """Tasks of ``duration`` (stage, task); without more, of one request that needs no memory."""
    duration = array(duration)
    stages, count = duration.shape
    nothing = np.zeros((stages, count), np.int64)
    return Tasks(
        arrival=nothing[0] if arrival is None else array(arrival),
        last=array([i == count - 1 for i in range(count)] if last is None else last),
        duration=duration,
        handoff=nothing if handoff is None else array(handoff),
        host=array([[k] for k in range(stages)]) if host is None else array(host),
        need=nothing[:, np.newaxis] if need is None else array(need),
        leave=nothing if leave is None else array(leave),
        layers=np.ones(stages, np.int64) if layers is None else array(layers),
        capacity=np.zeros((stages, count + 1), np.int64) if capacity is None else array(capacity),
    )


def admitted(tasks):
    slot, short = np.full(tasks.arrival.size, -1, np.int64), np.zeros(3, np.int64)
    return admit(tasks, slot, short), slot, short.tolist()


def ran(tasks, slot):
    out = schedule(tasks)
    return run(tasks, slot, *no_traffic(tasks), out), out


def least_capacity(tasks):
    """The least capacity, never smaller for a later task, at which every request fits alone."""
    stages, count = tasks.duration.shape
    slot = {}
    for group in naive.requests(tasks):
        first = max(slot.values(), default=0) + stages + 1
        slot |= {i: first + n for n, i in enumerate(group)}
    least = np.zeros((stages, count + 1), np.int64)
    for now in range(max(slot.values()) + stages):
        for stage in range(stages):
            at = sum(place + stage < now for place in slot.values())
            least[stage, at] = max(least[stage, at], naive.held(tasks, slot, stage, now))
    return np.maximum.accumulate(least, axis=1)


@st.composite
def plans(draw, least_slack=0, most_slack=4, most_duration=7):
    """Ragged needs at home and on two other stages, and hardly more memory than a request needs.

    Whole tasks or up to three layers of them are granted at a time; some of what is at home leaves
    before its request ends.
    """
    stages, count = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    layers = array([draw(st.integers(1, 3)) for _ in range(stages)])

    def table(values, *shape):
        if not shape:
            return draw(values)
        return [table(values, *shape[1:]) for _ in range(shape[0])]

    host, need = [], []
    for k in range(stages):
        others = draw(st.permutations([x for x in range(stages) if x != k]))[:2]
        unused = 2 - len(others)
        host.append([k, *others, *[k] * unused])
        need.append([*table(st.integers(0, 4), 1 + len(others), count), *[[0] * count] * unused])
    last = [*table(st.integers(0, 1), count - 1), 1]
    leave = table(st.integers(0, 4), stages, count)
    for k in range(stages):
        at_home = 0
        for i in range(count):
            at_home += need[k][0][i]
            leave[k][i] = min(leave[k][i], at_home)
            at_home = 0 if last[i] else at_home - leave[k][i]
    tasks = plan(
        array(table(st.integers(1, most_duration), stages, count)) + layers[:, np.newaxis] - 1,
        handoff=table(st.integers(0, 5), stages, count),
        arrival=table(st.integers(0, 12), count),
        last=last,
        host=host,
        need=array(need) * layers[:, np.newaxis, np.newaxis],
        leave=array(leave) * layers[:, np.newaxis],
        layers=layers,
    )
    slack = array(table(st.integers(least_slack, most_slack), stages, 1))
    growth = np.cumsum(table(st.integers(0, 1), stages, count + 1), axis=1)
    return tasks._replace(capacity=np.maximum(0, least_capacity(tasks) + slack + growth))


def same_schedule(tasks, slot):
    status, out = ran(tasks, slot)
    twin = naive.Pipeline(tasks, slot.tolist())
    finished = twin.run()
    assert status == (DONE if finished else DEADLOCK)
    assert out.peak.tolist() == twin.peak
    for k, i in np.ndindex(out.start.shape):
        ready = twin.input_ready(k, i)
        assert out.input_ready[k, i] == (-1 if ready is None else ready)
    for (k, i, j), layer in twin.layers.items():
        if layer.start is None:
            continue
        assert (out.layer_start[k, i, j], out.layer_end[k, i, j]) == (layer.start, layer.end)
        if j == 0:
            assert (out.start[k, i], out.memory_wait[k, i]) == (layer.start, layer.wait)
        if layer is twin.final(k, i) and twin.ended(layer):
            waits = [twin.layers[k, i, each].wait for each in range(1, j + 1)]
            assert (out.end[k, i], out.layer_wait[k, i]) == (layer.end, sum(waits))
    return finished


def holds(tasks, out, stage, cycle):
    """Quanta on a stage just after a cycle's frees and grants, and the task it is then at."""
    total, first = 0, 0
    for i in range(tasks.arrival.size):
        end_of_request = i + int(np.argmax(tasks.last[i:]))
        for home, hosts in enumerate(tasks.host):
            for layer in range(int(tasks.layers[home])):
                begun = out.layer_start[home, i, layer] <= cycle
                if begun and cycle < out.layer_end[home, end_of_request, layer]:
                    total += int(tasks.need[home, hosts == stage, i].sum() // tasks.layers[home])
                    if home == stage and out.layer_end[home, i, layer] <= cycle:
                        total -= int(tasks.leave[home, i] // tasks.layers[home])
        first += int(out.end[stage, i] <= cycle)
    return total, first


@few
@given(plans(-2, 3))
def test_admission_is_the_twin_that_tries_all_slots(tasks):
    status, slot, short = admitted(tasks)
    slots, refused = naive.admit(tasks)
    if refused is None:
        assert (status, slot.tolist()) == (ADMITTED, slots)
        return
    assert status == 1 + refused
    stage, at, quanta = short
    request = next(group for group in naive.requests(tasks) if group[0] == refused)
    first = refused + len(tasks.duration)  # by then the requests before have left all stages
    alone = {i: i for i in range(refused)} | {i: first + n for n, i in enumerate(request)}
    assert naive.shortages(tasks, alone)[stage, first + at] == quanta


@few
@given(plans())
def test_schedule_of_an_admitted_plan_is_the_twin(tasks):
    status, slot, _ = admitted(tasks)
    assert status == ADMITTED
    assert same_schedule(tasks, slot)


@few
@given(plans(-3, 1, most_duration=2))
def test_schedule_of_any_plan_is_the_twin_deadlocks_too(tasks):
    same_schedule(tasks, np.arange(tasks.arrival.size, dtype=np.int64))


@few
@given(plans())
def test_an_admitted_plan_never_deadlocks_and_never_exceeds_capacity(tasks):
    _, slot, _ = admitted(tasks)
    done, out = ran(tasks, slot)
    assert done == DONE
    peak = [0] * len(tasks.duration)
    for cycle in {*out.layer_start.ravel().tolist(), *out.layer_end.ravel().tolist()}:
        for stage in range(len(peak)):
            quanta, task = holds(tasks, out, stage, cycle)
            assert quanta <= tasks.capacity[stage, task]
            peak[stage] = max(peak[stage], quanta)
    assert out.peak.tolist() == peak
    assert (out.peak <= tasks.capacity[:, -1]).all()


@few
@given(plans())
def test_tasks_wait_for_input_stage_and_memory_only(tasks):
    _, slot, _ = admitted(tasks)
    _, out = ran(tasks, slot)
    free = np.hstack([np.zeros((len(out.end), 1), np.int64), out.end[:, :-1]])
    assert (out.end - out.start == tasks.duration + out.layer_wait).all()
    assert (out.layer_wait >= 0).all()
    for k, layers in enumerate(tasks.layers):
        starts, ends = out.layer_start[k, :, :layers], out.layer_end[k, :, :layers]
        assert ((ends - starts).sum(axis=1) == tasks.duration[k]).all()
        assert (starts[:, 1:] - ends[:, :-1]).sum() == out.layer_wait[k].sum()
    assert (out.start - np.maximum(free, out.input_ready) == out.memory_wait).all()
    assert (out.memory_wait >= 0).all()


stages = st.integers(1, 8)
times = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@few
@given(stages, times)
def test_equal_stages_take_the_sum_and_the_longest_for_every_further_stage(count, cycles):
    status, out = ran(plan([cycles] * count), np.arange(len(cycles)))
    assert status == DONE
    assert out.end.max() == sum(cycles) + (count - 1) * max(cycles)
    assert not out.memory_wait.any()


@few
@given(stages, st.integers(1, 10), st.integers(1, 100))
def test_whole_requests_fill_and_drain_the_pipeline(count, requests, cycles):
    tasks = plan([[cycles] * requests] * count, last=[1] * requests)
    _, out = ran(tasks, np.arange(requests))
    assert out.end.max() == (requests + count - 1) * cycles


@few
@given(stages, st.integers(1, 40), st.integers(0, 9), st.integers(0, 99))
def test_one_task_passes_all_stages_with_its_handoffs(count, cycles, handoff, arrival):
    tasks = plan([[cycles]] * count, handoff=[[handoff]] * count, arrival=[arrival])
    _, out = ran(tasks, np.zeros(1, np.int64))
    assert out.end.max() == arrival + count * cycles + (count - 1) * handoff


def test_a_request_waits_for_the_memory_of_the_one_before():
    """One stage of 3 quanta; two requests of 2: the second may start only after the first."""
    tasks = plan(
        [[10, 10, 10, 10]],
        last=[0, 1, 0, 1],
        need=[[[1, 1, 1, 1]]],
        capacity=[[3] * 5],
    )
    status, slot, _ = admitted(tasks)
    assert (status, slot.tolist()) == (ADMITTED, [0, 1, 2, 3])
    _, out = ran(tasks, slot)
    assert (out.peak.tolist(), out.end.max()) == ([2], 40)


def test_a_later_request_is_moved_by_whole_slots_and_its_wait_is_memory():
    """Stage 1 keeps its KV on stage 0, which then has no room for the next request at once."""
    tasks = plan(
        [[10, 10], [10, 10]],
        last=[1, 1],
        host=[[0, 0], [1, 0]],
        need=[[[2, 2], [0, 0]], [[0, 0], [2, 2]]],
        capacity=[[3] * 3, [0] * 3],
    )
    status, slot, _ = admitted(tasks)
    assert (status, slot.tolist()) == (ADMITTED, [0, 2])
    _, out = ran(tasks, slot)
    assert out.start.tolist() == [[0, 20], [10, 30]]
    assert out.memory_wait.tolist() == [[0, 10], [0, 0]]


def test_at_equal_slots_the_earlier_stage_takes_memory_first():
    """Stages 0 and 1 lend to stage 2, which holds 3 quanta: task 0 on stage 1 lets task 1 pass."""
    tasks = plan(
        [[1, 1]] * 3,
        arrival=[0, 50],
        last=[1, 1],
        host=[[0, 2], [1, 2], [2, 2]],
        need=[[[0, 0], [0, 2]], [[0, 0], [2, 0]], [[0, 0], [0, 0]]],
        capacity=[[0] * 3, [0] * 3, [3] * 3],
    )
    assert same_schedule(tasks, np.arange(2))
    _, out = ran(tasks, np.arange(2))
    assert (out.start[0, 1], out.start[1, 0], out.memory_wait[1, 0]) == (50, 51, 50)


def test_a_request_that_does_not_fit_alone_says_where_and_how_much():
    tasks = plan(
        [[1, 1, 1], [1, 1, 1]],
        need=[[[1, 1, 1]], [[1, 1, 3]]],
        capacity=[[9] * 4, [3] * 4],
    )
    status, _, short = admitted(tasks)
    assert (status, short) == (1, [1, 3, 2])  # stage 1 meets the third chunk in slot 3


def longest(stages, chunks, partner, capacity, layers=1):
    """Most quanta a chunk and layer, if stages lend what they are short of at a request's end."""
    quanta = 0
    while True:
        more = quanta + 1
        # of every layer; the last chunk is there one layer at a time
        before = (chunks - 1) * more
        own = min(before, capacity // layers) + min(more, max(0, capacity - layers * before))
        kept = [min(more, max(0, own - i * more)) * layers for i in range(chunks)]
        lent = [layers * more - rest for rest in kept]
        tasks = plan(
            [[layers] * 3 * chunks] * stages,
            last=([0] * (chunks - 1) + [1]) * 3,
            host=[[k, partner(k)] for k in range(stages)],
            need=[[kept * 3, lent * 3]] * stages,
            layers=[layers] * stages,
            capacity=[[capacity] * (3 * chunks + 1)] * stages,
        )
        status, slot, _ = admitted(tasks)
        if status != ADMITTED or slot.tolist() != list(range(3 * chunks)):
            return quanta
        assert ran(tasks, slot)[0] == DONE
        quanta = more


@pytest.mark.parametrize(
    ("chunks", "partner", "distance", "ratio"),
    [
        (8, lambda k: (k + 4) % 8, 4, Fraction(4, 3)),
        (12, lambda k: (k + 4) % 8, 4, Fraction(6, 5)),
        (16, lambda k: (k + 4) % 8, 4, Fraction(8, 7)),
        (8, lambda k: 7 - k, 1, Fraction(16, 15)),
    ],
    ids=["pairs M=N", "pairs M=1.5N", "pairs M=2N", "mirror M=N"],
)
def test_lending_kv_to_a_partner_lengthens_prompts_by_the_bound(chunks, partner, distance, ratio):
    """8 equal stages, equal chunks, requests back to back.

    A stage at the peak of its M chunks has a partner, d slots behind, that holds M - d: two stages
    share 2M - d chunks, where each alone would have to hold M. Mirrored, the closest pair binds.
    """
    capacity = chunks * (2 * chunks - distance)
    alone = longest(8, chunks, lambda k: k, capacity)
    assert alone == 2 * chunks - distance
    assert Fraction(longest(8, chunks, partner, capacity), alone) == ratio


@pytest.mark.parametrize("layers", [2, 4, 5])
def test_freeing_by_layer_lengthens_prompts_by_the_bound(layers):
    """8 equal stages, 8 equal chunks, requests back to back, KV granted and freed layer by layer.

    A stage is fullest as its last chunk begins: M - 1 chunks and one layer of the last; its partner
    then holds M - 1 - d and one layer. Alone the gain over whole tasks is M / (M - 1 + 1 / L).
    """
    chunks, distance = 8, 4
    alone = layers * (chunks - 1) + 1
    pair = layers * (2 * chunks - 2 - distance) + 2
    capacity = alone * pair * layers
    assert longest(8, chunks, lambda k: k, capacity, layers) == pair * layers
    assert longest(8, chunks, lambda k: (k + 4) % 8, capacity, layers) == 2 * alone * layers


def test_a_layer_takes_what_the_layer_before_it_left():
    """One task of four layers on a stage that holds one of them at a time."""
    tasks = plan([[9]], last=[1], need=[[[4]]], layers=[4], capacity=[[1, 1]])
    status, slot, _ = admitted(tasks)
    assert (status, slot.tolist()) == (ADMITTED, [0])
    done, out = ran(tasks, slot)
    assert (done, out.peak.tolist(), out.end.tolist()) == (DONE, [1], [[9]])
    assert out.layer_start.tolist() == [[[0, 2, 4, 6]]]
    assert admitted(tasks._replace(layers=array([1])))[::2] == (1, [0, 0, 3])


def test_a_layer_waits_for_a_layer_of_another_stage():
    """Stage 1 keeps its KV on stage 0, which frees a layer of its own every 10 cycles.

    Its second layer may begin only once the second of stage 0, earlier in slot order, has its room.
    """
    tasks = plan(
        [[20, 20], [10, 10]],
        last=[1, 1],
        host=[[0, 0], [1, 0]],
        need=[[[2, 2], [0, 0]], [[0, 0], [2, 2]]],
        layers=[2, 2],
        capacity=[[2] * 3, [0] * 3],
    )
    assert same_schedule(tasks, np.arange(2))
    _, out = ran(tasks, np.arange(2))
    assert out.layer_wait.tolist() == [[0, 0], [5, 0]]
    assert out.layer_start[1].tolist() == [[20, 30], [40, 45]]


def test_what_is_pushed_away_makes_room_for_the_next_chunk():
    """Two quanta a stage: the first chunk leaves as the second ends, before the third starts."""
    tasks = plan(
        [[10] * 3, [10] * 3],
        host=[[0, 1], [1, 1]],
        need=[[[1, 1, 1], [0, 1, 0]], [[0] * 3, [0] * 3]],
        leave=[[0, 1, 0], [0, 0, 0]],
        capacity=[[2] * 4, [1] * 4],
    )
    assert admitted(tasks)[0] == ADMITTED
    assert same_schedule(tasks, np.arange(3))
    stays = tasks._replace(leave=np.zeros_like(tasks.leave))
    assert admitted(stays)[::2] == (1, [0, 2, 1])
