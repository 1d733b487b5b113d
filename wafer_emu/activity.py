"""What the cores of a run do: work counted task by task, and busy cycles of every core."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from wafer_emu.die_memory import stream_bytes
from wafer_emu.model import dtype_bytes
from wafer_emu.plan import Plan
from wafer_emu.program import Operation, Task, lower
from wafer_emu.work import Work, busy_map, counter_of, operation_work

__all__ = ["Activity"]

Int64 = npt.NDArray[np.int64]


class Activity:
    """Work and busy cycles of the tasks of a plan; tasks alike are counted once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._busy: dict[tuple[object, ...], Int64] = {}
        self._work: dict[tuple[object, ...], Work] = {}

    def _ends(self, stage: int, task: int) -> list[Operation]:
        """Operations of a task outside its layers: embedding look-up, final norm and head."""
        plan = self.plan
        deployment = plan.deployment
        placed = deployment.stages[stage]
        last = bool(plan.tasks.last[task]) and deployment.holds_head(placed)
        program = lower(
            deployment.model,
            Task(
                0,
                0,
                int(plan.tokens[task]),
                0,
                first_stage=placed.index == 0,
                last_chunk=last,
                embedding=deployment.options.embedding,
            ),
        )
        return list(program.operations())

    def _key(self, stage: int, task: int) -> tuple[object, ...]:
        plan = self.plan
        deployment = plan.deployment
        placed, routing = deployment.stages[stage], plan.routing_of(task)
        return (
            id(deployment.clocks[stage]),
            tuple(deployment.layer_kinds[stage].items()),
            None if routing is None else placed.first_layer,  # routed layers all differ
            placed.index == 0,
            bool(plan.tasks.last[task]) and deployment.holds_head(placed),
            int(plan.tokens[task]),
            int(plan.prefix[task]),
            routing,
        )

    def _layers(self, stage: int, task: int) -> Iterator[tuple[int, int, int, int]]:
        """(layer, how many are alike, tile, prefix) of a task."""
        plan = self.plan
        for tile, before in plan.deployment.tiles(int(plan.tokens[task])):
            for layer, count in plan.deployment.layers_alike(stage, plan.routing_of(task)):
                yield layer, count, tile, int(plan.prefix[task]) + before

    def work(self, stage: int, task: int) -> Work:
        """Work of a task on a stage, transfers between stages not included."""
        key = self._key(stage, task)
        if key not in self._work:
            plan, deployment = self.plan, self.plan.deployment
            clock = deployment.clocks[stage]
            counter = counter_of(clock)
            total = Work()
            for layer, count, tile, prefix in self._layers(stage, task):
                one = counter.layer_work(
                    layer, tile, prefix, deployment.options.causal_skip, plan.routing_of(task)
                )
                total = total.plus(one.times(count))
            whole, placed = deployment.scale
            total = Work(*(each * whole // placed for each in total))
            total = total.plus(self._stream_work(stage, task))
            for operation in self._ends(stage, task):
                total = total.plus(operation_work(clock, operation))
            self._work[key] = total
        return self._work[key]

    def _stream_work(self, stage: int, task: int) -> Work:
        """Die memory's part in the residual stream: written and read by every layer, tile by tile.

        A chunk of one tile is only written as it arrives, and read as its task starts. What the
        last layer writes is counted here and not where it arrives.
        """
        deployment, tokens = self.plan.deployment, int(self.plan.tokens[task])
        if deployment.tiers.activations == "sram":
            return Work()
        layers = 1
        if deployment.passes_die_memory(tokens):
            whole, placed = deployment.scale
            layers = -(-deployment.stages[stage].layers * whole // placed)
        return Work(dram_bytes=2 * layers * stream_bytes(deployment.clocks[stage], tokens))

    def busy(self, stage: int, task: int) -> Int64:
        """Busy cycles of every core of a stage (rows, columns) for a task."""
        key = self._key(stage, task)
        if key not in self._busy:
            plan, deployment = self.plan, self.plan.deployment
            clock = deployment.clocks[stage]
            counter = counter_of(clock)
            region = deployment.stages[stage].region
            total = np.zeros((region.rows, region.columns), np.int64)
            for layer, count, tile, prefix in self._layers(stage, task):
                total += count * counter.layer_busy(
                    layer, tile, prefix, deployment.options.causal_skip, plan.routing_of(task)
                )
            whole, placed = deployment.scale
            total = total * whole // placed
            self._busy[key] = total + busy_map(clock, self._ends(stage, task))
        return self._busy[key]

    def total(self) -> Work:
        """Work of all tasks on all stages, with hand-offs and KV transfers on the mesh."""
        plan = self.plan
        deployment = plan.deployment
        total = Work()
        stages, count = plan.compute.shape
        for stage in range(stages):
            for task in range(count):
                total = total.plus(self.work(stage, task))
        hops = deployment.placement.hops()
        width = deployment.model.hidden_size * dtype_bytes(deployment.model.dtype)
        passed = sum(hops[stage][stage + 1] for stage in range(stages - 1))
        moved = int(plan.transfers.byte_hops.sum())
        return total.plus(Work(hop_bytes=int(plan.tokens.sum()) * width * passed + moved))
