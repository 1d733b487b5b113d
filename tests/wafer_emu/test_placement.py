"""Regions on the fabric and layers on stages: nothing overlaps, the best split is found."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wafer_emu.placement import (
    Region,
    place_regions,
    place_stages,
    split_layers,
)
from wafer_emu.wafer import Wafer
from wafer_kernels.errors import UsageError

few = settings(max_examples=60, deadline=None)
WSE = Wafer.preset("wse-2")
DIES = Wafer.preset("wsc-54")
TINY = Wafer.preset("tiny-4x4")


def cells(region: Region) -> set[tuple[int, int]]:
    return set(
        product(
            range(region.row, region.row + region.rows),
            range(region.column, region.column + region.columns),
        )
    )


def grid_of(rows: int, columns: int) -> Wafer:
    return TINY.replace({"die.core_rows": rows, "die.core_columns": columns})


def check_apart(regions: list[Region], rows: int, columns: int, stages: int) -> None:
    assert len(regions) == stages
    assert len({(region.rows, region.columns) for region in regions}) == 1
    fabric = cells(Region(0, 0, rows, columns))
    assert all(cells(region) <= fabric for region in regions)
    assert all(not cells(a) & cells(b) for a, b in combinations(regions, 2))


@few
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 16))
def test_regions_lie_on_the_fabric_and_apart(rows: int, columns: int, stages: int) -> None:
    wafer = grid_of(rows, columns)
    if stages > rows * columns:
        with pytest.raises(UsageError, match="ask for fewer stages"):
            place_regions(wafer, stages, None, 32)
        return
    check_apart(place_regions(wafer, stages, None, 32), rows, columns, stages)


@few
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 32))
def test_a_folded_ring_takes_pairs_of_neighbours(down: int, across: int, stages: int) -> None:
    wafer = grid_of(down, across)
    pairs = down // 2 * across if down > 1 else across // 2
    if stages > 1 and (stages + 1) // 2 > pairs:
        with pytest.raises(UsageError, match=r"serpentine|fewer stages"):
            place_regions(wafer, stages, (1, 1), 32, "folded-ring")
        return
    check_apart(place_regions(wafer, stages, (1, 1), 32, "folded-ring"), down, across, stages)


@few
@given(st.integers(1, 54))
def test_a_wafer_of_dies_is_cut_into_whole_dies(stages: int) -> None:
    for region in place_regions(DIES, stages, None, 80):
        assert region.row % 16 == region.column % 16 == region.rows % 16 == region.columns % 16 == 0


@few
@given(st.integers(1, 40))
def test_no_cut_uses_a_tenth_more_cores_or_is_squarer(stages: int) -> None:
    regions = place_regions(WSE, stages, None, 80)
    used = stages * regions[0].cores
    longer = max(regions[0].rows, regions[0].columns)
    for down in range(1, stages + 1):
        rows, columns = WSE.core_rows // down, WSE.core_columns // -(-stages // down)
        assert used >= 0.9 * stages * rows * columns
        if rows * columns >= regions[0].cores:
            assert max(rows, columns) >= longer


def test_sixteen_stages_of_a_wafer_are_close_to_square() -> None:
    regions = place_regions(WSE, 16, None, 32)
    assert (regions[0].rows, regions[0].columns) == (187, 248)


def test_serpentine_neighbours_touch() -> None:
    regions = place_regions(WSE, 16, (187, 248), 32)
    for one, two in pairwise(regions):
        assert one.hops_to(two) in (187, 248)


@pytest.mark.parametrize(
    ("down", "across", "stages", "farthest"),
    [
        (2, 8, 16, 2),
        (2, 5, 9, 4),
        (4, 4, 16, 3),
        (6, 3, 17, 4),
        (1, 8, 8, 4),
        (8, 1, 8, 4),
        (1, 1, 1, 0),
    ],
)
def test_partners_of_a_folded_ring_are_neighbours(
    down: int, across: int, stages: int, farthest: int
) -> None:
    regions = place_regions(grid_of(down, across), stages, (1, 1), 32, "folded-ring")
    half = stages // 2
    assert len({(region.row, region.column) for region in regions}) == stages
    for stage in range(half):
        assert regions[stage].hops_to(regions[stage + half]) == 1
    steps = [one.hops_to(two) for one, two in pairwise(regions)]
    assert max(steps, default=0) <= farthest


def test_a_folded_ring_needs_pairs() -> None:
    with pytest.raises(UsageError, match="use --placement serpentine"):
        place_regions(grid_of(3, 3), 9, (1, 1), 32, "folded-ring")


def test_the_region_shape_alone_gives_as_many_stages_as_fit() -> None:
    assert len(place_regions(TINY, None, (2, 2), 32)) == 4
    assert len(place_regions(TINY, None, (2, 2), 3)) == 3


@pytest.mark.parametrize(
    ("stages", "shape"), [(17, None), (5, (2, 2)), (1, (5, 4)), (None, (1, 5)), (2, (4, 3))]
)
def test_what_the_fabric_cannot_hold_is_refused(
    stages: int | None, shape: tuple[int, int] | None
) -> None:
    with pytest.raises(UsageError, match="fewer stages"):
        place_regions(TINY, stages, shape, 32)


def test_distances_and_dies() -> None:
    a, b = Region(0, 0, 2, 4), Region(3, 4, 2, 3)
    assert a.hops_to(b) == b.hops_to(a) == 3 + 4  # centres (0.5, 1.5) and (3.5, 5): 6.5 up
    assert Region(0, 0, 16, 16).dies(DIES) == (1, 1)
    assert Region(8, 8, 16, 16).dies(DIES) == (2, 2)
    assert Region(16, 32, 16, 33).dies(DIES) == (1, 3)


def test_a_placement_knows_its_stages() -> None:
    regions = place_regions(TINY, 3, (2, 2), 32)
    placement = place_stages(TINY, regions, [2, 1, 3], "serpentine")
    assert [(s.index, s.first_layer, s.layers) for s in placement.stages] == [
        (0, 0, 2),
        (1, 2, 1),
        (2, 3, 3),
    ]
    assert (placement.cores_used, placement.cores_unused) == (12, 4)
    assert placement.hops() == ((0, 2, 4), (2, 0, 2), (4, 2, 0))


def splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))
        for cuts in combinations(range(1, layers), stages - 1)
    ]


@few
@given(
    st.lists(st.integers(10, 15), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(0, 40),
    st.integers(2, 9),
)
def test_the_best_split_is_found(
    layer_cycles: list[int], stages: int, head: int, held: int
) -> None:
    """Against all splits, for layers of like cost, a head on the last stage, room for ``held``."""
    layers = len(layer_cycles)

    def cost(stage: int, first: int, count: int) -> int | None:
        if count > held:
            return None
        return sum(layer_cycles[first : first + count]) + (head if stage == stages - 1 else 0)

    def costs(counts: tuple[int, ...]) -> list[int | None]:
        return [cost(i, sum(counts[:i]), count) for i, count in enumerate(counts)]

    if stages > layers:
        with pytest.raises(UsageError, match="every stage needs a layer"):
            split_layers(layers, stages, cost)
        return
    known = [[each for each in costs(counts) if each] for counts in splits(layers, stages)]
    possible = [each for each in known if len(each) == stages]
    if not possible:
        assert split_layers(layers, stages, cost) is None
        return
    found = split_layers(layers, stages, cost)
    assert found is not None
    assert sum(found) == layers
    cycles = [each for each in costs(tuple(found)) if each]
    assert len(cycles) == stages
    assert max(cycles) == min(max(each) for each in possible)


def test_equal_layers_are_split_evenly() -> None:
    def cost(stage: int, first: int, count: int) -> int:
        return 10 * count

    assert sorted(split_layers(32, 5, cost)) == [6, 6, 6, 7, 7]
    assert split_layers(32, 16, cost) == [2] * 16
