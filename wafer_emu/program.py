"""Lowering: one task (stage, chunk, prefix) becomes a tile program.

A tile program is the list of region operations of one task. The clock counts its cycles and the
numbers compute its values; both walk the same list. An activation is a matrix of tokens by features
that lies over the whole region: its rows dealt to the rows of cores, its columns to the columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache

from wafer_emu.model import Model
from wafer_emu.routing import Routing

__all__ = [
    "Add",
    "Append",
    "Attention",
    "Embed",
    "Experts",
    "Gate",
    "Lookup",
    "Norm",
    "Operation",
    "Product",
    "Program",
    "Rotary",
    "Route",
    "Task",
    "Tensor",
    "attention_operation",
    "layer_operations",
    "lower",
]


@dataclass(frozen=True)
class Tensor:
    """An activation over the region: ``rows`` tokens by ``columns`` features."""

    name: str
    rows: int
    columns: int


class Operation:
    """A region operation: what it does to which tensors."""

    def tensors(self) -> Iterator[Tensor]:
        """Activations that must be in memory while the operation runs."""
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, tuple):
                yield from (one for one in value if isinstance(one, Tensor))


@dataclass(frozen=True)
class Lookup(Operation):
    """Rows of the embedding table for the chunk's tokens, from the first stage's own SRAM."""

    target: Tensor
    weight: str


@dataclass(frozen=True)
class Embed(Operation):
    """Embedding rows that the host sends to the first stage."""

    target: Tensor


@dataclass(frozen=True)
class Norm(Operation):
    """Root-mean-square norm over the first ``width`` columns of each of ``groups`` equal groups."""

    source: Tensor
    target: Tensor
    weight: str
    width: int
    groups: int = 1


@dataclass(frozen=True)
class Product(Operation):
    """``target[m, n] = source[m, k] @ weight[n, k].T (+ bias)``, weights resident on the region.

    ``last_row`` computes the last token's row only (the head of a prefill-only answer).
    """

    source: Tensor
    target: Tensor
    weight: str
    bias: str | None = None
    last_row: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(m, n, k) of the product."""
        return self.target.rows, self.target.columns, self.source.columns

    @property
    def most_rows(self) -> int:
        """Rows that memory is laid out for."""
        return self.target.rows


@dataclass(frozen=True)
class Rotary(Operation):
    """Rotary position embedding, in place, of ``heads`` heads whose last ``width`` columns turn."""

    target: Tensor
    heads: int
    width: int
    first_position: int


@dataclass(frozen=True)
class Append(Operation):
    """Write the chunk's keys and values (or latents) of one layer into its KV blocks."""

    sources: tuple[Tensor, ...]
    layer: int
    first_position: int

    @property
    def elements_per_token(self) -> int:
        """Elements that one token adds."""
        return sum(source.columns for source in self.sources)


@dataclass(frozen=True)
class Attention(Operation):
    """Causal attention of the chunk's queries over all keys so far.

    ``expand`` names the weight that turns latents into keys and values (MLA, re-expanded: a product
    over all ``prefix + chunk`` latents); None where keys and values are stored as they are.
    """

    query: Tensor
    target: Tensor
    layer: int
    prefix: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int | None = None
    causal_skip: bool = True
    expand: str | None = None

    @property
    def chunk(self) -> int:
        """Tokens of the chunk."""
        return self.query.rows


@dataclass(frozen=True)
class Gate(Operation):
    """``target = activation(gate) * up``."""

    gate: Tensor
    up: Tensor
    target: Tensor
    activation: str


@dataclass(frozen=True)
class Add(Operation):
    """Residual: ``target += source``."""

    source: Tensor
    target: Tensor


@dataclass(frozen=True)
class Route(Operation):
    """Choose ``experts_per_token`` of ``experts`` from router scores."""

    source: Tensor
    target: Tensor
    layer: int


@dataclass(frozen=True)
class Experts(Operation):
    """The same product for every expert on the tokens routed to it, one expert after another.

    The rows of ``target`` are (token, choice) pairs. ``weight`` holds ``{expert}``. ``loads`` are
    the tokens that each expert gets, where they are known.
    """

    source: Tensor
    target: Tensor
    weight: str
    layer: int
    experts: int
    experts_per_token: int
    combine: bool = False  # the down product: weigh the choices and add them up
    loads: tuple[int, ...] | None = None

    @property
    def choices(self) -> int:
        """(token, choice) pairs that the experts work on."""
        return self.source.rows if self.combine else self.target.rows

    @property
    def most_rows(self) -> int:
        """Rows of one expert that memory is laid out for: all tokens, since each may choose it."""
        return self.choices // self.experts_per_token


@dataclass(frozen=True)
class Task:
    """What a tile program is made for: a chunk of ``chunk`` tokens after ``prefix`` on a stage."""

    first_layer: int
    layers: int
    chunk: int
    prefix: int
    first_stage: bool = False
    last_chunk: bool = False  # on the last stage: final norm and head of the last token
    all_logits: bool = False
    embedding: str = "host"
    causal_skip: bool = True


@dataclass(frozen=True)
class Program:
    """Operations of one task in order; ``prologue`` and ``epilogue`` stand around the layers."""

    task: Task
    prologue: tuple[Operation, ...]
    body: tuple[tuple[Operation, ...], ...] = field(repr=False)
    epilogue: tuple[Operation, ...] = ()

    def operations(self) -> Iterator[Operation]:
        """All operations in order."""
        yield from self.prologue
        for layer in self.body:
            yield from layer
        yield from self.epilogue


def attention_operation(
    model: Model, layer: int, chunk: int, prefix: int, causal_skip: bool = True
) -> Attention:
    """Attention of one layer on ``chunk`` tokens after ``prefix`` tokens."""
    return Attention(
        Tensor("query", chunk, model.heads * model.key_width),
        Tensor("attended", chunk, model.heads * model.value_width),
        layer,
        prefix,
        model.heads,
        model.kv_heads if model.mla is None else model.heads,
        model.key_width,
        model.value_width,
        model.windows[layer],
        causal_skip,
        None if model.mla is None else "self_attn.kv_b_proj.weight",
    )


def _attention_projections(
    model: Model, layer: int, chunk: int, prefix: int, causal_skip: bool, hidden: Tensor
) -> list[Operation]:
    """Queries, keys, values, their norms and rotations, the append and the attention itself."""
    bias = model.qkv_bias
    operations: list[Operation] = []
    query = Tensor("query", chunk, model.heads * model.key_width)

    def project(source: Tensor, target: Tensor, name: str, biased: bool) -> None:
        operations.append(
            Product(
                source,
                target,
                f"self_attn.{name}.weight",
                f"self_attn.{name}.bias" if biased else None,
            )
        )

    if model.mla is None:
        key = Tensor("key", chunk, model.kv_heads * model.head_dim)
        value = Tensor("value", chunk, model.kv_heads * model.head_dim)
        project(hidden, query, "q_proj", bias)
        project(hidden, key, "k_proj", bias)
        project(hidden, value, "v_proj", bias)
        if model.qk_norm:
            operations += [
                Norm(query, query, "self_attn.q_norm.weight", model.head_dim, model.heads),
                Norm(key, key, "self_attn.k_norm.weight", model.head_dim, model.kv_heads),
            ]
        operations += [
            Rotary(query, model.heads, model.head_dim, prefix),
            Rotary(key, model.kv_heads, model.head_dim, prefix),
            Append((key, value), layer, prefix),
        ]
    else:
        mla = model.mla
        if mla.q_lora_rank is None:
            project(hidden, query, "q_proj", False)
        else:
            low = Tensor("query_low", chunk, mla.q_lora_rank)
            project(hidden, low, "q_a_proj", bias)
            operations.append(Norm(low, low, "self_attn.q_a_layernorm.weight", mla.q_lora_rank))
            project(low, query, "q_b_proj", False)
        latent = Tensor("latent", chunk, mla.kv_lora_rank + mla.qk_rope_head_dim)
        project(hidden, latent, "kv_a_proj_with_mqa", bias)
        operations += [
            Norm(latent, latent, "self_attn.kv_a_layernorm.weight", mla.kv_lora_rank),
            Rotary(query, model.heads, mla.qk_rope_head_dim, prefix),
            Rotary(latent, 1, mla.qk_rope_head_dim, prefix),
            Append((latent,), layer, prefix),
        ]
    operations.append(attention_operation(model, layer, chunk, prefix, causal_skip))
    return operations


def _dense_mlp(
    model: Model, source: Tensor, width: int, prefix: str, out: Tensor
) -> list[Operation]:
    gate, up = Tensor("gate", source.rows, width), Tensor("up", source.rows, width)
    bias = model.mlp_bias

    def product(a: Tensor, b: Tensor, name: str) -> Product:
        return Product(a, b, f"{prefix}.{name}.weight", f"{prefix}.{name}.bias" if bias else None)

    return [
        product(source, gate, "gate_proj"),
        product(source, up, "up_proj"),
        Gate(gate, up, gate, model.activation),
        product(gate, out, "down_proj"),
    ]


def _mixture(
    model: Model, layer: int, source: Tensor, out: Tensor, loads: tuple[int, ...] | None
) -> list[Operation]:
    moe = model.moe
    assert moe is not None
    chunk, choices = source.rows, source.rows * moe.experts_per_token
    scores = Tensor("scores", chunk, moe.experts)
    chosen = Tensor("chosen", chunk, 2 * moe.experts_per_token)
    gate = Tensor("expert_gate", choices, moe.expert_intermediate_size)
    up = Tensor("expert_up", choices, moe.expert_intermediate_size)
    mixtral = model.model_type == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    gate_name, up_name, down_name = (
        ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    )

    def experts(a: Tensor, b: Tensor, name: str, combine: bool = False) -> Experts:
        weight = f"{block}.experts.{{expert}}.{name}.weight"
        return Experts(a, b, weight, layer, moe.experts, moe.experts_per_token, combine, loads)

    operations: list[Operation] = [
        Product(source, scores, f"{block}.gate.weight"),
        Route(scores, chosen, layer),
        experts(source, gate, gate_name),
        experts(source, up, up_name),
        Gate(gate, up, gate, model.activation),
        experts(gate, out, down_name, combine=True),
    ]
    if moe.shared_experts:
        shared = Tensor("shared", chunk, out.columns)
        width = moe.shared_experts * moe.expert_intermediate_size
        operations += _dense_mlp(model, source, width, f"{block}.shared_experts", shared)
        operations.append(Add(shared, out))
    return operations


@lru_cache(maxsize=4096)
def layer_operations(
    model: Model,
    layer: int,
    chunk: int,
    prefix: int,
    causal_skip: bool = True,
    routing: Routing | None = None,
) -> tuple[Operation, ...]:
    """Operations of one transformer layer on ``chunk`` tokens after ``prefix`` tokens.

    Weight names are relative to the layer, as in Hugging Face checkpoints. With a ``routing`` the
    experts know the tokens that they get.
    """
    stream = Tensor("stream", chunk, model.hidden_size)
    hidden = Tensor("hidden", chunk, model.hidden_size)
    block = Tensor("block", chunk, model.hidden_size)
    mlp_hidden = Tensor("mlp_hidden", chunk, model.hidden_size)
    mlp_block = Tensor("mlp_block", chunk, model.hidden_size)
    attention = _attention_projections(model, layer, chunk, prefix, causal_skip, hidden)
    attended = Tensor("attended", chunk, model.heads * model.value_width)
    output_bias = "self_attn.o_proj.bias" if model.output_bias else None
    if model.moe is not None and not model.moe.is_dense(layer):
        experts = model.moe.experts
        loads = None if routing is None else routing.loads(layer, experts, prefix, chunk)
        mlp = _mixture(model, layer, mlp_hidden, mlp_block, loads)
    else:
        mlp = _dense_mlp(model, mlp_hidden, model.intermediate_size, "mlp", mlp_block)
    return (
        Norm(stream, hidden, "input_layernorm.weight", model.hidden_size),
        *attention,
        Product(attended, block, "self_attn.o_proj.weight", output_bias),
        Add(block, stream),
        Norm(stream, mlp_hidden, "post_attention_layernorm.weight", model.hidden_size),
        *mlp,
        Add(mlp_block, stream),
    )


def lower(model: Model, task: Task) -> Program:
    """Lower a task to its tile program."""
    stream = Tensor("stream", task.chunk, model.hidden_size)
    prologue: tuple[Operation, ...] = ()
    if task.first_stage:
        prologue = (
            (Lookup(stream, "model.embed_tokens.weight"),)
            if task.embedding == "first-stage"
            else (Embed(stream),)
        )
    body = tuple(
        layer_operations(model, layer, task.chunk, task.prefix, task.causal_skip)
        for layer in range(task.first_layer, task.first_layer + task.layers)
    )
    epilogue: tuple[Operation, ...] = ()
    if task.last_chunk or task.all_logits:
        rows = task.chunk if task.all_logits else 1
        hidden = Tensor("last_hidden", task.chunk, model.hidden_size)
        logits = Tensor("logits", rows, model.vocab_size)
        epilogue = (
            Norm(stream, hidden, "model.norm.weight", model.hidden_size),
            Product(hidden, logits, model.head_name, last_row=not task.all_logits),
        )
    return Program(task, prologue, body, epilogue)
