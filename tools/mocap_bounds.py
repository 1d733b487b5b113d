"""What pairs, groups and the optimum can hold, and how front-loaded chunks weaken them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mocap.policy
from mocap import reallocation
from mocap.policy import Setting
from tools.mocap_bench import AMPLE_BYTES, Bench
from tools.tables import Row
from wafer_emu.deployment import PAGE_TOKENS
from wafer_emu.options import Options

__all__ = ["PARTNERS", "bounds", "coupling"]

BUDGET_TOKENS = 1 << 20  # KV budget of the bounds, in tokens of one stage
BOUND_LAYOUTS = ((8, 8), (8, 12), (8, 16), (16, 16))
REQUESTS = {"alone": 1, "stream": 2}
PARTNERS: dict[str, Row] = {
    "pairs": {},
    "mirror": {"partner": "mirror"},
    "groups of 4": {"partner": "groups", "group_size": 4},
    "optimal": {"partner": "optimal"},
}


def bounds() -> Iterator[Row]:
    """Longest prompt over that of no moves, in slots: equal stages, KV alone, no hand-off."""
    for stages, chunks in BOUND_LAYOUTS:
        row: Row = {"N": stages, "M": chunks}
        for name, options in PARTNERS.items():
            policy = mocap.policy.get("mbkr", options)
            for kind, requests in REQUESTS.items():
                setting = _slots(stages, chunks, lambda c, p: c)
                longest = reallocation.max_tokens(policy, setting, requests)
                row[f"{name}, {kind}"] = longest / setting.local_tokens
        # Attention is half of the work of a prompt as long as the budget.
        setting = _slots(stages, chunks, lambda c, p: c * (BUDGET_TOKENS + 2 * p + c))
        longest = reallocation.max_tokens(mocap.policy.get("mocap"), setting, 2)
        row["pairs, equal times"] = longest / setting.local_tokens
        yield row


def _slots(stages: int, chunks: int, cost: Callable[[int, int], int]) -> Setting:
    """Equal stages with a KV budget, and nothing else."""
    return Setting(
        stages=stages,
        chunks=chunks,
        page_tokens=PAGE_TOKENS * 16,
        cost=cost,
        stage_cost=lambda stage, c, p: cost(c, p),
        kv_bytes_per_token=(1,) * stages,
        kv_capacity_bytes=(BUDGET_TOKENS,) * stages,
        hops=tuple(tuple(abs(a - b) for b in range(stages)) for a in range(stages)),
        link_bytes_per_cycle=1 << 40,
    )


def coupling(bench: Bench, lengths: Sequence[int]) -> Iterator[Row]:
    """What pairs can hold of a stream cut evenly, and of one cut by LBCP on the emulated cost.

    A pair is full when both hold all they can: tokens over half of the most that a pair holds at
    once. Where M = N that is 2 / (1 + f), f the share of tokens in the first half of the chunks.
    """
    for tokens in lengths:
        for stages, chunks in bench.layouts:
            options = Options(stages=stages, chunks=chunks, kv_budget=AMPLE_BYTES)
            even, balanced = (
                bench.plan(policy, tokens, options).cuts[0] for policy in ("uniform", "lbcp")
            )
            front = sum(balanced[: chunks // 2]) / tokens
            yield {
                "model": bench.model.name,
                "tokens": tokens,
                "N": stages,
                "M": chunks,
                "first half of LBCP's chunks [%]": 100 * front,
                "pairs, uniform cuts": _relief(even, stages),
                "pairs, LBCP cuts": _relief(balanced, stages),
                "2 / (1 + f)": 2 / (1 + front) if stages == chunks else None,
            }


def _relief(cuts: Sequence[int], stages: int) -> float:
    """Longest prompt with pairs over that without, of a stream of requests cut in proportion."""
    held = reallocation.occupancy([cuts, cuts], [], (1,) * stages)
    pairs = reallocation.pairs(stages)
    return 2 * sum(cuts) / max(int((held[a] + held[b]).max()) for a, b in pairs)
