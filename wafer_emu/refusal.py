"""Why a plan does not fit: the sentence and the figures that its error carries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import mocap.policy
from mocap.policy import Move, Policy, Request
from wafer_emu.deployment import Deployment
from wafer_emu.memory import StageMemory, kv_quantum_bytes
from wafer_emu.order import Order, quanta_per_token
from wafer_kernels import pipeline
from wafer_kernels.errors import CapacityError

__all__ = ["capacity_error", "needs_and_rooms", "refusal", "refuse_too_long", "refuse_too_wide"]

Int64 = npt.NDArray[np.int64]


def needs_and_rooms(deployment: Deployment, policy: Policy) -> tuple[list[int], list[int]]:
    """KV quanta that a token needs at least, and room for them at the least working set.

    Of every stage: a policy that moves nothing needs a stage's KV to fit on that stage. One that
    moves has all stages' room for any one stage's KV: a single need and room.
    """
    needs = quanta_per_token(deployment, policy)
    rooms = [memory.kv_quanta(1) for memory in deployment.memories(0)]
    if type(policy).reallocate is not Policy.reallocate:
        return [max(needs)], [sum(rooms)]
    return needs, rooms


def refuse_too_long(deployment: Deployment, policy: Policy, request: Request) -> None:
    """Refuse before any cutting KV that no cut leaves room for, at the least working set."""
    quantum = kv_quantum_bytes(deployment.clocks[0])
    needs, rooms = needs_and_rooms(deployment, policy)
    for stage, (each, room) in enumerate(zip(needs, rooms, strict=True)):
        need = request.tokens * each
        if need > room:
            where = f"stage {stage}" if len(needs) == len(deployment.stages) else "any one stage"
            raise _no_room(
                deployment, policy, request.tokens, where, need * quantum, room * quantum,
                stage=stage,
            )  # fmt: skip


def refuse_too_wide(deployment: Deployment, policy: Policy, request: Request) -> None:
    """Refuse before any cutting a working set that no cut avoids.

    Of so many chunks at most, the largest has no fewer tokens than the mean of so many.
    """
    wanted = deployment.options.chunk_tokens
    count = -(-request.new_tokens // wanted) if wanted else deployment.chunks
    most = mocap.policy.most_chunks(policy, count)
    chunk = -(-request.new_tokens // most) if most else 1
    for stage, memory in enumerate(deployment.memories(0)):
        if memory.shortage(chunk) > 0:
            raise capacity_error(deployment, memory, stage, chunk)


def refusal(
    order: Order,
    moves: Sequence[Move],
    tasks: pipeline.Tasks,
    task: int,
    shortage: Int64,
) -> CapacityError:
    """The error of a request that does not fit even alone."""
    stage, slot, quanta = (int(each) for each in shortage)
    deployment = order.deployment
    quantum = kv_quantum_bytes(deployment.clocks[stage])
    request = order.requests[int(order.request[task])]
    chunk = min(max(slot - stage, 0), len(order.cuts[int(order.request[task])]) - 1)
    capacity = int(tasks.capacity[stage, task + chunk]) * quantum
    hosted = sum(
        move.tokens * deployment.kv_quanta_per_token()[move.stage] * quantum
        for move in moves
        if move.request == order.request[task] and move.host == stage
    )
    where = f"stage {stage} in slot {slot} (chunk {chunk}), hosting {hosted:,} B of others,"
    return _no_room(
        deployment,
        order.policy,
        request.tokens,
        where,
        capacity + quanta * quantum,
        capacity,
        stage=stage,
        slot=slot,
        chunk=chunk,
        hosted_bytes=hosted,
    )


def _no_room(
    deployment: Deployment,
    policy: Policy,
    tokens: int,
    where: str,
    need: int,
    room: int,
    **details: object,
) -> CapacityError:
    """The error of a prompt whose KV does not fit, with what else fills the memory."""
    budget = deployment.options.kv_budget is not None
    items: dict[str, int] = {"kv": need}
    stage = details["stage"]
    assert isinstance(stage, int)
    memory = deployment.memories(0)[stage]
    if memory.kv_among_cores:
        region = deployment.stages[stage].region
        where += f" (all {region.cores:,} cores from ({region.row}, {region.column}) on are full)"
        load = memory.load(1)
        counts = load.dealing.counts
        for name in ("code", "weights", "activations", "buffers"):
            items[name] = int(np.sum(np.broadcast_to(getattr(load, name), counts.shape) * counts))
    elif not budget:
        items["weights"] = int(memory.die_weights.sum())
        items["activations"] = int(memory.die_activations(1).sum())
        items["buffers"] = int(memory.die_buffers.sum())
    filled = ", ".join(f"{name} {size:,} B" for name, size in items.items())
    tier = "budget" if budget else deployment.tiers.kv
    return CapacityError(
        f"a prompt of {tokens:,} tokens does not fit under {policy.name}: {where} needs {need:,} B "
        f"of KV and has room for {room:,} B in {'its KV budget' if budget else tier}, "
        f"{need - room:,} B too many ({filled}); what would help: a shorter prompt, more stages, a "
        "policy that moves KV (mbkr, mocap), or KV in die memory where there is any",
        tier=tier,
        need_bytes=need,
        capacity_bytes=room,
        short_bytes=need - room,
        items=items,
        **details,
    )


def _die_error(
    deployment: Deployment, memory: StageMemory, stage: int, chunk: int
) -> CapacityError:
    """The error of a stage whose die memories are over before any KV is stored."""
    items = {
        "weights": int(memory.die_weights.max()),
        "activations": int(memory.die_activations(chunk).max()),
        "buffers": int(memory.die_buffers.max()),
    }
    need, capacity = int(memory.die_load(chunk).max()), int(memory.die_places[0])
    filled = ", ".join(f"{name} {size:,} B" for name, size in items.items())
    return CapacityError(
        f"stage {stage} does not fit: the fullest of its {memory.die_places.size} die memories "
        f"needs {need:,} B of its {capacity:,} B, {need - capacity:,} B too many ({filled}); what "
        "would help: more stages or larger regions; smaller chunks (--chunks)",
        stage=stage,
        tier="dram",
        need_bytes=need,
        capacity_bytes=capacity,
        short_bytes=need - capacity,
        items=items,
    )


def capacity_error(
    deployment: Deployment, memory: StageMemory, stage: int, chunk: int
) -> CapacityError:
    """The error of a stage whose fullest core, or die, is over before any KV is stored."""
    load = memory.load(chunk)
    total = load.dealing.expand(load.total)
    if total.max() <= deployment.wafer.core.sram_bytes:
        return _die_error(deployment, memory, stage, chunk)
    row, column = (int(i) for i in np.unravel_index(np.argmax(total), total.shape))
    region = deployment.stages[stage].region
    items = {
        "code": load.code,
        "weights": load.weights,
        "activations": load.activations,
        "buffers": load.buffers,
    }
    shares = {
        name: int(np.broadcast_to(load.dealing.expand(kinds), total.shape)[row, column])
        for name, kinds in items.items()
    }
    capacity, need = deployment.wafer.core.sram_bytes, int(total[row, column])
    filled = ", ".join(f"{name} {size:,} B" for name, size in shares.items())
    remedies = ["more stages or larger regions", "smaller chunks (--chunks)"]
    if deployment.wafer.dram is not None and deployment.tiers.activations == "sram":
        remedies.insert(0, "waiting activations in die memory (--activations-tier dram)")
    if deployment.wafer.dram is not None and deployment.tiers.weights == "sram":
        remedies.insert(0, "weights in die memory (--weights-tier dram)")
    else:
        remedies.append("fewer layers (--layers) or a smaller type (--weights-dtype)")
    return CapacityError(
        f"stage {stage} does not fit: core ({region.row + row}, {region.column + column}) needs "
        f"{need:,} B of its {capacity:,} B, {need - capacity:,} B too many ({filled}); "
        f"what would help: {'; '.join(remedies)}",
        stage=stage,
        core=[region.row + row, region.column + column],
        need_bytes=need,
        capacity_bytes=capacity,
        short_bytes=need - capacity,
        items=shares,
    )
