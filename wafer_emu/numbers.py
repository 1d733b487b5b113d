"""The second interpreter: a plan's tile programs on real numbers, in the engine's order of events.

Every tensor lies in the emulated memories of cores, at addresses that the ledger's rules give. What
leaves a stage is in flight until the next stage has room for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from wafer_emu.arena import Arena, storage_kind
from wafer_emu.kv_cache import KvCache, Part, refuse_fault
from wafer_emu.layout import element_bytes
from wafer_emu.memory import kv_quanta_per_token, kv_quantum_bytes
from wafer_emu.placement import Stage
from wafer_emu.plan import Plan
from wafer_emu.program import Norm, Product, Task, layer_operations, lower
from wafer_emu.replay import END, START, events
from wafer_emu.routing import Routing
from wafer_emu.stage_numbers import run
from wafer_emu.stage_products import answer
from wafer_emu.stage_tensors import Job, StageTensors
from wafer_emu.values import Numbers, prompts
from wafer_kernels import pipeline, sram
from wafer_kernels.errors import KernelError, UsageError
from wafer_kernels.region import Matrix
from wafer_kernels.region_cache import read_cache, write_cache

__all__ = ["LogitsOf", "compute"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
LogitsOf = Literal["last", "all"]


def compute(
    plan: Plan,
    schedule: pipeline.Schedule,
    weights: Mapping[str, Float32],
    token_ids: Sequence[Sequence[int]],
    prefix_kv: Sequence[Sequence[Float32]] | None = None,
    logits: LogitsOf = "last",
) -> Numbers:
    """Carry out a plan on real numbers.

    Parameters
    ----------
    plan, schedule
        What was planned, and when its tasks ran.
    weights
        Tensors (out, in) under the names of Hugging Face checkpoints.
    token_ids
        Of each request, its whole prompt.
    prefix_kv
        KV of each request's resident prefix, as ``Values.kv`` of an earlier run has it; None: it
        comes from the dense reference.
    logits
        Of the last token, or of all.

    Raises
    ------
    UsageError
        If the plan keeps something outside SRAM, or the tokens do not go with the workload.
    KernelError
        If a tensor is read where it is not: names core, block and cycle.
    """
    return _Walk(plan, schedule, weights, token_ids, prefix_kv, logits == "all").run()


class _Walk:
    """The state of a run: memories, KV, and what is in flight between stages."""

    def __init__(
        self,
        plan: Plan,
        schedule: pipeline.Schedule,
        weights: Mapping[str, Float32],
        token_ids: Sequence[Sequence[int]],
        prefix_kv: Sequence[Sequence[Float32]] | None,
        all_logits: bool,
    ) -> None:
        deployment = plan.deployment
        self.plan, self.schedule, self.all_logits = plan, schedule, all_logits
        self.model, self.weights = deployment.model, weights
        _require_sram(plan)
        self.requests = prompts(plan, weights, token_ids, prefix_kv)
        self.kv_kind = storage_kind(deployment.clocks[0].kv_dtype)
        regions = [stage.region for stage in deployment.stages]
        quantum = kv_quantum_bytes(deployment.clocks[0])
        self.arena = Arena(regions, deployment.wafer.core.sram_bytes, quantum)
        self.stages = [
            StageTensors(self.arena, stage, clock, memory, weights, list(self._names(stage)))
            for stage, clock, memory in zip(
                deployment.stages, deployment.clocks, plan.memories, strict=True
            )
        ]
        self.kv: list[dict[int, KvCache]] = [{} for _ in regions]
        self.current = [0] * len(regions)
        self.streams: list[Matrix | None] = [None] * len(regions)
        self.flights: list[deque[tuple[int, Float32]]] = [deque() for _ in regions]
        self.waiting: list[int | None] = [None] * len(regions)  # task in the hand-off buffer
        self.pushes: dict[tuple[int, int], list[tuple[Part, Int64, Int64]]] = {}
        """KV on its way to hosts by (stage, step): cores and slots that were taken for it."""

    def _names(self, stage: Stage) -> Iterator[str]:
        """Weights that live on a stage."""
        deployment, model = self.plan.deployment, self.model
        for layer in range(stage.first_layer, stage.first_layer + stage.layers):
            for name in model.layer_weight_shapes(layer):
                yield f"model.layers.{layer}.{name}"
        embedding = "model.embed_tokens.weight"
        if deployment.holds_embedding(stage):
            yield embedding
        if deployment.holds_head(stage):
            yield "model.norm.weight"
            if not (model.head_name == embedding and deployment.holds_embedding(stage)):
                yield model.head_name

    def run(self) -> Numbers:
        """Meet the events in the order in which the engine met them."""
        for cycle, kind, stage, task, step in events(self.plan.tasks, self.schedule):
            if kind == START:
                if step == 0:
                    self._start(stage, task, cycle)
                self._pass_layers(stage, task, step, cycle)
            elif kind == END:
                self._leave_layers(stage, task, step, cycle)
                if step + 1 == self.plan.tasks.layers[stage]:
                    self._end(stage, task, cycle)
        bounds = self.arena.first_core
        order = [request.index for request in self.plan.requests]
        answers = dict(zip(order, (each.values() for each in self.requests), strict=True))
        routing = {}
        if self.model.moe is not None:
            made = (Routing(each.chosen) for each in self.requests)
            routing = dict(zip(order, made, strict=True))
        return Numbers(
            [answers[index] for index in sorted(answers)],
            [routing[index] for index in sorted(routing)],
            [self.arena.peak[a:b] for a, b in pairwise(bounds)],
            [each.area.high_water for each in self.stages],
            sum(each.area.compactions for each in self.stages),
        )

    # -- tasks ----------------------------------------------------------------------------------
    def _start(self, stage: int, task: int, cycle: int) -> None:
        plan, here = self.plan, self.stages[stage]
        chunk = int(plan.tokens[task])
        load = plan.memories[stage].load(chunk)
        here.area.reserve(load.dealing.expand(load.activations).ravel(), cycle)
        stream = here.stream(chunk, plan.deployment.tile_tokens, cycle)
        here.write(stream, self._input(stage, task, cycle))
        self.streams[stage] = stream
        index, clock = int(plan.request[task]), plan.deployment.clocks[stage]
        if index not in self.kv[stage]:
            width = kv_quantum_bytes(clock) // element_bytes(self.kv_kind)
            layers, tokens = plan.deployment.stages[stage].layers, self.requests[index].tokens.size
            shape = (layers, tokens, kv_quanta_per_token(clock))
            self.kv[stage][index] = KvCache(self.arena, self.kv_kind, width, index, shape)

    def _layers(self, stage: int, step: int) -> slice:
        """Layers of a stage whose memory is granted and freed in one step of a task."""
        steps = int(self.plan.tasks.layers[stage])
        layers = self.plan.deployment.stages[stage].layers
        return slice(step * layers // steps, (step + 1) * layers // steps)

    def _pass_layers(self, stage: int, task: int, step: int, cycle: int) -> None:
        """Carry a task through the layers of one step, which take their KV's room now."""
        plan, here = self.plan, self.stages[stage]
        chunk, prefix = int(plan.tokens[task]), int(plan.prefix[task])
        index, stream = int(plan.request[task]), self.streams[stage]
        assert stream is not None
        kv, request, layers = self.kv[stage][index], self.requests[index], self._layers(stage, step)
        placed = plan.deployment.stages[stage]
        parts = self._place_kv(stage, task, step, cycle)
        for kept in range(layers.start, layers.stop):
            layer = placed.first_layer + kept
            if plan.chunk[task] == 0 and request.prefix:
                write_cache(self.arena.bytes, kv.layer(layer, kept), request.prefix_kv[layer])
            for tile, before in plan.deployment.tiles(chunk):
                rows = slice(before, before + tile)
                piece = stream._replace(line=stream.line[rows], place=stream.place[rows])
                job = Job(index, layer, cycle, piece, kv, kept, parts)
                skip = plan.deployment.options.causal_skip
                operations = layer_operations(self.model, layer, tile, prefix + before, skip)
                chosen = run(here, operations, job)
                if chosen is not None:
                    request.choose(layer, prefix + before, chosen)
                if kept == placed.layers - 1 and plan.deployment.holds_head(placed):
                    ends = before + tile == chunk and bool(plan.tasks.last[task])
                    self._answer(here, job, tile, prefix + before, ends)
            if plan.tasks.last[task]:
                self._keep_kv(stage, task, layer, kept, cycle)
        for part in parts:
            tokens = slice(part.first, part.first + part.tokens)
            kv.arrived[layers, tokens] = self.schedule.layer_end[stage, task, step]

    def _leave_layers(self, stage: int, task: int, step: int, cycle: int) -> None:
        """Bring pushed KV of the layers of one step to its hosts; free all with the last task."""
        layers, kv = self._layers(stage, step), self.kv[stage][int(self.plan.request[task])]
        for part, core, slot in self.pushes.pop((stage, step), []):
            kv.push(layers, part, core, slot, cycle)
        if self.plan.tasks.last[task]:
            kv.free(layers)

    def _end(self, stage: int, task: int, cycle: int) -> None:
        here, stream = self.stages[stage], self.streams[stage]
        assert stream is not None
        if stage + 1 < len(self.stages):
            self.flights[stage + 1].append((task, here.read(stream)))
            self._land(stage + 1)
        here.area.release()
        self.streams[stage] = None
        self.current[stage] += 1
        if self.plan.tasks.last[task]:
            del self.kv[stage][int(self.plan.request[task])]

    def _input(self, stage: int, task: int, cycle: int) -> Float32:
        """Residual stream of a task as it arrived at the stage (token, hidden)."""
        plan = self.plan
        ready = int(self.schedule.input_ready[stage, task])
        if ready > cycle:
            why = f"before its input arrives at cycle {ready:,}"
            raise self._no_input(stage, task, cycle, why)
        if stage == 0:
            request = self.requests[int(plan.request[task])]
            first = int(plan.prefix[task])
            tokens = request.tokens[first : first + int(plan.tokens[task])]
            if plan.deployment.holds_embedding(plan.deployment.stages[0]):
                return self.stages[0].look_up(tokens, "model.embed_tokens.weight")
            return self.weights["model.embed_tokens.weight"][tokens]
        here, waiting = self.stages[stage], self.waiting[stage]
        if waiting is not None:
            arrived, values = waiting, here.read(here.handoff(int(plan.tokens[waiting])))
            self.waiting[stage] = None
            self._land(stage)
        elif self.flights[stage]:
            arrived, values = self.flights[stage].popleft()
        else:
            raise self._no_input(stage, task, cycle, "but nothing was sent")
        if arrived != task:
            raise self._no_input(stage, task, cycle, f"but chunk {plan.chunk[arrived]} came")
        return values

    def _no_input(self, stage: int, task: int, cycle: int, why: str) -> KernelError:
        return KernelError(
            f"stage {stage} starts chunk {self.plan.chunk[task]} of request "
            f"{self.plan.request[task]} at cycle {cycle:,}, {why}",
            stage=stage,
            cycle=cycle,
        )

    def _land(self, stage: int) -> None:
        """Let what is in flight into the stage's hand-off buffer, where there is a free one."""
        here = self.stages[stage]
        if self.flights[stage] and self.waiting[stage] is None and here.memory.handoff_tokens:
            self.waiting[stage], values = self.flights[stage].popleft()
            here.write(here.handoff(len(values)), values)

    def _answer(self, here: StageTensors, job: Job, tile: int, prefix: int, ends: bool) -> None:
        """Final norm and head, of every token or of the last one."""
        request = self.requests[job.request]
        if not (ends or self.all_logits):
            return
        task = Task(0, 1, tile, prefix, last_chunk=True, all_logits=self.all_logits)
        norm, head = lower(self.model, task).epilogue
        assert isinstance(norm, Norm)
        assert isinstance(head, Product)
        hidden, logits = answer(here, norm, head, job)
        request.hidden.append(hidden)
        request.logits.append(logits)

    # -- KV -------------------------------------------------------------------------------------
    def _place_kv(self, stage: int, task: int, step: int, cycle: int) -> list[Part]:
        """Give a task's KV its slots, at home and on hosts; pushed KV gets those that it goes to.

        Returns where the task's own KV is written, in the layers of one step.
        """
        plan, layers = self.plan, self._layers(stage, step)
        kv = self.kv[stage][int(plan.request[task])]
        quanta = (layers.stop - layers.start) * kv.core.shape[2]
        parts = []
        for piece, number in plan.pieces.arriving[stage][task]:
            host = int(plan.tasks.host[stage, number])
            part = Part(host, piece.first, piece.tokens)
            taken, floor = self._spread(host, piece.tokens * quanta), self.stages[host].area.floor
            if piece.written == task:
                kv.place(layers, part, taken, floor)
                kv.arrived[layers, piece.first : piece.first + piece.tokens] = cycle
                parts.append(part)
            else:
                slots = kv.take(layers, part, taken, floor)
                self.pushes.setdefault((stage, step), []).append((part, *slots))
        return parts

    def _spread(self, host: int, quanta: int) -> Int64:
        """Bytes that each core of a host takes: the emptiest first, as in the ledger (core,)."""
        plan = self.plan
        room = plan.memories[host].kv_room(int(plan.largest_chunks[self.current[host]]))
        room = room - self.arena.kv_bytes(host)
        taken = np.zeros_like(room)
        if sram.spread(room, self.arena.quantum_bytes, quanta, taken) != sram.FITS:
            raise KernelError(f"stage {host} has no room for {quanta:,} KV quanta")
        return taken

    def _keep_kv(self, stage: int, task: int, layer: int, kept: int, cycle: int) -> None:
        """Read a layer's KV back from wherever it lies."""
        index = int(self.plan.request[task])
        kv = self.kv[stage][index]
        cache = kv.layer(layer, kept)
        values = np.empty((kv.core.shape[1], kv.core.shape[2] * cache.width), np.float32)
        fault = np.zeros(4, np.int64)
        read_cache(values, self.arena.bytes, cache, cycle, fault)
        refuse_fault(self.arena, fault, index, layer, cycle)
        self.requests[index].kv[layer] = values


def _require_sram(plan: Plan) -> None:
    """UsageError if the plan keeps anything outside SRAM, or counts no memory at all."""
    tiers = plan.deployment.tiers
    if plan.deployment.options.kv_budget is not None or tiers.in_die_memory:
        raise UsageError(
            "numbers hold every tensor in SRAM: leave --kv-budget out, and give --weights-tier "
            "sram --kv-tier sram --activations-tier sram on a wafer with die memory"
        )
    if plan.deployment.wafer.attention != "ring":
        raise UsageError(
            "numbers let key tiles travel around the rows of cores: this wafer takes attention as "
            "products; --set wafer.program.attention=ring changes that"
        )
