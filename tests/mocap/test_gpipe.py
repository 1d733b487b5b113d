"""GPipe's schedule against its closed forms, run by the engine."""

from __future__ import annotations

import numpy as np
import pytest

from tests.mocap.test_partition import llama_70b_stage
from wafer_kernels import pipeline


def makespan(stages: int, durations: list[int], chunks: int) -> int:
    """Cycles of equal stages with free hand-off and memory; a request is `chunks` tasks."""
    count = len(durations)
    last = np.zeros(count, np.int64)
    last[chunks - 1 :: chunks] = 1
    tasks = pipeline.Tasks(
        arrival=np.zeros(count, np.int64),
        last=last,
        duration=np.tile(np.array(durations, np.int64), (stages, 1)),
        handoff=np.zeros((stages, count), np.int64),
        host=np.arange(stages, dtype=np.int64)[:, np.newaxis],
        need=np.zeros((stages, 1, count), np.int64),
        leave=np.zeros((stages, count), np.int64),
        layers=np.ones(stages, np.int64),
        capacity=np.ones((stages, count + 1), np.int64),
    )
    schedule = pipeline.schedule(tasks)
    nothing = pipeline.no_traffic(tasks)
    assert pipeline.run(tasks, np.arange(count), *nothing, schedule) == pipeline.DONE
    return int(schedule.end.max())


@pytest.mark.parametrize(("stages", "requests"), [(1, 3), (4, 1), (8, 8), (16, 5)])
def test_time_and_bubble(stages: int, requests: int) -> None:
    took = makespan(stages, [1000] * requests, 1)
    assert took == (requests + stages - 1) * 1000
    bubble = 1 - requests * 1000 / took
    assert bubble == pytest.approx((stages - 1) / (requests + stages - 1))


@pytest.mark.parametrize(("stages", "chunks"), [(8, 8), (8, 16), (16, 16)])
@pytest.mark.parametrize("requests", [1, 4])
def test_ratio_to_equal_chunks(stages: int, chunks: int, requests: int) -> None:
    whole = makespan(stages, [chunks * 100] * requests, 1)
    cut = makespan(stages, [100] * (chunks * requests), chunks)
    ideal = (requests + stages - 1) * chunks / (requests * chunks + stages - 1)
    assert whole / cut == pytest.approx(ideal)
    if requests == 1:
        assert ideal == pytest.approx(stages * chunks / (stages + chunks - 1))


@pytest.mark.parametrize(
    ("tokens", "stages", "shape", "milliseconds"),
    [
        (131_072, 16, "rectangular", 484_477.7),
        (131_072, 16, "causal", 311_262.4),
        (32_768, 16, "rectangular", 56_175.7),
        (32_768, 16, "causal", 45_349.7),
        (131_072, 8, "rectangular", 242_238.9),
        (131_072, 8, "causal", 155_631.2),
    ],
)
def test_one_long_request(tokens: int, stages: int, shape: str, milliseconds: float) -> None:
    nanoseconds = round(1e6 * llama_70b_stage(shape)(tokens, 0))
    assert makespan(stages, [nanoseconds], 1) / 1e6 == pytest.approx(milliseconds, abs=0.06)
