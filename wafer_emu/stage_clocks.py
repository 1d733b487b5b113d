"""Clocks of stages: shared by stages alike, and kept from deployment to deployment."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from wafer_emu.clock import Clock, Tiers
from wafer_emu.model import Model, dtype_bytes
from wafer_emu.options import Options
from wafer_emu.placement import Region
from wafer_emu.program import attention_operation
from wafer_emu.wafer import Wafer
from wafer_kernels.errors import CapacityError

__all__ = ["UNBOUNDED", "Shelf", "StageClocks", "attention_levels", "with_attention"]

Shelf = dict[tuple[object, ...], Clock]  # of one wafer, model and options
LEVELS_PER_OCTAVE = 8  # of bytes that attention may have: a tenth apart
UNBOUNDED = 2**62  # attention bytes of a clock that no memory binds


def _fullest(region: Region, shape: tuple[int, ...]) -> int:
    """Elements of a weight on the fullest core of a region; vectors stand on every row."""
    across = -(-shape[0] // region.columns)
    return across if len(shape) == 1 else across * -(-shape[1] // region.rows)


def with_attention(clock: Clock, attention_bytes: int, shelf: Shelf) -> Clock:
    """A clock that differs in what attention may use of a core; they share what both know.

    The bytes are rounded down to a level, so that stages share clocks.
    """
    levels = attention_levels(clock)
    number = bisect_right(levels, attention_bytes)
    attention_bytes = levels[number - 1] if number else 0
    region = clock.region
    known = (region.rows, region.columns, region.dies(clock.wafer), clock.tiers, attention_bytes)
    if known not in shelf:
        shelf[known] = replace(clock, attention_bytes=attention_bytes)
    return shelf[known]


def attention_levels(clock: Clock) -> list[int]:
    """Bytes of a core that attention may have, from the least tiling's to the roomiest's.

    They do not depend on how much memory there is; none where attention has no choice.
    """
    if clock.wafer.attention != "ring":
        return []
    attention = attention_operation(clock.model, 0, 1, 0)
    known = clock.ring_attention(attention).known_tilings
    least, most = known[0].bytes, max(tiling.bytes for tiling in known)
    octaves = math.log2(most / least)
    steps = range(math.ceil(octaves * LEVELS_PER_OCTAVE))
    return [*(math.floor(least * 2 ** (step / LEVELS_PER_OCTAVE)) for step in steps), most]


@dataclass
class StageClocks:
    """Clocks by region shape, shared by stages alike."""

    wafer: Wafer
    model: Model
    options: Options
    tiers: Tiers
    shelf: Shelf
    _elements: dict[tuple[object, ...], int] = field(default_factory=dict)

    def weights_per_core(self, region: Region, layers: range, embedding: bool, head: bool) -> int:
        """Bytes of weights on the fullest core of a stage."""
        model = self.model
        elements = sum(self._layer_elements(region, layer) for layer in layers)
        if embedding:
            elements += _fullest(region, model.embedding_shape)
        if head:
            elements += _fullest(region, model.final_norm_shape)
            if not (model.tied_embeddings and embedding):
                elements += _fullest(region, model.head_shape)
        return elements * dtype_bytes(self.options.weights_dtype or model.dtype)

    def _layer_elements(self, region: Region, layer: int) -> int:
        moe = self.model.moe
        key = (region.rows, region.columns, moe is None or moe.is_dense(layer))
        if key not in self._elements:
            shapes = self.model.layer_weight_shapes(layer).values()
            self._elements[key] = sum(_fullest(region, shape) for shape in shapes)
        return self._elements[key]

    def free(self, region: Region, layers: range, embedding: bool, head: bool) -> int:
        """Bytes that code and weights leave of the fullest core of a stage; 0 or less: it is full.

        Under a KV budget weights do not count.
        """
        weights = 0
        if self.tiers.weights == "sram" and self.options.kv_budget is None:
            weights = self.weights_per_core(region, layers, embedding, head)
        return self.wafer.core.data_bytes - weights

    def of(self, region: Region) -> Clock:
        """Clock of a region whose attention no memory binds."""
        known = (region.rows, region.columns, region.dies(self.wafer), self.tiers, UNBOUNDED)
        if known not in self.shelf:
            model, options = self.model, self.options
            weights_dtype, kv_dtype = options.weights_dtype or model.dtype, options.kv_dtype
            self.shelf[known] = Clock(
                self.wafer,
                model,
                region,
                self.tiers,
                UNBOUNDED,
                weights_dtype,
                kv_dtype or model.dtype,
            )
        return self.shelf[known]

    def refusal(self, regions: Sequence[Region]) -> CapacityError:
        """The error of weights that fill the cores under every split of the layers."""
        stages = len(regions)
        layers = range(self.model.layers - -(-self.model.layers // stages), self.model.layers)
        region = regions[-1]
        weights = self.weights_per_core(region, layers, stages == 1, True)
        capacity, code = self.wafer.core.sram_bytes, self.wafer.core.code_bytes
        need = weights + code
        return CapacityError(
            f"the weights do not fit: under no split of {self.model.layers} layers over {stages} "
            f"stages of {region.rows}x{region.columns} cores; core ({region.row}, {region.column}) "
            f"of stage {stages - 1} needs {need:,} B of its {capacity:,} B with {len(layers)} "
            f"layers and the head, {need - capacity:,} B too many (code {code:,} B, weights "
            f"{weights:,} B); what would help: more stages or larger regions, fewer layers "
            "(--layers), a smaller type (--weights-dtype), or weights in die memory where there is "
            "any (--weights-tier dram)",
            stage=stages - 1,
            core=[region.row, region.column],
            need_bytes=need,
            capacity_bytes=capacity,
            short_bytes=need - capacity,
            items={"code": code, "weights": weights},
        )
