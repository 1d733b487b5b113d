"""KV that lives away is streamed back, or attended to where it is."""

from __future__ import annotations

from collections import defaultdict

import pytest

import mocap.policy
from tests.wafer_emu.test_service import MODEL, WAFER
from wafer_emu.engine import run_plan, transfer_stall
from wafer_emu.options import Options
from wafer_emu.plan import Plan, make_plan
from wafer_emu.workload import Workload
from wafer_kernels.errors import ConfigError

STAGES, CHUNKS, TOKENS = 4, 4, 256
FLOAT = 4  # bytes of the model's own type and of partial results


def plan_of(**options: object) -> Plan:
    policy = mocap.policy.get("mbkr", {"trigger": "balance", **options})
    budget = 200 * 2 * MODEL.kv_heads * MODEL.head_dim * FLOAT * MODEL.layers // STAGES
    asked = Options(stages=STAGES, chunks=CHUNKS, kv_budget=budget)
    return make_plan(WAFER, MODEL, Workload.single(TOKENS), policy, asked)


def remote_tokens(plan: Plan, stage: int, chunk: int) -> dict[int, int]:
    """Tokens of earlier chunks that live with each other stage."""
    found: dict[int, int] = defaultdict(int)
    for move in plan.moves:
        if move.stage == stage and move.leaves < chunk:
            found[move.host] += move.tokens
    return found


@pytest.mark.parametrize("push", ["write", "late"])
@pytest.mark.parametrize("read_back", ["stream", "attend"])
def test_bytes_and_hops(read_back: str, push: str) -> None:
    """KV that leaves with a chunk goes over the links then; later chunks read it from its host."""
    plan = plan_of(read_back=read_back, push=push)
    assert any(move.leaves > move.chunk for move in plan.moves) == (push == "late")
    hops = plan.deployment.placement.hops()
    layers = MODEL.layers // STAGES
    kv = 2 * MODEL.kv_heads * MODEL.head_dim * FLOAT
    query = MODEL.heads * MODEL.head_dim * FLOAT
    partial = MODEL.heads * (MODEL.head_dim + 2) * FLOAT
    assert plan.moves
    for stage in range(STAGES):
        for chunk in range(CHUNKS):
            read = byte_hops = 0
            for host, tokens in remote_tokens(plan, stage, chunk).items():
                size = tokens * kv
                if read_back == "attend":
                    size = plan.cuts[0][chunk] * (query + partial)
                read += size * layers
                byte_hops += size * layers * hops[stage][host]
            written = 0
            for move in plan.moves:
                if (move.stage, move.leaves) == (stage, chunk):
                    written += move.tokens * kv * layers
                    byte_hops += move.tokens * kv * layers * hops[stage][move.host]
            assert plan.transfers.read_bytes[stage, chunk] == read
            assert plan.transfers.written_bytes[stage, chunk] == written
            assert plan.transfers.byte_hops[stage, chunk] == byte_hops


def test_nothing_hides_remote_attention() -> None:
    plan = plan_of(read_back="attend")
    query = MODEL.heads * MODEL.head_dim * FLOAT
    partial = MODEL.heads * (MODEL.head_dim + 2) * FLOAT
    cycles, stall = plan.deployment.links.transfer_cycles, transfer_stall(plan, run_plan(plan))
    layers = MODEL.layers // STAGES
    for stage in range(STAGES):
        for chunk in range(CHUNKS):
            exchange = sum(
                cycles(plan.cuts[0][chunk] * query, stage, host)
                + cycles(plan.cuts[0][chunk] * partial, host, stage)
                for host in remote_tokens(plan, stage, chunk)
            )
            assert stall[stage, chunk] >= layers * exchange
    assert run_plan(plan).end.max() > run_plan(plan_of()).end.max()


def test_moves_are_the_same() -> None:
    assert plan_of(read_back="attend").moves == plan_of().moves


def test_there_is_no_third_way() -> None:
    with pytest.raises(ConfigError, match="stream, attend"):
        plan_of(read_back="teleport")
