import dataclasses
import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mocap
from mocap import overhead, partition, policy
from tests.mocap.test_reallocation import setting_of
from wafer_kernels.errors import CapacityError, ConfigError, UsageError

NAMES = (
    "gpipe uniform terapipe lbcp mbkr mocap layerwise prefill-only sglang vllm-ascend atom seq1f1b"
)
UNCUT = {"gpipe", "layerwise", "prefill-only"}
EXACT = {"uniform", "lbcp", "mbkr", "mocap"}


def stairs(chunk, prefix):
    return 200 + -(-chunk // 32) * (40 + -(-(prefix + chunk) // 32))


class Halving(mocap.Policy):
    """A user's policy: half of what is left, again and again."""

    name = "halving"
    summary = "half of what is left"
    least_tokens: int = 64
    ends: Literal["merge", "keep"] = "keep"

    def partition(self, request, setting):
        sizes, left = [], request.new_tokens
        while left > self.least_tokens:
            sizes.append(left - left // 2)
            left //= 2
        return [*sizes, left]

    def reallocate(self, cuts, setting):
        return [mocap.Move(request, 0, 0, 1, setting.stages - 1) for request in range(len(cuts))]


def test_shipped_names():
    assert mocap.names()[: len(NAMES.split())] == NAMES.split()
    for name in NAMES.split():
        one = mocap.get(name)
        assert one.name == name
        assert one.summary
        assert one.kv_lifetime in {"request", "layer"}
        assert one.uses <= {"chunks", "chunk_tokens", "chunk_vector"}


def test_declarations():
    assert {name for name in mocap.names() if mocap.get(name).streams_tokens} == UNCUT
    assert {name for name in mocap.names() if not mocap.get(name).uses} == UNCUT
    assert mocap.get("layerwise").stage_count == mocap.get("prefill-only").stage_count == 1
    assert mocap.get("prefill-only").kv_lifetime == "layer"
    assert mocap.get("prefill-only").frees_by_layer()
    for name in ("uniform", "terapipe", "lbcp", "mbkr", "mocap", "sglang"):
        assert not mocap.get(name).frees_by_layer()
        assert mocap.get(name, {"kv_free": "layer"}).frees_by_layer()
    assert mocap.get("mocap").stage_count is None


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3000),
    st.integers(0, 500),
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 40),
)
@pytest.mark.parametrize("name", NAMES.split())
def test_every_policy_cuts_any_request(name, tokens, prefix, chunks, stages, page):
    setting = setting_of(stages, chunks, 10_000, page, cost=stairs)
    request = mocap.Request(0, prefix + tokens, prefix)
    sizes = mocap.cut(mocap.get(name), request, setting)
    assert sum(sizes) == tokens
    if name in UNCUT:
        assert sizes == [tokens]
    if name in EXACT:
        assert len(sizes) == min(chunks, tokens)
    if name == "terapipe":
        assert len(sizes) <= chunks
    assert mocap.move(mocap.get(name), [sizes], setting) == []


def test_chunk_sizes_wanted_by_the_user():
    setting = setting_of(4, 4, 10_000, 16, cost=stairs)
    wanted = dataclasses.replace(setting, chunk_tokens=300)
    request = mocap.Request(0, 1000)
    assert mocap.cut(mocap.get("uniform"), request, wanted) == [300, 300, 300, 100]
    assert len(mocap.cut(mocap.get("lbcp"), request, wanted)) == 4
    given_chunks = dataclasses.replace(setting, chunk_vector=(700, 300))
    assert mocap.cut(mocap.get("mbkr"), request, given_chunks) == [700, 300]
    with pytest.raises(ConfigError, match="sum to 1000"):
        mocap.cut(mocap.get("uniform"), mocap.Request(0, 900), given_chunks)


def test_terapipe_takes_its_own_bound_and_grid():
    setting = setting_of(16, 2, 10_000, 8, cost=lambda c, p: 10 + 5 * c)
    request = mocap.Request(0, 512)
    assert len(mocap.cut(mocap.get("terapipe"), request, setting)) == 2
    free = mocap.get("terapipe", {"max_chunks": 0, "step_tokens": 32})
    sizes = mocap.cut(free, request, setting)
    assert len(sizes) > 2
    assert all(size % 32 == 0 for size in sizes)


def test_mocap_moves_and_pays_for_it():
    def smooth(chunk, prefix):
        return 500_000 + 1711 * chunk + chunk * (2 * prefix + chunk) // 64

    setting = setting_of(8, 8, 26_000, 16, kv=(4096,) * 8, cost=smooth)
    setting = dataclasses.replace(setting, kv_capacity_bytes=(26_000 * 4096,) * 8)
    request = mocap.Request(0, 32_768)
    sizes = mocap.cut(mocap.get("mocap"), request, setting)
    moves = mocap.move(mocap.get("mocap"), [sizes], setting)
    assert {(move.stage - move.host) % 8 for move in moves} == {4}
    assert sizes != mocap.cut(mocap.get("lbcp"), request, setting)
    assert sizes[-1] < mocap.cut(mocap.get("lbcp"), request, setting)[-1]
    with pytest.raises(CapacityError):
        mocap.move(
            mocap.get("mocap"), [sizes], dataclasses.replace(setting, kv_capacity_bytes=(1,) * 8)
        )


def test_balance_moves_even_what_fits():
    setting = setting_of(4, 4, 10_000, 16, cost=stairs)
    one = mocap.get("mocap", {"trigger": "balance"})
    sizes = mocap.cut(one, mocap.Request(0, 1024), setting)
    assert mocap.move(one, [sizes], setting)


def test_orders():
    requests = [
        mocap.Request(0, 900, arrival_cycle=5),
        mocap.Request(1, 800, 700),
        mocap.Request(2, 300),
    ]
    assert [r.index for r in mocap.get("mocap").order(requests)] == [1, 2, 0]
    assert [r.index for r in mocap.get("prefill-only").order(requests)] == [1, 2, 0]
    requests[1] = mocap.Request(1, 800)
    assert [r.index for r in mocap.get("prefill-only").order(requests)] == [2, 1, 0]


def test_unknown_names_and_options_get_near_matches():
    with pytest.raises(UsageError, match="did you mean mocap"):
        mocap.get("mocpa")
    with pytest.raises(ConfigError, match="did you mean trigger"):
        mocap.get("mbkr", {"triger": "balance"})
    with pytest.raises(ConfigError, match="choose from overflow, balance"):
        mocap.get("mocap", {"trigger": "always"})
    for name, option in (
        ("terapipe", {"max_chunks": -1}),
        ("terapipe", {"max_chunks": 1.5}),
        ("mbkr", {"group_size": 1}),
        ("sglang", {"smooth": 2.0}),
        ("uniform", {"trigger": "balance"}),
        ("uniform", {"name": "mine"}),
    ):
        with pytest.raises(ConfigError, match=next(iter(option))):
            mocap.get(name, option)


def test_options_are_readable_and_belong_to_one_object():
    one = mocap.get("mbkr", {"trigger": "balance", "group_size": 8})
    assert one.options() == {
        "partner": "offset",
        "group_size": 8,
        "trigger": "balance",
        "moved": "newest",
        "push": "write",
        "read_back": "stream",
        "kv_free": "task",
    }
    assert mocap.get("mbkr").options()["trigger"] == "overflow"


def test_a_policy_by_object():
    setting = setting_of(4, 4, 10_000)
    assert mocap.cut(Halving(), mocap.Request(0, 1000), setting) == [500, 250, 125, 63, 62]
    assert mocap.move(Halving(), [[500, 500]], setting) == [mocap.Move(0, 0, 0, 1, 3)]


def test_a_policy_by_entry_point(monkeypatch):
    point = importlib.metadata.EntryPoint(
        "halving", f"{__name__}:Halving", policy.ENTRY_POINT_GROUP
    )
    wrong = importlib.metadata.EntryPoint("wrong", "builtins:int", policy.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: (point, wrong) if group == "mocap.policies" else (),
    )
    assert mocap.names()[-2:] == ["halving", "wrong"]
    found = mocap.get("halving", {"least_tokens": 500, "ends": "merge"})
    assert type(found) is Halving
    assert mocap.cut(found, mocap.Request(0, 1000), setting_of(2, 2, 9)) == [500, 500]
    with pytest.raises(ConfigError, match="not a subclass"):
        mocap.get("wrong")


def test_a_registered_policy(monkeypatch):
    monkeypatch.setattr(policy, "_registered", {})
    assert mocap.register(Halving) is Halving
    assert isinstance(mocap.get("halving"), Halving)
    assert mocap.names()[-1] == "halving"
    with pytest.raises(ConfigError, match="exists already"):
        mocap.register(type("Other", (mocap.Policy,), {"name": "halving"}))
    with pytest.raises(ConfigError, match="exists already"):
        mocap.register(type("Other", (mocap.Policy,), {"name": "gpipe"}))
    with pytest.raises(ConfigError, match="no name"):
        mocap.register(mocap.Policy)


def test_a_dataclass_may_be_a_policy(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Doubling(mocap.Policy):
        name = "doubling"
        first: int = 1

        def partition(self, request, setting):
            return [self.first, request.new_tokens - self.first]

    monkeypatch.setattr(policy, "_registered", {"doubling": Doubling})
    found = mocap.get("doubling", {"first": 3})
    assert mocap.cut(found, mocap.Request(0, 10), setting_of(2, 2, 9)) == [3, 7]


@pytest.mark.parametrize("sizes", [[], [5], [5, 6], [11, -1], [5.0, 5.0], [0, 10]])
def test_impossible_cuts_are_refused(sizes):
    bad = SimpleNamespace(name="bad", partition=lambda *_: sizes)
    with pytest.raises(ConfigError, match="bad"):
        mocap.cut(bad, mocap.Request(0, 10), setting_of(2, 2, 9))


@pytest.mark.parametrize(
    "moves",
    [
        [mocap.Move(1, 0, 0, 1, 1)],
        [mocap.Move(0, 2, 0, 1, 1)],
        [mocap.Move(0, 0, 2, 1, 1)],
        [mocap.Move(0, 0, 0, 1, 0)],
        [mocap.Move(0, 0, 0, 0, 1)],
        [mocap.Move(0, 0, 0, 4, 1), mocap.Move(0, 0, 0, 2, 1, pushed=1)],
        [mocap.Move(0, 0, 1, 1, 1, pushed=0)],
        [mocap.Move(0, 0, 0, 1, 1, pushed=2)],
    ],
)
def test_impossible_moves_are_refused(moves):
    bad = SimpleNamespace(name="bad", reallocate=lambda *_: moves)
    with pytest.raises(ConfigError, match="impossible move"):
        mocap.move(bad, [[5, 5]], setting_of(2, 2, 9))


def test_importing_mocap_imports_no_heavy_library():
    code = (
        "import sys, mocap; [mocap.get(name) for name in mocap.names()]; "
        "print([name for name in ('numba', 'xarray', 'scipy', 'wafer_emu') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_mocap_plans_a_serving_engine_from_measured_times():
    """No wafer: seconds measured at a few prefixes, interpolated, cut into pages."""
    measured = {0: 0.128, 31_744: 0.124, 64_512: 0.172, 97_280: 0.238}

    def seconds(chunk, prefix):
        nearest = max(start for start in measured if start <= prefix)
        return measured[nearest] * chunk / 1024

    sizes = partition.lbcp(131_072, 32, seconds, page_tokens=64)
    assert sum(sizes) == 131_072
    assert sizes[0] > sizes[-1]


@pytest.mark.parametrize("reading", ["a", "b", "c"])
def test_every_reading_of_the_overhead_cuts_no_worse_than_ignoring_it(reading):
    def smooth(chunk, prefix):
        return 50_000 + 171 * chunk + chunk * (2 * prefix + chunk) // 256

    setting = setting_of(8, 8, 26_000 * 4096, 16, kv=(4096,) * 8, cost=smooth)
    request = mocap.Request(0, 32_768)
    price = overhead.expected(32_768, 8, setting, reading)
    cost = overhead.with_overhead(smooth, price)
    aware = mocap.cut(mocap.get("mocap", {"reading": reading}), request, setting)
    plain = mocap.cut(mocap.get("lbcp"), request, setting)
    uniform = mocap.cut(mocap.get("uniform"), request, setting)
    assert aware != plain
    for other in (plain, uniform):
        assert partition.makespan(aware, cost, 8) <= partition.makespan(other, cost, 8)
    assert overhead.expected(20_000, 8, setting, reading) is None  # all of it fits at home
