"""Plans on real numbers: the answer is the model's, whatever the cuts, the places and the moves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mocap.policy
from mocap.policy import Move, Policy
from tests.wafer_emu.numeric_cases import (
    CONFIGS,
    POLICIES,
    SMALL,
    TINY,
    Given,
    computed,
    error,
    expected,
    model_of,
    moving_cases,
    policy_of,
    prompt,
    weights_of,
)
from wafer_emu import dense, threads
from wafer_emu.emulation import emulate
from wafer_emu.model import Model
from wafer_emu.workload import Workload
from wafer_kernels.errors import ConfigError, UsageError

TOKENS = 45
TOLERANCE = 1e-5
PRODUCTS = TINY.replace({"program.attention": "products", "program.request_cycles": 0})


def same_answer(run: Any, wanted: Any, prefix: int = 0) -> None:
    assert error(run.logits, wanted.logits[prefix:]) <= TOLERANCE
    assert error(run.hidden, wanted.hidden[prefix:]) <= TOLERANCE
    for found, kept in zip(run.kv, wanted.cached, strict=True):
        assert error(found, kept) <= TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_product_and_twin_have_one_dense_reference(name: str) -> None:
    model = model_of(name)
    found = dense.forward(model, weights_of(model), prompt(model, TOKENS))
    wanted = expected(model, TOKENS)
    assert error(found.logits, wanted.logits) <= 2e-6
    assert error(found.hidden, wanted.hidden) <= 2e-6
    for one, other in zip(found.kv, wanted.cached, strict=True):
        assert error(one, other) <= 2e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name: str) -> None:
    model = model_of(name)
    run = computed(model, TOKENS, "mocap")
    assert run.summary["reallocated_bytes"] > 0
    same_answer(run, expected(model, TOKENS))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy: str) -> None:
    model = model_of("llama-gqa")
    same_answer(computed(model, TOKENS, policy), expected(model, TOKENS))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_answer_does_not_depend_on_cuts_places_or_moves(data: st.DataObject) -> None:
    names = ["llama-gqa", "llama-mha-tied", "mistral-window", "deepseek", "llama-biases-gelu"]
    model = model_of(data.draw(st.sampled_from(names)))
    stages = data.draw(st.integers(1, 4))
    rows, columns = data.draw(st.sampled_from([(1, 1), (1, 4), (4, 1), (2, 2), (2, 1), (1, 3)]))
    stages = min(stages, (4 // rows) * (4 // columns))
    cuts, moves = data.draw(moving_cases(stages))
    run = computed(
        model,
        sum(cuts),
        Given(cuts, moves, data.draw(st.booleans())),
        stages=stages,
        region=(rows, columns),
        chunks=None,
        embedding=data.draw(st.sampled_from(["host", "first-stage"])),
    )
    same_answer(run, expected(model, sum(cuts)))
    assert (run.summary["reallocated_bytes"] > 0) == bool(moves)


@settings(max_examples=10, deadline=None)
@given(heads=st.integers(1, 7), group=st.integers(1, 3), shape=st.sampled_from([(1, 4), (2, 3)]))
def test_heads_and_key_splits_of_any_ratio(heads: int, group: int, shape: tuple[int, int]) -> None:
    config = {
        **SMALL,
        "num_hidden_layers": 1,
        "num_attention_heads": heads * group,
        "num_key_value_heads": heads,
        "head_dim": 4,
    }
    model = Model.from_hf(config)
    run = computed(model, 30, Given([13, 17]), stages=1, chunks=None, region=shape)
    same_answer(run, expected(model, 30))


def test_where_kv_and_regions_lie_does_not_change_a_bit() -> None:
    model = model_of("llama-gqa")
    plain = computed(model, TOKENS, "uniform")
    for other in (
        computed(model, TOKENS, "mbkr"),
        computed(model, TOKENS, "uniform", embedding="first-stage"),
        computed(model, TOKENS, "uniform", placement="folded-ring"),
        computed(model, TOKENS, Given(plain.plan.cuts[0]), chunks=None),
        computed(model, TOKENS, Given(plain.plan.cuts[0], [], True), chunks=None),
        computed(model, TOKENS, Given(plain.plan.cuts[0], [Move(0, 1, 0, 5, 3, 2)]), chunks=None),
    ):
        np.testing.assert_array_equal(other.logits, plain.logits)
        for one, two in zip(other.kv, plain.kv, strict=True):
            np.testing.assert_array_equal(one, two)


def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mixtral")
    one = computed(model, TOKENS)
    monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(threads, "_pool", lambda: (ThreadPoolExecutor(3), 3))
    np.testing.assert_array_equal(computed(model, TOKENS).logits, one.logits)


def test_the_last_token_alone_has_the_same_bits() -> None:
    model = model_of("qwen3")
    whole, last = computed(model, TOKENS), computed(model, TOKENS, logits="last")
    np.testing.assert_array_equal(last.logits, whole.logits[-1:])
    np.testing.assert_array_equal(last.hidden, whole.hidden[-1:])


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "deepseek"])
@pytest.mark.parametrize("policy", ["uniform", "mocap", "prefill-only"])
def test_a_reused_prefix_gives_the_same_suffix(name: str, policy: str) -> None:
    model, prefix = model_of(name), 21
    ids = prompt(model, TOKENS)
    first = emulate(
        TINY, model, Workload.single(prefix), "uniform", numbers=weights_of(model),
        token_ids=ids[:prefix], stages=2, chunks=3,
    )  # fmt: skip
    for given_kv in ([first.kv], None):
        run = computed(model, TOKENS, policy, prefix_tokens=prefix, prefix_kv=given_kv)
        same_answer(run, expected(model, TOKENS), prefix)


def test_another_prefix_gives_another_answer() -> None:
    """So that the test above can fail."""
    model, prefix = model_of("llama-gqa"), 21
    wrong = [np.roll(layer, 1, axis=0) for layer in expected(model, TOKENS).cached]
    run = computed(model, TOKENS, prefix_tokens=prefix, prefix_kv=[wrong])
    assert error(run.logits, expected(model, TOKENS).logits[prefix:]) > 1e-2


@pytest.mark.parametrize(
    "policy",
    [
        policy_of("gpipe"),
        policy_of("mocap"),
        mocap.policy.get("mbkr", {"trigger": "balance", "kv_free": "layer"}),
        Given([9, 8, 7], [Move(0, 1, 0, 5, 3, 1)], True),
    ],
    ids=["gpipe", "mocap", "by layer", "pushed late"],
)
def test_requests_in_a_stream_keep_their_own_kv(policy: Policy) -> None:
    model = model_of("llama-gqa")
    prompts = [prompt(model, 24, seed) for seed in range(3)]
    run = emulate(
        TINY, model, Workload.equal(3, 24), policy, numbers=weights_of(model),
        token_ids=prompts, logits="all", stages=4, chunks=3,
    )  # fmt: skip
    assert run.numbers is not None
    for seed, values in enumerate(run.numbers.values):
        assert error(values.logits, expected(model, 24, seed).logits) <= TOLERANCE


@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_experts_are_counted(name: str) -> None:
    model = model_of(name)
    run, wanted = computed(model, TOKENS, "lbcp"), expected(model, TOKENS)
    assert run.numbers is not None
    for layer, counts in enumerate(wanted.expert_tokens):
        if counts is None:
            assert layer not in run.numbers.expert_tokens
        else:
            np.testing.assert_array_equal(run.numbers.expert_tokens[layer], counts)


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("float16", 1e-5, 3e-3), ("bfloat16", 1e-4, 3e-2)]
)
@pytest.mark.parametrize("name", ["llama-gqa", "deepseek"])
def test_narrow_storage(name: str, dtype: str, least: float, most: float) -> None:
    model = model_of(name, dtype, layers=2)
    run = computed(model, TOKENS, "mocap", stages=2)
    assert least < error(run.logits, expected(model, TOKENS).logits) < most


def test_kv_and_weights_may_be_narrower_than_activations() -> None:
    model = model_of("llama-gqa")
    run = computed(model, TOKENS, "mocap", kv_dtype="bfloat16")
    assert 1e-4 < error(run.logits, expected(model, TOKENS).logits) < 3e-2


@pytest.mark.parametrize(
    ("asked", "refused", "said"),
    [
        ({"kv_budget": 100_000}, UsageError, "kv-budget"),
        ({"weights_dtype": "int8"}, ConfigError, "int8"),
        ({"wafer": PRODUCTS}, UsageError, "attention=ring"),
    ],
)
def test_what_numbers_cannot_do_is_refused(
    asked: dict[str, Any], refused: type[Exception], said: str
) -> None:
    with pytest.raises(refused, match=said):
        computed(model_of("llama-gqa"), TOKENS, **asked)


@pytest.mark.parametrize("ids", [[1, 2, 3], [], [70] * 8, [-1] * 8])
def test_tokens_go_with_workload_and_vocabulary(ids: list[int]) -> None:
    model = model_of("llama-gqa")
    with pytest.raises(UsageError, match="token_ids"):
        emulate(
            TINY, model, Workload.single(8), "uniform", numbers=weights_of(model), token_ids=ids,
            stages=2,
        )  # fmt: skip


def test_a_run_without_weights_has_no_values() -> None:
    run = emulate(TINY, model_of("llama-gqa"), Workload.single(8), "uniform", stages=2)
    with pytest.raises(UsageError, match="numbers=weights"):
        _ = run.logits
