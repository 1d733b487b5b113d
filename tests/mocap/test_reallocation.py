from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mocap
from mocap import partition, reallocation
from tests.mocap.test_partition import llama_70b_stage
from wafer_kernels.errors import CapacityError, ConfigError


def setting_of(stages, chunks, capacity, page=1, kv=None, cost=lambda c, _: c, layers=()):
    capacities = (capacity,) * stages if isinstance(capacity, int) else tuple(capacity)
    return mocap.Setting(
        stages=stages,
        chunks=chunks,
        page_tokens=page,
        cost=cost,
        stage_cost=lambda _, c, p: cost(c, p),
        kv_bytes_per_token=kv or (1,) * stages,
        kv_capacity_bytes=capacities,
        hops=tuple(tuple(abs(a - b) for b in range(stages)) for a in range(stages)),
        link_bytes_per_cycle=64,
        layers=layers,
    )


def recount(cuts, moves, kv, layers=()):
    """Bytes per (stage, step of a slot), counted anew at every step from who is alive."""
    stages, total = len(kv), sum(map(len, cuts))
    layers = layers or (1,) * stages
    steps = max(layers)
    held = [[0] * (total + stages - 1) * steps for _ in range(stages)]
    for step in range((total + stages - 1) * steps):
        for stage in range(stages):
            index = 0
            for request, sizes in enumerate(cuts):
                final = index + len(sizes) - 1 + stage
                for chunk, tokens in enumerate(sizes):
                    away = [
                        m for m in moves if (m.request, m.stage, m.chunk) == (request, stage, chunk)
                    ]
                    begin = index + chunk + stage
                    stays = [(stage, begin, final, tokens - sum(m.tokens for m in away))]
                    for move in away:
                        pushed = index + move.leaves + stage
                        if move.leaves > chunk:
                            stays.append((stage, begin, pushed, move.tokens))
                        stays.append((move.host, pushed, final, move.tokens))
                    for region, first, last, kept in stays:
                        for layer in range(layers[stage]):
                            comes = first * steps + layer * steps // layers[stage]
                            goes = last * steps + (layer + 1) * steps // layers[stage]
                            if comes <= step < goes:
                                held[region][step] += kept * kv[stage] // layers[stage]
                index += len(sizes)
    return held


def gain(options, stages, chunks, requests, budget=16_384, page=16):
    setting = setting_of(stages, chunks, budget, page)
    uniform = reallocation.max_tokens(mocap.get("uniform"), setting, requests)
    assert uniform == pytest.approx(budget, abs=chunks * page)
    return reallocation.max_tokens(mocap.get("mbkr", options), setting, requests) / uniform


def test_pairs_mirror_and_groups():
    assert reallocation.pairs(8) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert reallocation.pairs(5) == [(0, 2), (1, 3)]
    assert reallocation.pairs(1) == []
    assert reallocation.mirror(8) == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert reallocation.groups(16, 4)[1] == (1, 5, 9, 13)
    assert reallocation.groups(6, 4) == [(0, 1, 2, 3)]
    with pytest.raises(ConfigError, match="at least 4 stages"):
        reallocation.groups(3, 4)


# the bounds: uniform cuts, equal stages, a KV budget, free hand-off


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize("trigger", ["overflow", "balance"])
@pytest.mark.parametrize(
    ("stages", "chunks", "bound"),
    [(8, 8, 4 / 3), (8, 12, 1.2), (8, 16, 8 / 7), (16, 16, 4 / 3), (16, 24, 1.2), (4, 4, 4 / 3)],
)
def test_pairs_reach_their_bound(stages, chunks, bound, trigger, requests):
    reached = gain({"trigger": trigger}, stages, chunks, requests)
    assert bound - 3 * chunks * 16 / 16_384 <= reached <= bound


@pytest.mark.parametrize(("requests", "bound"), [(1, 6 / 4), (4, 1.2)])
def test_pairs_with_fewer_chunks_than_stages(requests, bound):
    assert gain({}, 8, 6, requests) == pytest.approx(bound, abs=0.01)


def test_isolated_requests_of_half_the_chunks_double():
    assert gain({}, 8, 4, requests=1) == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("requests", [1, 4])
@pytest.mark.parametrize(
    ("options", "stages", "low", "high"),
    [
        ({"partner": "mirror"}, 8, 1.06, 1.067),
        ({"partner": "mirror"}, 16, 1.03, 1.033),
        ({"partner": "groups"}, 16, 1.59, 1.6),
        ({"partner": "groups"}, 8, 1.59, 1.6),
        ({"partner": "groups", "group_size": 16}, 16, 1.87, 32 / 17),
        ({"moved": "oldest"}, 8, 1.32, 4 / 3),
    ],
)
def test_other_partners(options, stages, low, high, requests):
    assert low <= gain(options, stages, stages, requests) <= high


@pytest.mark.parametrize(
    ("stages", "requests", "least", "bound"), [(8, 1, 1.75, 16 / 9), (8, 3, 1.75, 16 / 9)]
)
def test_optimal_is_the_bound_of_all(stages, requests, least, bound):
    reached = gain({"partner": "optimal"}, stages, stages, requests, budget=4096, page=1)
    assert least <= reached <= bound


def test_optimal_of_sixteen_stages():
    cuts = [partition.uniform(1792, 16)]
    setting = setting_of(16, 16, 1024)
    moves = reallocation.optimal(cuts, setting)
    assert reallocation.occupancy(cuts, moves, setting.kv_bytes_per_token).max() <= 1024
    with pytest.raises(CapacityError) as caught:
        reallocation.optimal([partition.uniform(1936, 16)], setting)
    assert caught.value.details["short_bytes"] > 0


def test_optimal_moves_fewer_byte_hops_than_pairs():
    setting = setting_of(8, 8, 640)
    cuts = [partition.uniform(800, 8)] * 2

    def byte_hops(moves):
        return sum(
            move.tokens * setting.hops[move.stage][move.host] * (8 - move.chunk) for move in moves
        )

    pairs = reallocation.plan(cuts, setting, reallocation.pairs(8))
    assert 0 < byte_hops(reallocation.optimal(cuts, setting)) < byte_hops(pairs)
    assert reallocation.optimal(cuts, setting_of(8, 8, 800)) == []


@pytest.mark.parametrize(
    ("tokens", "stages", "shape", "share", "bound"),
    [
        (131_072, 16, "rectangular", 0.6217, 1.233),
        (131_072, 16, "causal", 0.6298, 1.227),
        (32_768, 16, "rectangular", 0.5572, 1.284),
        (32_768, 16, "causal", 0.5589, 1.283),
        (131_072, 8, "rectangular", 0.6148, 1.239),
        (131_072, 8, "causal", 0.6298, 1.227),
    ],
)
@pytest.mark.parametrize("requests", [1, 3])
def test_front_loaded_chunks_weaken_pairs(tokens, stages, shape, share, bound, requests):
    """Equal-time cuts gain 2 / (1 + f), f the share of tokens in the first half of the chunks."""
    sizes = partition.lbcp(tokens, stages, llama_70b_stage(shape))
    assert sum(sizes[: stages // 2]) / tokens == pytest.approx(share, abs=2e-4)
    low, high = tokens // 2, tokens
    while high - low > 1:
        budget = (low + high) // 2
        try:
            pairs = reallocation.pairs(stages)
            reallocation.plan([sizes] * requests, setting_of(stages, stages, budget), pairs)
            high = budget
        except CapacityError:
            low = budget
    assert tokens / high == pytest.approx(2 / (1 + share), rel=1e-3)
    assert tokens / high == pytest.approx(bound, abs=1e-3)


def test_traffic_of_pairs():
    """Uniform, M = N: a quarter of the chunks is written away, j of them read back by chunk j."""
    stages = 16
    moves = reallocation.plan(
        [[100] * stages], setting_of(stages, stages, 1200), reallocation.pairs(stages)
    )
    of_first = [move for move in moves if move.stage == 0]
    assert sum(move.tokens for move in of_first) == 400
    assert sum(move.tokens * (stages - move.chunk) for move in of_first) == 1000
    assert {move.chunk for move in of_first} == {12, 13, 14, 15}
    assert {move.host for move in of_first} == {8}


# plans hold on any capacities


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize(("layers", "stages"), [(1, 8), (4, 8), (5, 8), (5, 16)])
def test_pairs_reach_their_bound_by_layers(layers, stages, requests):
    """Uniform, M = N: alone M - 1 chunks and a layer, a pair 3N/2 - 2 and two layers."""
    page, kv, budget = 4, layers, 16_384 * layers
    setting = setting_of(stages, stages, budget, page, (kv,) * stages, layers=(layers,) * stages)
    alone = 1 / (stages - 1 + 1 / layers)
    paired = 2 / (3 * stages / 2 - 2 + 2 / layers)
    rounding = 3 * stages * page / 16_384
    for name, share in (("uniform", alone), ("mbkr", paired)):
        policy = mocap.get(name, {"kv_free": "layer"})
        reached = reallocation.max_tokens(policy, setting, requests) / (16_384 * stages)
        assert share * (1 - rounding) <= reached <= share


@st.composite
def plans(draw):
    stages = draw(st.integers(1, 7))
    sizes = st.lists(st.integers(1, 60), min_size=1, max_size=6)
    cuts = draw(st.lists(sizes, min_size=1, max_size=3))
    layers = draw(st.sampled_from([(), tuple(draw(st.integers(1, 4)) for _ in range(stages))]))
    kv = tuple(draw(st.integers(0, 3)) for _ in range(stages))
    kv = tuple(size * count for size, count in zip(kv, layers or (1,) * stages, strict=True))
    largest = max(map(sum, cuts))
    depth = max(layers, default=1)
    capacity = [draw(st.integers(largest // 2, 4 * largest * depth)) for _ in range(stages)]
    setting = setting_of(stages, 1, capacity, draw(st.integers(1, 16)), kv, layers=layers)
    members = draw(
        st.sampled_from(
            [
                reallocation.pairs(stages),
                reallocation.mirror(stages),
                reallocation.groups(stages, min(3, stages)),
                [tuple(range(stages))],
            ]
        )
    )
    return cuts, setting, members


@settings(max_examples=60, deadline=None)
@given(plans(), st.sampled_from(["overflow", "balance"]), st.sampled_from(["newest", "oldest"]))
def test_plans_fit_and_conserve(drawn, trigger, moved):
    cuts, setting, members = drawn
    kv, capacity = setting.kv_bytes_per_token, setting.kv_capacity_bytes
    own = np.array(recount(cuts, [], kv, setting.layers))
    try:
        moves = reallocation.plan(cuts, setting, members, trigger, moved, setting.layers)
    except CapacityError as error:
        short = error.details
    else:
        short = None
    if short is not None:
        assert short["short_bytes"] > 0
        if not setting.layers:
            grouped = next((some for some in members if short["stage"] in some), [short["stage"]])
            rounding = max(kv) * setting.page_tokens * len(grouped)
            held = sum(own[member][short["slot"]] for member in grouped)
            assert held > sum(capacity[member] for member in grouped) - rounding
        return
    held = holds(cuts, moves, setting)
    assert (held.sum(axis=0) == own.sum(axis=0)).all()
    group = {stage: some for some in members for stage in some}
    for one in moves:
        assert one.host in group[one.stage]
        assert one.tokens % setting.page_tokens == 0 or one.tokens <= cuts[one.request][one.chunk]
    if trigger == "overflow" and (own.max(axis=1) <= capacity).all():
        assert moves == []


def holds(cuts, moves, setting):
    """Bytes (stage, step) under moves that exist and fit."""
    fixed = SimpleNamespace(name="drawn", reallocate=lambda *_: moves)
    assert mocap.move(fixed, cuts, setting) == moves  # hosts, chunks and amounts exist
    kv, layers = setting.kv_bytes_per_token, setting.layers
    held = reallocation.occupancy(cuts, moves, kv, layers)
    assert held.tolist() == recount(cuts, moves, kv, layers)
    assert (held.max(axis=1) <= setting.kv_capacity_bytes).all()
    return held


@settings(max_examples=60, deadline=None)
@given(plans(), st.sampled_from(["overflow", "balance"]), st.sampled_from(["newest", "oldest"]))
def test_late_pushes_fit_and_could_not_be_later(drawn, trigger, moved):
    cuts, setting, members = drawn
    layers, page = setting.layers, setting.page_tokens
    try:
        at_write = reallocation.plan(cuts, setting, members, trigger, moved, layers)
    except CapacityError:
        return
    late = reallocation.postpone(at_write, cuts, setting, layers)
    holds(cuts, late, setting)

    def per_block(moves):
        found = {}
        for one in moves:
            key = (one.request, one.stage, one.chunk, one.host)
            found[key] = found.get(key, 0) + one.tokens
        return found

    before, after = per_block(at_write), per_block(late)
    assert all(tokens <= before[key] for key, tokens in after.items())
    for place, one in enumerate(late):
        others = late[:place] + late[place + 1 :]
        chunks = len(cuts[one.request])
        part = min(page, one.tokens)
        rest = [replace(one, tokens=one.tokens - part)] if one.tokens > part else []
        later = one.leaves + 1
        longer = [replace(one, tokens=part, pushed=later)] if later < chunks - 1 else []
        kv = setting.kv_bytes_per_token
        if kv[one.stage] == 0:
            continue
        held = reallocation.occupancy(cuts, [*others, *rest, *longer], kv, layers)
        assert held[one.stage].max() > setting.kv_capacity_bytes[one.stage]


def remote_reads(moves, cuts):
    """Tokens read from hosts, once a chunk that comes after the one with which they left."""
    return sum(one.tokens * (len(cuts[one.request]) - 1 - one.leaves) for one in moves)


def test_the_oldest_chunks_are_read_back_less_if_they_leave_late():
    """Uniform, M = N: what moves is the same, and later chunks alone read it from the host."""
    cuts, setting = [[100] * 16], setting_of(16, 16, 1200)
    pairs = reallocation.pairs(16)
    at_write = reallocation.plan(cuts, setting, pairs, moved="oldest")
    late = reallocation.postpone(at_write, cuts, setting)
    assert sum(one.tokens for one in late) == sum(one.tokens for one in at_write)
    first = [one for one in late if one.stage == 0 and one.chunk < 4]
    assert [one.leaves for one in first] == [13, 12, 12, 11]
    newest = reallocation.plan(cuts, setting, pairs)
    assert reallocation.postpone(newest, cuts, setting) == newest  # never before it is needed
    assert remote_reads(late, cuts) < remote_reads(at_write, cuts) / 2


def test_what_always_has_room_is_not_pushed():
    policy = mocap.get("mbkr", {"trigger": "balance", "push": "late"})
    assert policy.reallocate([[100] * 8], setting_of(8, 8, 800)) == []
    assert policy.reallocate([[100] * 8], setting_of(8, 8, 700)) != []


@settings(max_examples=30, deadline=None)
@given(plans())
def test_optimal_plans_fit(drawn):
    cuts, setting, _ = drawn
    try:
        moves = reallocation.optimal(cuts, setting, setting.layers)
    except CapacityError:
        return
    holds(cuts, moves, setting)
    holds(cuts, reallocation.postpone(moves, cuts, setting, setting.layers), setting)


def test_nothing_moves_while_everything_fits():
    setting = setting_of(8, 8, 800)
    assert reallocation.plan([[100] * 8] * 3, setting, reallocation.pairs(8)) == []


def test_balance_moves_on_purpose():
    setting = setting_of(8, 8, 10_000)
    cuts = [[100] * 8] * 3
    moves = reallocation.plan(cuts, setting, reallocation.pairs(8), "balance")
    held = reallocation.occupancy(cuts, moves, setting.kv_bytes_per_token)
    assert held.max() <= 600 + 1  # the balanced peak, not the 800 of each alone
    assert sum(move.tokens for move in moves) > 0


def test_an_impossible_plan_says_what_is_short():
    setting = setting_of(4, 4, 250)
    with pytest.raises(CapacityError, match="request 0, chunk 1") as caught:
        reallocation.plan([[100] * 4], setting, reallocation.pairs(4))
    assert caught.value.exit_code == 1
    # at slot 3 the pair (0, 2) has 4 + 2 chunks, 100 tokens more than its 500
    assert caught.value.details == {
        "request": 0,
        "chunk": 1,
        "stage": 2,
        "slot": 3,
        "short_bytes": 100,
    }


def test_static_surplus_is_lent_and_told_apart():
    """Stage 0 has half the room of the others: its partner lends what it never needs itself."""
    setting = setting_of(4, 4, (500, 1000, 1500, 1000))
    pairs = reallocation.pairs(4)
    assert setting.local_tokens == 500
    assert reallocation.static_max_tokens(setting, pairs) == 1000
    longest = reallocation.max_tokens(mocap.get("mbkr"), setting)
    assert longest == pytest.approx(1333, abs=4)
    assert reallocation.max_tokens(mocap.get("uniform"), setting) == 500


def test_nothing_fits_no_room():
    assert reallocation.max_tokens(mocap.get("mbkr"), setting_of(4, 4, 0)) == 0
