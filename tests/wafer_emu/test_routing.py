"""Experts' loads: the clock counts with what the numbers routed, and a plan is timed with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wafer_emu.numeric_cases import TINY, computed, expected, model_of, prompt, weights_of
from tests.wafer_emu.small import MIXTRAL, chunks, clock_of, clocks, prefixes, routing_of, routings
from wafer_emu import carry_out
from wafer_emu.clock import Clock
from wafer_emu.emulation import emulate
from wafer_emu.model import Model
from wafer_emu.numbers import compute
from wafer_emu.program import Experts, layer_operations
from wafer_emu.routing import Routing
from wafer_emu.workload import Workload
from wafer_kernels.errors import UsageError

TOKENS = 45
MOE = ("mixtral", "deepseek")


def expert_operations(run: Any) -> Iterator[tuple[Clock, int, int, int, Experts]]:
    """(clock, layer, tokens, prefix, operation) of every product of experts that is timed."""
    deployment = run.plan.deployment
    for stage, clock in zip(deployment.stages, deployment.clocks, strict=True):
        for task, (chunk, prefix) in enumerate(zip(run.plan.tokens, run.plan.prefix, strict=True)):
            for tile, before in deployment.tiles(int(chunk)):
                for layer in range(stage.first_layer, stage.first_layer + stage.layers):
                    asked = (layer, tile, int(prefix) + before, True, run.plan.routing_of(task))
                    for each in layer_operations(deployment.model, *asked):
                        if isinstance(each, Experts):
                            yield clock, layer, tile, int(prefix) + before, each


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("policy", ["gpipe", "mocap", "lbcp"])
def test_the_clock_counts_what_the_dense_twins_router_chose(name: str, policy: str) -> None:
    model = model_of(name)
    run, wanted = computed(model, TOKENS, policy), expected(model, TOKENS)
    seen = 0
    for clock, layer, tile, prefix, operation in expert_operations(run):
        counts = wanted.chooses[layer][prefix : prefix + tile].sum(axis=0)
        rows = [rows for rows, times in clock.expert_rows(operation) for _ in range(times)]
        assert rows == sorted(counts[counts > 0], reverse=True)
        seen += tile
    assert seen == 3 * TOKENS * sum(each is not None for each in wanted.chooses)
    assert run.summary["settings"]["expert_tokens"] == "routed"


@pytest.mark.parametrize("name", MOE)
def test_the_time_that_is_reported_is_that_of_the_loads(name: str) -> None:
    model = model_of(name)
    run = computed(model, TOKENS, "lbcp")
    again = emulate(
        TINY, model, Workload.single(TOKENS), "lbcp", stages=4, chunks=4,
        routing=run.numbers.routing if run.numbers else None,
    )  # fmt: skip
    even = emulate(TINY, model, Workload.single(TOKENS), "lbcp", stages=4, chunks=4)
    assert again.plan.cuts == run.plan.cuts == even.plan.cuts
    np.testing.assert_array_equal(again.schedule.end, run.schedule.end)
    assert (again.schedule.end != even.schedule.end).any()
    assert even.summary["settings"]["expert_tokens"] == "uniform"
    for summary in (run.summary, even.summary):
        assert all(each["holds"] for each in summary["invariants"])
        assert summary["macs"] == even.summary["macs"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MOE)
def test_peak_of_every_core_is_the_ledgers_with_the_loads(name: str, dtype: str) -> None:
    run = computed(model_of(name, dtype), TOKENS, "mocap")
    assert run.numbers is not None
    assert run.plan.routing
    for found, book in zip(run.numbers.peak_bytes, run.books.cores, strict=True):
        np.testing.assert_array_equal(found, book.peak)


def test_numbers_run_again_where_loads_change_the_order_of_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And only there: what is returned ran in the order that is reported."""
    model, calls = model_of("mixtral"), []

    def counted(*asked: Any, **named: Any) -> Any:
        calls.append(asked[1])
        return compute(*asked, **named)

    monkeypatch.setattr("wafer_emu.numbers.compute", counted)
    computed(model, TOKENS, "uniform")
    assert len(calls) == 1
    orders = iter([[(0, 0, 0)], [(0, 0, 1)]])
    monkeypatch.setattr(carry_out, "_order", lambda plan, schedule: next(orders))
    run = computed(model, TOKENS, "uniform")
    assert len(calls) == 3
    np.testing.assert_array_equal(calls[-1].end, run.schedule.end)


@settings(max_examples=40, deadline=None)
@given(clocks(), chunks, st.lists(prefixes, min_size=1, max_size=4), st.data())
def test_a_layer_costs_its_operations_with_their_loads(
    clock: Clock, chunk: int, several: list[int], data: st.DataObject
) -> None:
    """Also after the same clock counted even shares, or another request's loads."""
    model = clock.model
    for routing in (None, *(data.draw(routings(model, max(several) + chunk)) for _ in range(2))):
        for layer in range(model.layers):
            found = clock.layers(layer, chunk, np.array(several), True, routing)
            for prefix, cycles in zip(several, found, strict=True):
                operations = layer_operations(model, layer, chunk, prefix, True, routing)
                assert cycles == sum(clock.operation(each) for each in operations)


def test_full_rows_of_cores_cost_least_and_fewer_experts_less() -> None:
    """Uneven loads leave cores idle in more rounds; but every expert left out is a product less."""
    model = Model.from_hf({**MIXTRAL, "num_experts_per_tok": 1})
    clock = clock_of(TINY, model, 4, 2)

    def cycles(*loads: int) -> int:
        chosen = np.repeat(np.arange(4), loads)[:, np.newaxis]
        return int(clock.layers(0, 256, np.array([0]), True, Routing({0: chosen, 1: chosen}))[0])

    even = cycles(64, 64, 64, 64)
    assert even == clock.layers(0, 256, np.array([0]))[0]
    assert cycles(53, 61, 69, 73) > even
    assert cycles(0, 64, 64, 128) < even


def test_every_request_has_its_own_loads() -> None:
    model = model_of("mixtral")
    first, second = (routing_of(model, 24, seed) for seed in (1, 2))

    def chunk_cycles(*routing: Routing) -> Any:
        run = emulate(
            TINY, model, Workload.equal(2, 24), "uniform", stages=2, chunks=3, routing=routing
        )
        return (run.schedule.end - run.schedule.start).reshape(2, 2, 3)

    alike, swapped = chunk_cycles(first, first), chunk_cycles(second, first)
    np.testing.assert_array_equal(alike[:, 0], alike[:, 1])
    np.testing.assert_array_equal(swapped[:, 1], alike[:, 1])
    assert (swapped[:, 0] != alike[:, 0]).any()


def test_a_reused_prefix_has_no_loads() -> None:
    model, prefix = model_of("mixtral"), 21
    run = computed(model, TOKENS, "uniform", prefix_tokens=prefix)
    assert run.numbers is not None
    (routing,), wanted = run.numbers.routing, expected(model, TOKENS)
    for layer, chosen in routing.chosen.items():
        assert (chosen[:prefix] == -1).all()
        found = routing.loads(layer, 4, prefix, TOKENS - prefix)
        np.testing.assert_array_equal(found, wanted.chooses[layer][prefix:].sum(axis=0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda chosen: {}, "nothing for layer 0"),
        (lambda chosen: {**chosen, 2: chosen[2][1:]}, r"shape \(7, 2\) for layer 2"),
        (lambda chosen: {**chosen, 1: chosen[1] + 3}, "layer 1, token"),
        (lambda chosen: {**chosen, 3: chosen[3] * 0}, r"token 0: \[0, 0\] are not 2 different"),
    ],
)
def test_a_routing_goes_with_model_and_request(change: Any, said: str) -> None:
    model = model_of("mixtral")
    routing = Routing(change(routing_of(model, 8, 0).chosen))
    with pytest.raises(UsageError, match=said):
        emulate(TINY, model, Workload.single(8), "uniform", stages=2, routing=[routing])


def test_a_routing_is_of_every_request_of_a_mixture() -> None:
    mixture, plain = model_of("mixtral"), model_of("llama-gqa")
    given_routing = [routing_of(mixture, 8, 0)]
    with pytest.raises(UsageError, match="routing of 1 requests, there are 2"):
        emulate(TINY, mixture, Workload.equal(2, 8), stages=2, routing=given_routing)
    with pytest.raises(UsageError, match="no experts"):
        emulate(TINY, plain, Workload.single(8), stages=2, routing=given_routing)
    with pytest.raises(UsageError, match="numbers say themselves"):
        emulate(
            TINY, mixture, Workload.single(8), stages=2, routing=given_routing,
            numbers=weights_of(mixture), token_ids=prompt(mixture, 8),
        )  # fmt: skip
