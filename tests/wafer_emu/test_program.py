"""Tile programs: every weight of a checkpoint is used once, and tensors fit one another."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.wafer_emu.small import DEEPSEEK, LLAMA, MIXTRAL, chunks, models, prefixes
from wafer_emu.model import Model
from wafer_emu.program import (
    Add,
    Append,
    Attention,
    Embed,
    Experts,
    Gate,
    Lookup,
    Norm,
    Operation,
    Product,
    Rotary,
    Route,
    Task,
    Tensor,
    attention_operation,
    layer_operations,
    lower,
)

few = settings(max_examples=60, deadline=None)


def weights(operations: tuple[Operation, ...]) -> list[str]:
    """Names of all weights that operations use, those of experts written out."""
    names: list[str] = []
    for operation in operations:
        if isinstance(operation, Experts):
            names += [operation.weight.format(expert=e) for e in range(operation.experts)]
        elif isinstance(operation, Attention):
            names += [operation.expand] if operation.expand else []
        elif isinstance(operation, Product):
            names += [operation.weight, *([operation.bias] if operation.bias else [])]
        elif isinstance(operation, Norm):
            names.append(operation.weight)
    return names


CONFIGS = {
    "llama": LLAMA,
    "biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3"},
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
    "deepseek without low-rank queries": {**DEEPSEEK, "q_lora_rank": None},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_uses_each_of_its_weights_once(name: str, layer: int) -> None:
    model = Model.from_hf(CONFIGS[name])
    used = weights(layer_operations(model, layer, 5, 3))
    routing = {"mlp.gate.e_score_correction_bias"}  # added to the scores inside Route
    assert sorted(used) == sorted(set(model.layer_weight_shapes(layer)) - routing)


@few
@given(models(), chunks, prefixes)
def test_products_multiply_tensors_of_the_weights_shapes(
    model: Model, chunk: int, prefix: int
) -> None:
    for layer in range(model.layers):
        shapes = model.layer_weight_shapes(layer)
        for operation in layer_operations(model, layer, chunk, prefix):
            if isinstance(operation, Product | Experts):
                shape = shapes[operation.weight.format(expert=0)]
                assert shape == (operation.target.columns, operation.source.columns)
            elif isinstance(operation, Norm):
                assert shapes[operation.weight] == (operation.width,)
                assert operation.width * operation.groups <= operation.source.columns


@few
@given(models(), chunks, prefixes)
def test_what_is_read_was_written_and_keeps_its_shape(
    model: Model, chunk: int, prefix: int
) -> None:
    for layer in range(model.layers):
        known = {"stream": Tensor("stream", chunk, model.hidden_size)}
        for operation in layer_operations(model, layer, chunk, prefix):
            written = getattr(operation, "target", None)
            for tensor in operation.tensors():
                if tensor is not written and tensor.name != getattr(written, "name", ""):
                    assert known[tensor.name] == tensor, (operation, tensor)
            if written is not None:
                known[written.name] = written


def test_a_llama_layer_in_order() -> None:
    operations = layer_operations(Model.from_hf(LLAMA), 1, 5, 3)
    assert [type(each) for each in operations] == [
        Norm, Product, Product, Product, Rotary, Rotary, Append, Attention, Product, Add,
        Norm, Product, Product, Gate, Product, Add,
    ]  # fmt: skip
    query, key = operations[4], operations[5]
    assert isinstance(query, Rotary)
    assert isinstance(key, Rotary)
    assert (query.heads, key.heads, query.width, query.first_position) == (4, 2, 6, 3)
    append = operations[6]
    assert isinstance(append, Append)
    assert (append.layer, append.first_position, append.elements_per_token) == (1, 3, 24)


def test_experts_work_on_pairs_of_token_and_choice() -> None:
    operations = layer_operations(Model.from_hf(MIXTRAL), 0, 5, 0)
    experts = [each for each in operations if isinstance(each, Experts)]
    assert [each.choices for each in experts] == [10, 10, 10]
    assert [each.combine for each in experts] == [False, False, True]
    route = next(each for each in operations if isinstance(each, Route))
    assert route.source == Tensor("scores", 5, 4)


def test_latents_are_appended_and_expanded_later() -> None:
    model = Model.from_hf(DEEPSEEK)
    operations = layer_operations(model, 0, 5, 0)
    append = next(each for each in operations if isinstance(each, Append))
    assert append.elements_per_token == model.kv_elements_per_token(0) == 12
    attention = attention_operation(model, 0, 5, 0)
    assert attention in operations
    assert (attention.kv_heads, attention.key_width, attention.value_width) == (4, 10, 5)


@few
@given(models(), chunks, prefixes)
def test_only_rotary_append_and_attention_know_the_prefix(
    model: Model, chunk: int, prefix: int
) -> None:
    fresh = layer_operations(model, 0, chunk, 0)
    later = layer_operations(model, 0, chunk, prefix)
    for one, two in zip(fresh, later, strict=True):
        if not isinstance(one, Rotary | Append | Attention):
            assert one == two


def test_ends_of_the_pipeline() -> None:
    model = Model.from_hf({**LLAMA, "num_hidden_layers": 3})
    middle = lower(model, Task(1, 2, 5, 8))
    assert (middle.prologue, middle.epilogue, len(middle.body)) == ((), (), 2)
    assert middle.body[1] == layer_operations(model, 2, 5, 8)
    stream = Tensor("stream", 5, 24)
    assert lower(model, Task(0, 1, 5, 0, first_stage=True)).prologue == (Embed(stream),)
    resident = lower(model, Task(0, 1, 5, 0, first_stage=True, embedding="first-stage"))
    assert resident.prologue == (Lookup(stream, "model.embed_tokens.weight"),)
    last = lower(model, Task(2, 1, 5, 0, last_chunk=True))
    assert list(last.operations()) == [*last.body[0], *last.epilogue]
    norm, head = last.epilogue
    assert isinstance(norm, Norm)
    assert isinstance(head, Product)
    assert head.last_row
    assert head.shape == (1, 50, 24)
    _, every = lower(model, Task(2, 1, 5, 0, all_logits=True)).epilogue
    assert isinstance(every, Product)
    assert not every.last_row
    assert every.shape == (5, 50, 24)


def test_causal_skip_reaches_the_attention() -> None:
    model = Model.from_hf(LLAMA)
    program = lower(model, Task(0, 2, 5, 0, causal_skip=False))
    found = [each.causal_skip for each in program.operations() if isinstance(each, Attention)]
    assert found == [False, False]
