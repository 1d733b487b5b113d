"""Flows that share links: rates and pipelines of the kernels are those of the slow twin."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_flows_pipeline_twin import pipelines, stages_on_a_row
from tests.kernels.test_flows_twin import crowds
from tests.naive import flows as naive
from wafer_kernels import noc
from wafer_kernels.pipeline import DONE, Tasks, Traffic, run, schedule

few = settings(max_examples=60, deadline=None)


def array(values):
    return np.array(values, dtype=np.int64)


def links_of(capacity, route, stages, latency, shared):
    """The links of a twin's edges, with a route for every pair of stages."""
    number = {edge: at for at, edge in enumerate(capacity)}
    paths = [
        [number[edge] for edge in route(a, b)] if a != b else []
        for a in range(stages)
        for b in range(stages)
    ]
    return noc.Links(
        array(list(capacity.values())),
        array(np.cumsum([0, *map(len, paths)])),
        array([edge for path in paths for edge in path]),
        array(latency),
        array([shared]),
    )


@given(crowds(), st.booleans())
@few
def test_rates_are_the_twins(crowd, shared) -> None:
    paths, capacity = crowd
    first = np.cumsum([0, *map(len, paths)])
    links = noc.Links(
        array(list(capacity.values())),
        array(first),
        array([edge for path in paths for edge in path]),
        array([[0]]),
        array([shared]),
    )
    under = noc.under_way(len(paths), links)
    under.pair[:], under.left[:] = np.arange(len(paths)), 1
    noc.fair_rates(links, under)
    rates = naive.fair_rates if shared else naive.alone_rates
    assert under.rate.tolist() == rates(paths, capacity)


def kernel_of(work, *, shared):
    """Run a twin's work with the kernel, memory without end."""
    stages, count = len(work.durations), len(work.arrival)
    most = 1 + max(map(len, work.hosts))
    host = array(
        [[k, *work.hosts[k], *[k] * (most - 1 - len(work.hosts[k]))] for k in range(stages)]
    )

    def parts(table):
        volumes = np.zeros((stages, most, count), np.int64)
        for k in range(stages):
            for g in range(len(work.hosts[k])):
                volumes[k, g + 1] = table[k][g]
        return volumes * work.grains_per_byte

    handoff = array(work.handoff_bytes) * work.grains_per_byte
    handoff[-1] = 0
    latency = array([[work.latency[k][min(k + 1, stages - 1)]] * count for k in range(stages)])
    asked = parts(work.ask_bytes)
    read = np.where(asked > 0, parts(work.answer_bytes), parts(work.read_bytes))
    nothing = np.zeros((stages, most, count), np.int64)
    tasks = Tasks(
        arrival=array(work.arrival),
        last=array([i == count - 1 for i in range(count)]),
        duration=array(work.durations),
        handoff=np.where(handoff > 0, latency, 0),
        host=host,
        need=nothing,
        leave=nothing[:, 0],
        layers=np.ones(stages, np.int64),
        capacity=np.zeros((stages, count + 1), np.int64),
    )
    links = links_of(work.capacity, work.route, stages, work.latency, shared)
    out = schedule(tasks, len(work.capacity))
    traffic = Traffic(handoff, array(work.layers), read, parts(work.write_bytes), asked)
    assert run(tasks, np.arange(count), traffic, links, out) == DONE
    return out


def of_one_kind(work, *, attends):
    """Reads only, or queries that are answered: a policy does one of both."""

    def where(table, kept):
        return [
            [
                [size * bool(keep) for size, keep in zip(*row, strict=True)]
                for row in zip(*some, strict=True)
            ]
            for some in zip(table, kept, strict=True)
        ]

    nothing = where(work.ask_bytes, [[[0] * len(row) for row in some] for some in work.ask_bytes])
    if attends:
        return replace(
            work, read_bytes=nothing, answer_bytes=where(work.answer_bytes, work.ask_bytes)
        )
    return replace(work, ask_bytes=nothing, answer_bytes=nothing)


@given(pipelines(), st.booleans(), st.booleans())
@few
def test_a_pipeline_is_the_twins(work, shared, attends) -> None:
    work = of_one_kind(work, attends=attends)
    twin, out = naive.run(work, contention=shared), kernel_of(work, shared=shared)
    assert out.input_ready.tolist() == twin.input_ready
    assert out.start.tolist() == twin.start
    assert out.end.tolist() == twin.end
    assert out.link_busy.tolist() == list(twin.busy.values())


def test_a_question_without_an_answer_takes_its_time() -> None:
    # 8 bytes at 4 a cycle, before each of two layers; nothing is read or written beside it.
    work = stages_on_a_row([[6], [0]], layers=[2, 1], hosts=[[1], []], ask=[[[8]], []])
    for shared in (True, False):
        out = kernel_of(work, shared=shared)
        assert out.end[0].tolist() == naive.run(work, contention=shared).end[0] == [10]
