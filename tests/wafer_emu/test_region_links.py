"""Links between regions: routes, rates, what they carried, and what sharing them costs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import mocap.policy
from tests.naive.flows import xy_route
from tests.wafer_emu.small import DIES, LLAMA, TINY
from wafer_emu.emulation import Run, emulate
from wafer_emu.engine import run_plan, transfer_stall
from wafer_emu.link_use import carried_bytes, contention_cycles
from wafer_emu.model import Model
from wafer_emu.options import Options
from wafer_emu.placement import place_regions
from wafer_emu.region_links import MOST_GRAINS, RegionLinks
from wafer_emu.wafer import Wafer
from wafer_emu.workload import Workload

MODEL = Model.from_hf({**LLAMA, "num_hidden_layers": 8})
WSC = Wafer.preset("wsc-54")


def links_of(wafer: Wafer, stages: int) -> RegionLinks:
    return RegionLinks(wafer, place_regions(wafer, stages, None, stages))


def run_of(policy: str = "mbkr", *, record: Path | None = None, **options: object) -> Run:
    """Four stages of two layers, KV moved between them over slow links between dies."""
    slow = DIES.replace({"die_link.bytes_per_second": 10**8, "die_link.latency_seconds": 1e-8})
    asked = Options(
        stages=4, chunks=4, region=(3, 3), kv_budget=60_000, policy={"trigger": "balance"}
    )
    chosen = mocap.policy.get(policy, {"trigger": "balance"} if policy == "mbkr" else {})
    return emulate(
        slow, MODEL, Workload.single(256), chosen, options=replace(asked, **options), record=record
    )


@pytest.mark.parametrize("stages", [2, 6, 16, 54])
def test_routes_are_the_twins(stages: int) -> None:
    links = links_of(WSC, stages)
    regions = place_regions(WSC, stages, None, stages)
    cells = [(one.row // one.rows, one.column // one.columns) for one in regions]
    for a in range(stages):
        for b in range(stages):
            found = [
                tuple((one.row // one.rows, one.column // one.columns) for one in edge)
                for edge in links.route(a, b)
            ]
            assert found == xy_route(cells[a], cells[b])


def test_rates_by_hand() -> None:
    links, link = links_of(WSC, 8), WSC.die_link
    assert link is not None
    edge = Fraction(link.bytes_per_second, WSC.core.clock_hz)
    regions = place_regions(WSC, 8, None, 8)
    high, wide = regions[0].dies(WSC)
    assert links.rate(0, 1) == high * edge
    assert links.rate(3, 4) == wide * edge
    assert links.rate(0, 5) == min(high, wide) * edge  # round a corner: the slower side
    alone = links_of(TINY, 4)
    rows = place_regions(TINY, 4, None, 4)[0].rows
    assert alone.rate(0, 1) == rows * TINY.link.bytes_per_cycle
    assert alone.transfer_cycles(0, 0, 1) == alone.transfer_cycles(9, 1, 1) == 0
    moved = ceil(Fraction(1000) / alone.rate(0, 1))
    assert alone.transfer_cycles(1000, 0, 1) == moved + alone.latency(0, 1)


@pytest.mark.parametrize("rate", [1, 10**9, 1_414_213_562, 2 * 10**12])
def test_grains_hold_the_largest_flow_and_almost_every_rate(rate: int) -> None:
    links = links_of(WSC.replace({"die_link.bytes_per_second": rate}), 16)
    for most_bytes in (1, 10**6, 10**11):
        shared, grains = links.shared(most_bytes, contention=True)
        assert grains * most_bytes <= MOST_GRAINS
        assert int(shared.capacity.max()) * 2 * 16 <= MOST_GRAINS
        for edge, capacity in zip(links.edges, shared.capacity.tolist(), strict=True):
            exact = links.carries(edge)
            assert 0 <= 1 - Fraction(capacity, grains) / exact < Fraction(1, 10**6) or rate == 1


def test_alone_a_task_waits_as_the_formula_says() -> None:
    plan = run_of(contention=False).plan
    sent, links, count = plan.transfers, plan.deployment.links, plan.tokens.size
    stall = transfer_stall(plan, run_plan(plan))
    assert sent.written_bytes.sum() > 0
    for stage in range(4):
        for task in range(count):
            read = write = 0
            for part, host in enumerate(plan.tasks.host[stage].tolist()):
                read += links.transfer_cycles(int(sent.read[stage, part, task]), host, stage)
                write += links.transfer_cycles(int(sent.write[stage, part, task]), stage, host)
            cycles = int(plan.compute[stage, task])
            layers = [cycles // 2, cycles - cycles // 2]
            expected = read + max(0, read + write - layers[0]) + max(0, write - layers[1])
            assert stall[stage, task] == expected


def test_sharing_links_costs_time_where_flows_meet_and_none_on_fast_ones() -> None:
    run = run_of()
    assert run.summary["settings"]["contention"] is True
    cost = run.summary["links"]["contention_cycles"]
    assert cost == contention_cycles(run.plan, run.schedule) > 0
    alone = run_of(contention=False)
    assert alone.summary["links"]["contention_cycles"] == 0
    makespans = [each.summary["makespan_cycles"] for each in (run, alone)]
    assert makespans[0] - makespans[1] == cost
    assert np.array_equal(carried_bytes(run.plan), carried_bytes(alone.plan))
    capacity = np.full_like(run.plan.links.capacity, 2**50)
    fast = replace(run.plan, links=run.plan.links._replace(capacity=capacity))
    assert contention_cycles(fast, run_plan(fast)) == 0


def test_the_file_has_what_every_link_carried(tmp_path: Path) -> None:
    run = run_of(record=tmp_path / "run.h5")
    tree = xr.open_datatree(tmp_path / "run.h5")
    found = tree["links"].to_dataset()
    regions = run.summary["settings"]["regions"]
    width = MODEL.hidden_size * 2
    corners = zip(found["row"].values, found["column"].values, strict=True)
    ends = zip(found["to_row"].values, found["to_column"].values, strict=True)
    busy, size = found["busy_cycles"].values, found["bytes"].values
    sums = {}
    for at, (here, there) in enumerate(zip(corners, ends, strict=True)):
        sums[tuple(map(int, here)), tuple(map(int, there))] = int(size[at]), int(busy[at])
    handed = 256 * width
    for one, other in pairwise(regions):
        carried, cycles = sums[tuple(one[:2]), tuple(other[:2])]
        assert carried >= handed
        assert 0 < cycles <= run.summary["makespan_cycles"]
    total = sum(carried for carried, _ in sums.values())
    sent = run.plan.transfers
    crossed = 0
    links = run.plan.deployment.links
    for stage, part, task in np.argwhere(sent.read + sent.write > 0).tolist():
        host = int(run.plan.tasks.host[stage, part])
        crossed += len(links.route(stage, host)) * 2 * int(sent.write[stage, part, task])
        crossed += len(links.route(host, stage)) * 2 * int(sent.read[stage, part, task])
    assert total == crossed + handed * sum(len(links.route(k, k + 1)) for k in range(3))
    busiest = run.summary["links"]["busiest"]
    assert busiest["busy_fraction"] == busy.max() / run.summary["makespan_cycles"]


def test_one_stage_has_no_links() -> None:
    run = emulate(TINY, MODEL, Workload.single(64), "layerwise")
    assert run.summary["links"] == {"busiest": None, "contention_cycles": 0}
