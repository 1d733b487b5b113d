"""The price of the moves as the links between dies slow down, to where MBKR stops paying."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np

import mocap.policy
from mocap.lbcp import Lbcp
from mocap.mbkr import Reallocating
from mocap.policy import Policy
from tools.mocap_bench import Bench, moved_bytes, price
from tools.tables import Row, binds, limit
from wafer_emu.emulation import max_length
from wafer_emu.options import Options
from wafer_kernels.errors import CapacityError

__all__ = ["GRAIN_TOKENS", "PRICE_PERCENT", "bandwidth", "crossover", "overhead"]

GRAIN_TOKENS = 1024  # longest prompts are found in multiples of this
GIGABYTES_PER_SECOND = (1, 3, 10, 30, 100, 300, 1000, 4000)
SHORTER = 4  # prompts tried from the middle down
OVERHEAD_GIGABYTES_PER_SECOND = (10, 30, 100)
PRICE_PERCENT = 5.0  # MBKR does not pay if its moves cost more than this share of the latency
CLOSE = 1.05  # a crossover lies between two bandwidths of this ratio
MEGA, GIGA = 10**6, 10**9

HIDDEN, ALONE = "price, overlapped [%]", "price, links alone [%]"
SERIAL = "price, serial [%]"
MOVED, KEPT = "mbkr [s]", "no moves, KV in any memory [s]"


class IgnoringMocap(Reallocating, Lbcp):
    """MOCAP whose cuts ignore what the moves cost."""


def _layouts(bench: Bench) -> Iterator[tuple[str, Options]]:
    """The likely layout of the paper, and one in which no link between dies lies inside a stage."""
    stages, chunks = bench.layouts[0]
    on_cores = Options(stages=stages, chunks=chunks, kv_tier="sram", activations_tier="sram")
    yield f"N = {stages}, M = {chunks}", on_cores
    die = (bench.wafer.die.core_rows, bench.wafer.die.core_columns)
    stages = min(bench.wafer.dies, bench.model.layers) // 2 * 2
    if stages > bench.layouts[0][0]:
        options = replace(on_cores, stages=stages, chunks=stages, region=die)
        yield f"N = M = {stages}, a die each", options


def _cases(bench: Bench, *policies: str) -> Iterator[tuple[Row, Options, int]]:
    """The middle of the longest prompts that policies hold in SRAM, in each layout.

    0 tokens where there is none; the row says why.
    """
    for layout, options in _layouts(bench):
        row: Row = {"model": bench.model.name, "layout": layout}
        if bench.wafer.die_link is None:
            yield {**row, "binds": "no links between dies: nothing to sweep"}, options, 0
            continue
        found = max_length(
            bench.wafer, bench.model, policies, options=options, grain_tokens=GRAIN_TOKENS
        )
        if found[-1]["max_tokens"] == 0:
            yield {**row, "tokens": 0, "binds": limit(found[-1]["limiting"])}, options, 0
            continue
        tokens = sum(each["max_tokens"] for each in found) // len(found)
        yield {**row, "tokens": tokens}, options, tokens


def _measured(bench: Bench, tokens: int, options: Options, bytes_per_second: int) -> Row:
    """Latency with moves and without, and the price of the moves, at one speed of the links."""
    slower = bench.slowed(bytes_per_second)
    try:
        plan = slower.plan("mbkr", tokens, options)
    except CapacityError as error:
        return {"binds": binds(error)}
    row: Row = {"KV moved [MB]": moved_bytes(plan) / MEGA, MOVED: slower.seconds(plan)}
    alone = replace(plan, links=plan.links._replace(shared=np.zeros(1, np.int64)))
    row |= {HIDDEN: 100 * (price(plan) - 1), ALONE: 100 * (price(alone) - 1)}
    row |= {SERIAL: 100 * (price(plan, overlap=False) - 1)}
    try:
        kept = slower.plan("uniform", tokens, replace(options, kv_tier="auto"))
        row[KEPT] = slower.seconds(kept)
    except CapacityError:
        row[KEPT] = None
    return row


def bandwidth(bench: Bench, lengths: Sequence[int]) -> Iterator[Row]:
    """Price of the moves of the longest prompt that MBKR holds in SRAM, and the other way to it.

    The other way is the same cuts without moves, KV where it fits: in die memory, if there is any.
    """
    for row, options, tokens in _cases(bench, "mbkr"):
        if tokens == 0:
            yield row
            continue
        for rate in GIGABYTES_PER_SECOND:
            figures = _measured(bench, tokens, options, rate * GIGA)
            yield {**row, "die link [GB/s]": rate, **figures}


def crossover(bench: Bench, lengths: Sequence[int]) -> Iterator[Row]:
    """Bandwidth below which MBKR stops paying at the length of the bandwidth section [GB/s].

    With moves and hand-offs that share their links, and as if each had them alone.
    Where it does so at none or at all bandwidths of the sweep, the end of the sweep stands.
    """
    for row, options, tokens in _cases(bench, "mbkr"):
        if tokens == 0:
            yield row
            continue

        @cache
        def at(rate: int, tokens: int = tokens, options: Options = options) -> Row:
            return _measured(bench, tokens, options, rate)

        def too_dear(price_head: str, at: Callable[[int], Row] = at) -> float | str:
            return _below(lambda rate: at(rate).get(price_head, math.inf) > PRICE_PERCENT)

        def dearer(at: Callable[[int], Row] = at) -> float | str:
            return _below(lambda rate: at(rate).get(MOVED, math.inf) > at(rate)[KEPT])

        other_way = at(GIGA * GIGABYTES_PER_SECOND[0]).get(KEPT) is not None
        yield {
            **row,
            f"moves cost over {PRICE_PERCENT:g} %, overlapped, below [GB/s]": too_dear(HIDDEN),
            "the same, links alone, below [GB/s]": too_dear(ALONE),
            f"moves cost over {PRICE_PERCENT:g} %, serial, below [GB/s]": too_dear(SERIAL),
            "cheaper without moves below [GB/s]": dearer() if other_way else None,
        }


def _below(stops: Callable[[int], bool]) -> float | str:
    """Largest bandwidth at which something stops paying, within CLOSE [GB/s]."""
    rates = [rate * GIGA for rate in reversed(GIGABYTES_PER_SECOND)]
    if stops(rates[0]):
        return f"> {GIGABYTES_PER_SECOND[-1]}"
    for fast, slow in pairwise(rates):
        if stops(slow):
            pays, pays_not = fast, slow
            while pays > CLOSE * pays_not:
                middle = math.isqrt(pays * pays_not)
                if stops(middle):
                    pays_not = middle
                else:
                    pays = middle
            return pays_not / (GIGA)
    return f"< {GIGABYTES_PER_SECOND[0]}"


def overhead(bench: Bench, lengths: Sequence[int]) -> Iterator[Row]:
    """LBCP that counts the moves, against uniform cuts and the cuts that ignore them.

    All have the leanest tiles, so that nothing but the cuts differs. The prompt is midway between
    the longest that LBCP holds in SRAM without moves and with them; or, since cuts differ on slow
    links, up to a few grains shorter, so that all hold it.
    """
    policies: dict[str, Policy] = {
        "o counted [s]": mocap.policy.get("mocap"),
        "o ignored [s]": IgnoringMocap(),
        "uniform cuts [s]": mocap.policy.get("mbkr"),
    }
    for row, options, tokens in _cases(bench, "lbcp", "mocap"):
        if tokens == 0:
            yield row
            continue
        for rate in OVERHEAD_GIGABYTES_PER_SECOND:
            slower = bench.slowed(rate * GIGA)
            for fewer in range(SHORTER):
                length = tokens - fewer * GRAIN_TOKENS
                found = _cut_alike(slower, policies, length, options)
                if "binds" not in found:
                    break
            found = {**row, "tokens": length, "die link [GB/s]": rate, **found}
            counted, *others = (found.get(head) for head in policies)
            ran = [each for each in others if each is not None]
            if counted is not None and ran:
                found["counted over the better [%]"] = 100 * (counted / min(ran) - 1)
            yield found


def _cut_alike(bench: Bench, policies: Mapping[str, Policy], tokens: int, options: Options) -> Row:
    """Latency of one prompt under each policy in the leanest tiles, and the KV that it moves."""
    found: Row = {}
    for head, policy in policies.items():
        try:
            plan = bench.plan(policy, tokens, options, leanest=True)
            found[head] = bench.seconds(plan)
            found.setdefault("KV moved [MB]", moved_bytes(plan) / MEGA)
        except CapacityError as error:
            found["binds"] = f"{head.removesuffix(' [s]')}: {binds(error)}"
    return found
