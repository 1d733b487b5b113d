"""The slow twin of flows that share edges: cases worked by hand, what fair sharing promises."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive.flows import fair_rates, serve, xy_route

few = settings(max_examples=60, deadline=None)
EAST, WEST, SOUTH = "east", "west", "south"


def test_a_route_turns_once() -> None:
    assert xy_route((2, 0), (1, 2)) == [((2, 0), (2, 1)), ((2, 1), (2, 2)), ((2, 2), (1, 2))]
    assert xy_route((1, 1), (1, 0)) == [((1, 1), (1, 0))]
    assert xy_route((1, 1), (1, 1)) == []


def test_rates_rise_together_until_an_edge_is_full() -> None:
    capacity = {EAST: 12, SOUTH: 30, WEST: 7}
    assert fair_rates([[EAST]], capacity) == [12]
    assert fair_rates([[EAST], [EAST]], capacity) == [6, 6]
    assert fair_rates([[EAST], [WEST]], capacity) == [12, 7]
    # Two share the east; the third has what they leave of the south.
    assert fair_rates([[EAST], [EAST, SOUTH], [SOUTH]], capacity) == [6, 6, 24]
    # 7 grains for two flows: a grain is left.
    assert fair_rates([[WEST], [WEST]], capacity) == [3, 3]
    # Both edges are full at 5/2 of a grain, whatever their order: nobody gets 5 - 2.
    tied = [[EAST], [EAST, SOUTH], [SOUTH]]
    assert fair_rates(tied, {EAST: 5, SOUTH: 5}) == [2, 2, 2]
    assert fair_rates(tied, {SOUTH: 5, EAST: 5}) == [2, 2, 2]
    with pytest.raises(ValueError, match="more flows than grains"):
        fair_rates([[WEST]] * 8, capacity)


@st.composite
def crowds(draw):
    """Paths over some of five edges."""
    capacity = dict(enumerate(draw(st.lists(st.integers(8, 40), min_size=5, max_size=5))))
    path = st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True)
    return draw(st.lists(path, min_size=1, max_size=8)), capacity


@given(crowds(), st.randoms(use_true_random=False))
@few
def test_no_edge_over_capacity_and_no_flow_held_back(crowd, random) -> None:
    paths, capacity = crowd
    rates = fair_rates(paths, capacity)
    on = {edge: [f for f, path in enumerate(paths) if edge in path] for edge in capacity}
    assert all(sum(rates[f] for f in on[edge]) <= capacity[edge] for edge in capacity)
    for flow, path in enumerate(paths):
        # On one of its edges nobody has more, and what is left is not a grain for each of them.
        assert any(
            rates[flow] == max(rates[f] for f in on[edge])
            and capacity[edge] - sum(rates[f] for f in on[edge])
            < sum(rates[f] == rates[flow] for f in on[edge])
            for edge in path
        )
    order = random.sample(range(len(paths)), len(paths))
    edges = dict(random.sample(sorted(capacity.items()), len(capacity)))
    assert fair_rates([paths[f] for f in order], edges) == [rates[f] for f in order]


@given(crowds())
@few
def test_where_all_divides_rates_are_max_min_fair(crowd) -> None:
    paths, capacity = crowd
    # At most eight flows, and five edges that fill one after the other: all shares are whole.
    fine = {edge: grains * 840**5 for edge, grains in capacity.items()}
    rates = fair_rates(paths, fine)
    for flow, path in enumerate(paths):
        on = {edge: [rates[f] for f, other in enumerate(paths) if edge in other] for edge in path}
        assert any(sum(on[e]) == fine[e] and rates[flow] == max(on[e]) for e in path)


@given(st.integers(1, 500), st.integers(1, 9), st.integers(0, 6), st.integers(0, 5))
@few
def test_alone_a_flow_takes_its_bytes_over_the_slowest_edge(grains, rate, latency, start) -> None:
    served = serve([(start, grains, [EAST, SOUTH], latency)], {EAST: rate, SOUTH: rate + 3})
    assert served.left == [start - (-grains // rate)]
    assert served.arrived == [start - (-grains // rate) + latency]
    assert served.carried == {EAST: grains, SOUTH: grains}
    assert served.busy == {EAST: -(-grains // rate), SOUTH: -(-grains // rate)}


def test_two_flows_on_one_edge_take_twice() -> None:
    capacity = {EAST: 10, WEST: 10}
    both = [(0, 100, [EAST], 3), (0, 100, [EAST], 3)]
    assert serve(both[:1], capacity).arrived == [13]
    assert serve(both, capacity).arrived == [23, 23]
    assert serve(both, capacity).busy == {EAST: 20, WEST: 0}
    assert serve(both, capacity, contention=False).arrived == [13, 13]
    back = [(0, 100, [EAST], 3), (0, 100, [WEST], 3)]
    assert serve(back, capacity).arrived == [13, 13]


def test_who_comes_later_halves_the_rate_until_the_first_has_gone() -> None:
    # 40 alone till 4, then 5 a cycle each: the first goes at 16, the second has 40 left at 10.
    served = serve([(0, 100, [EAST], 0), (4, 100, [EAST], 0)], {EAST: 10})
    assert served.left == [16, 20]
    # A flow that begins as another ends never meets it.
    served = serve([(0, 100, [EAST], 7), (10, 100, [EAST], 7)], {EAST: 10})
    assert served.arrived == [17, 27]
    # What the first leaves of its last cycle (4 grains of 5) is not given to the second.
    served = serve([(0, 41, [EAST], 0), (0, 95, [EAST], 0)], {EAST: 10})
    assert served.left == [9, 14]
    assert served.carried == {EAST: 136}
