"""Models: published parameter counts, KV bytes by hand, closed forms against loops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive import model_counts as naive
from wafer_emu.model import Linear, Llama3, Model, Rope, Yarn, causal_pairs, dtype_bytes
from wafer_kernels.errors import ConfigError, FileError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
DEEPSEEK: dict[str, Any] = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": 10,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}


def of(base: dict[str, Any], **changes: Any) -> Model:
    return Model.from_hf({**base, **changes})


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # number of elements of the published checkpoints
        ("llama-3-8b", 8_030_261_248),
        ("llama-2-13b", 13_015_864_320),
        ("codellama-34b", 33_743_970_304),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen2-72b", 72_706_203_648),
        ("qwen3-1.7b", 1_720_574_976),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-v3", 671_026_419_200),  # without the multi-token head
    ],
)
def test_parameters_of_the_presets(name: str, parameters: int) -> None:
    assert Model.preset(name).parameters == parameters


def test_every_preset_is_covered_and_has_a_source() -> None:
    for name in Model.presets():
        model = Model.preset(name)
        assert model.name == name
        assert Model.preset_provenance(name).startswith("published: ")
        assert Model.from_dict(json.loads(json.dumps(model.to_dict()))) == model
    with pytest.raises(ConfigError, match="did you mean llama-3-8b"):
        Model.preset("llama-3-8")


def test_parameters_of_llama_3_8b_by_hand() -> None:
    d, ffn, vocab, kv = 4096, 14336, 128256, 8 * 128
    layer = 2 * d * d + 2 * d * kv + 3 * d * ffn + 2 * d
    model = Model.preset("llama-3-8b")
    assert model.layer_weight_elements(7) == layer == 218_112_000
    assert model.parameters == 32 * layer + 2 * vocab * d + d


def test_parameters_of_deepseek_v3_by_hand() -> None:
    d, heads = 7168, 128
    attention = (d * 1536 + 1536) + 1536 * heads * 192 + d * (512 + 64) + 512
    attention += 512 * heads * (128 + 128) + heads * 128 * d
    dense = attention + 3 * d * 18432 + 2 * d
    sparse = attention + (256 + 1) * 3 * d * 2048 + 256 * d + 256 + 2 * d
    model = Model.preset("deepseek-v3")
    assert model.layer_weight_elements(2) == dense
    assert model.layer_weight_elements(3) == sparse
    assert model.parameters == 3 * dense + 58 * sparse + 2 * 129280 * d + d


@pytest.mark.parametrize(
    ("model", "elements", "bytes_per_token"),
    [
        (Model.preset("llama-2-13b"), 2 * 40 * 128, 40 * 10240 * 2),  # MHA: 819,200
        (Model.preset("llama-3-8b"), 2 * 8 * 128, 32 * 2048 * 2),  # GQA: 131,072
        (Model.preset("qwen3-1.7b"), 2 * 8 * 128, 28 * 2048 * 2),  # head_dim is not hidden/heads
        (Model.preset("deepseek-v3"), 512 + 64, 61 * 576 * 2),  # MLA: 70,272
        (of(LLAMA, num_key_value_heads=1, torch_dtype="float16"), 2 * 6, 3 * 12 * 2),  # MQA
    ],
)
def test_kv_by_hand(model: Model, elements: int, bytes_per_token: int) -> None:
    assert model.kv_elements_per_token(0) == elements
    assert model.kv_bytes_per_token() == bytes_per_token
    assert model.kv_bytes_per_token("float32") == 2 * bytes_per_token
    assert model.kv_bytes_per_token("float8_e4m3fn") * 2 == bytes_per_token


def test_kv_of_a_layer_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="layers 0 to 31, not 32"):
        Model.preset("llama-3-8b").kv_elements_per_token(32)
    with pytest.raises(ConfigError, match="unknown dtype 'float64'"):
        dtype_bytes("float64")


@settings(max_examples=60, deadline=None)
@given(chunk=st.integers(1, 40), prefix=st.integers(0, 40), window=st.none() | st.integers(1, 50))
def test_causal_pairs(chunk: int, prefix: int, window: int | None) -> None:
    assert causal_pairs(chunk, prefix, window) == naive.pairs(chunk, prefix, window)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    head_dim=st.sampled_from([2, 4, 6]),
    chunk=st.integers(1, 12),
    prefix=st.integers(0, 12),
    window=st.none() | st.integers(1, 16),
)
def test_macs_of_a_plain_layer(
    heads: tuple[int, int], head_dim: int, chunk: int, prefix: int, window: int | None
) -> None:
    queries, pairs = heads
    model = of(
        LLAMA,
        model_type="mistral",
        num_attention_heads=queries,
        num_key_value_heads=pairs,
        head_dim=head_dim,
        sliding_window=window,
    )
    assert model.layer_macs(1, chunk, prefix) == naive.plain_layer_macs(
        24, queries, pairs, head_dim, 20, chunk, prefix, window
    )


@settings(max_examples=40, deadline=None)
@given(
    chunk=st.integers(1, 12), prefix=st.integers(0, 12), q_rank=st.none() | st.integers(1, 12),
    shared=st.integers(0, 2),
)  # fmt: skip
def test_macs_of_latent_attention_and_experts(
    chunk: int, prefix: int, q_rank: int | None, shared: int
) -> None:
    model = of(DEEPSEEK, q_lora_rank=q_rank, n_shared_experts=shared)
    attention = naive.latent_attention_macs(24, 4, q_rank, 8, 6, 4, 5, chunk, prefix)
    assert model.layer_macs(0, chunk, prefix) == attention + 3 * naive.matrix_macs(chunk, 24, 20)
    assert model.layer_macs(1, chunk, prefix) == attention + naive.expert_macs(
        24, 6, 8, 3, shared, chunk
    )


def test_macs_of_mixtral_count_two_of_eight_experts() -> None:
    model = of(LLAMA, model_type="mixtral")
    plain = naive.plain_layer_macs(24, 4, 2, 6, 20, 5, 3)
    dense = 3 * naive.matrix_macs(5, 24, 20)
    assert model.layer_macs(0, 5, 3) == plain - dense + naive.expert_macs(24, 20, 8, 2, 0, 5)


def test_macs_without_causal_skip_charge_the_masked_half() -> None:
    model = of(LLAMA)
    extra = model.layer_macs(0, 8, 5, causal_skip=False) - model.layer_macs(0, 8, 5)
    assert extra == (8 * 13 - (8 * 5 + 36)) * 4 * 2 * 6
    windowed = of(LLAMA, model_type="mistral", sliding_window=4)
    visible = 8 * (3 + 8)  # the chunk and the three tokens before it that a window of 4 reaches
    extra = windowed.layer_macs(0, 8, 5, causal_skip=False) - windowed.layer_macs(0, 8, 5)
    assert extra == (visible - 8 * 4) * 4 * 2 * 6


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_chunks_of_a_prompt_add_up_to_the_prompt(cuts: list[int]) -> None:
    for model in (of(LLAMA), of(LLAMA, model_type="mistral", sliding_window=7)):
        starts = [sum(cuts[:k]) for k in range(len(cuts))]
        parts = [model.layer_macs(0, c, p) for c, p in zip(cuts, starts, strict=True)]
        assert sum(parts) == model.layer_macs(0, sum(cuts))


def test_macs_of_llama_3_8b_by_hand() -> None:
    """One layer, 4,096 tokens, full attention: 1.031e12 MACs."""
    model = Model.preset("llama-3-8b")
    full = model.layer_macs(0, 4096, causal_skip=False)
    assert full == 4096 * (218_112_000 - 2 * 4096) + 2 * 4096 * 4096 * 4096
    assert full == pytest.approx(1.031e12, rel=1e-3)
    assert model.head_macs() == 128256 * 4096


def test_weight_shapes_of_the_families() -> None:
    llama = of(LLAMA, attention_bias=True, mlp_bias=True).layer_weight_shapes(0)
    assert llama["self_attn.k_proj.weight"] == (12, 24)
    assert llama["self_attn.o_proj.bias"] == (24,)
    assert llama["mlp.down_proj.weight"] == (24, 20)
    assert llama["mlp.down_proj.bias"] == (24,)
    qwen2 = of(LLAMA, model_type="qwen2").layer_weight_shapes(0)
    assert qwen2["self_attn.q_proj.bias"] == (24,)
    assert "self_attn.o_proj.bias" not in qwen2
    qwen3 = of(LLAMA, model_type="qwen3").layer_weight_shapes(0)
    assert qwen3["self_attn.q_proj.weight"] == (4 * 128, 24)
    assert qwen3["self_attn.k_norm.weight"] == (128,)
    mixtral = of(LLAMA, model_type="mixtral").layer_weight_shapes(0)
    assert mixtral["block_sparse_moe.gate.weight"] == (8, 24)
    assert mixtral["block_sparse_moe.experts.7.w2.weight"] == (24, 20)
    sparse = of(DEEPSEEK).layer_weight_shapes(1)
    assert sparse["self_attn.q_b_proj.weight"] == (4 * 10, 10)
    assert sparse["self_attn.kv_a_proj_with_mqa.weight"] == (12, 24)
    assert sparse["self_attn.kv_b_proj.weight"] == (4 * 11, 8)
    assert sparse["self_attn.o_proj.weight"] == (24, 20)
    assert sparse["mlp.gate.e_score_correction_bias"] == (8,)
    assert sparse["mlp.shared_experts.up_proj.weight"] == (6, 24)
    assert of(DEEPSEEK, q_lora_rank=None).layer_weight_shapes(0)["self_attn.q_proj.weight"] == (
        40,
        24,
    )


def test_defaults_that_a_file_may_leave_out() -> None:
    assert of(LLAMA, num_key_value_heads=None).kv_heads == 4
    lean = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert of(lean).kv_heads == 4
    assert of(lean, model_type="mistral", num_attention_heads=8, head_dim=4).kv_heads == 8
    assert of(LLAMA).head_dim == 6
    assert of(LLAMA, head_dim=None).head_dim == 6
    assert of(LLAMA).max_positions == 2048
    assert of(LLAMA).norm_epsilon == 1e-6
    assert of(LLAMA, model_type="mixtral").norm_epsilon == 1e-5
    assert of(LLAMA, model_type="mixtral").rope.theta == 1e6
    assert of(LLAMA).dtype == "float32"
    assert of(LLAMA, torch_dtype="bfloat16").dtype == "bfloat16"
    assert of(LLAMA, dtype="torch.float16").dtype == "float16"


def test_the_head_dim_that_transformers_5_writes_for_deepseek_is_not_the_width() -> None:
    model = of(DEEPSEEK, head_dim=4)
    assert (model.key_width, model.value_width, model.rotary_dim) == (10, 5, 4)


def test_tied_embeddings_count_once() -> None:
    tied, untied = of(LLAMA, tie_word_embeddings=True), of(LLAMA)
    assert untied.parameters - tied.parameters == 50 * 24
    assert tied.head_name == "model.embed_tokens.weight"
    assert untied.head_name == "lm_head.weight"


def test_sliding_windows_per_family() -> None:
    assert of(LLAMA, sliding_window=7).windows == (None,) * 3
    assert of(LLAMA, model_type="mistral").windows == (4096,) * 3
    assert of(LLAMA, model_type="mistral", sliding_window=None).windows == (None,) * 3
    assert of(LLAMA, model_type="mixtral", sliding_window=9).windows == (9,) * 3
    qwen = {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 1}
    assert of(LLAMA, **qwen).windows == (None,) * 3
    assert of(LLAMA, **qwen, use_sliding_window=True).windows == (None, 9, 9)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert of(LLAMA, **qwen, use_sliding_window=True, layer_types=kinds).windows == (9, None, 9)
    with pytest.raises(ConfigError, match="mix of kinds"):
        of(LLAMA, layer_types=kinds)
    with pytest.raises(ConfigError, match=r"layer_types has 2 entries for 3 layers"):
        of(LLAMA, layer_types=["full_attention"] * 2)
    with pytest.raises(ConfigError, match="chunked_attention"):
        of(LLAMA, layer_types=["chunked_attention"] * 3)


def test_dense_layers_of_the_mixtures() -> None:
    qwen = {**LLAMA, "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 16}
    model = of(qwen, decoder_sparse_step=2, mlp_only_layers=[1])
    assert model.moe is not None
    assert model.moe.dense_layers == (True, True, True, False)
    assert "mlp.gate_proj.weight" in model.layer_weight_shapes(1)
    assert "mlp.experts.15.up_proj.weight" in model.layer_weight_shapes(3)
    assert (model.moe.norm_topk_prob, model.moe.scoring) == (False, "softmax")
    deepseek = of(DEEPSEEK).moe
    assert deepseek is not None
    assert deepseek.dense_layers == (True, False, False)
    assert (deepseek.norm_topk_prob, deepseek.scoring) == (True, "sigmoid")
    mixtral = of(LLAMA, model_type="mixtral", norm_topk_prob=False).moe
    assert mixtral is not None
    assert mixtral.norm_topk_prob


def test_the_spellings_of_the_number_of_experts() -> None:
    for model_type, extra in (("qwen3_moe", {}), ("deepseek_v3", {"n_group": 1, "topk_group": 1})):
        base = {key: value for key, value in DEEPSEEK.items() if key != "n_routed_experts"}
        model = of({**base, "model_type": model_type, "num_local_experts": 12, **extra})
        assert model.moe is not None
        assert model.moe.experts == 12


def test_rope_of_transformers_4_and_5() -> None:
    assert of(LLAMA).rope == Rope(theta=10000.0)
    assert of(LLAMA, rope_theta=5e5).rope == Rope(theta=5e5)
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = Rope(
        theta=5e5,
        scaling=Llama3(
            factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192
        ),
    )
    version_4 = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **llama3}}
    version_5 = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **llama3}}
    nested = {"rope_parameters": {"full_attention": version_5["rope_parameters"]}}
    for spelling in (version_4, version_5, nested):
        assert of(LLAMA, **spelling).rope == expected
    linear = of(LLAMA, rope_scaling={"type": "linear", "factor": 2.0})
    assert linear.rope.scaling == Linear(factor=2.0)
    assert of(DEEPSEEK).rope.interleaved
    assert not of(DEEPSEEK, rope_interleave=False).rope.interleaved


def test_yarn_attention_factor_and_softmax_scale() -> None:
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    plain = of(LLAMA, rope_scaling=yarn).rope.scaling
    assert isinstance(plain, Yarn)
    assert plain.attention_factor == pytest.approx(0.1 * math.log(40) + 1)
    assert (plain.beta_fast, plain.beta_slow) == (32.0, 1.0)
    both = Model.preset("deepseek-v3")
    assert isinstance(both.rope.scaling, Yarn)
    assert both.rope.scaling.attention_factor == 1.0
    assert both.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert of(DEEPSEEK).softmax_scale == 10**-0.5
    assert of(LLAMA, rope_scaling=yarn).softmax_scale == 6**-0.5


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.5}, "$.partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "$.factor = -1.0"),
        ({"hidden_size": 0}, "$.hidden_size = 0"),
        ({"hidden_size": -24}, "$.hidden_size = -24"),
        ({"hidden_size": 24.5}, "$.hidden_size = 24.5"),
        ({"hidden_size": "24"}, "$.hidden_size = '24'"),
        ({"vocab_size": None}, "$.vocab_size = nothing"),
        ({"num_hidden_layers": 2**60}, "$.num_hidden_layers"),
        ({"rms_norm_eps": 0.0}, "$.rms_norm_eps"),
        ({"hidden_act": "relu6"}, "$.hidden_act = 'relu6'"),
        ({"torch_dtype": "float64"}, "$.torch_dtype = 'float64'"),
        ({"num_attention_heads": 5}, "does not divide hidden_size 24"),
        ({"num_key_value_heads": 3}, "3 kv_heads do not divide 4 heads"),
        ({"head_dim": 5}, "rotary width 5 is odd"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of(LLAMA, **changes)
    assert part in caught.value.message


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"kv_lora_rank": None}, "$.kv_lora_rank: missing"),
        ({"moe_layer_freq": 2}, "$.moe_layer_freq = 2: only 1"),
        ({"scoring_func": "softmax"}, "only 'sigmoid'"),
        ({"topk_method": "greedy"}, "only 'noaux_tc'"),
        ({"n_group": 3}, "do not divide 8 experts"),
        ({"num_experts_per_tok": 5}, "5 experts per token of 4 open"),
    ],
)
def test_what_is_wrong_with_latents_and_experts(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        of(DEEPSEEK, **changes)
    assert part in caught.value.message


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads",
                                 "vocab_size", "intermediate_size"])  # fmt: skip
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"missing key '{key}'"):
        Model.from_hf({name: value for name, value in LLAMA.items() if name != key})


@pytest.mark.parametrize("model_type", ["gpt2", None, ["llama"]])
def test_an_unsupported_type_lists_the_supported_ones(model_type: object) -> None:
    with pytest.raises(ConfigError) as caught:
        of(LLAMA, model_type=model_type, text_config={})
    assert "llama, qwen2, qwen3, mistral, mixtral, qwen3_moe, deepseek_v3" in caught.value.message
    assert "text_config" in caught.value.message


def test_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert Model.load(folder) == Model.load(folder / "config.json")
    assert Model.load(folder).name == "my model"
    assert Model.load("qwen3-1.7b").name == "qwen3-1.7b"
    with pytest.raises(FileError, match="cannot be read"):
        Model.load(tmp_path / "none.json")
    with pytest.raises(FileError, match=r"config\.json: cannot be read"):
        Model.from_hf(tmp_path)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected an object"):
        Model.from_hf(folder)


def test_with_layers_and_overrides() -> None:
    model = of(DEEPSEEK).with_layers(2)
    assert model.layers == 2
    assert model.moe is not None
    assert model.moe.dense_layers == (True, False)
    for layers in (0, 4):
        with pytest.raises(ConfigError, match="it has 1 to 3"):
            of(DEEPSEEK).with_layers(layers)
    assert of(LLAMA).with_overrides({"kv_heads": "4", "dtype": "float16"}).kv_heads == 4
    with pytest.raises(ConfigError, match="windows has 3 entries for 2 layers"):
        of(LLAMA).with_overrides({"layers": "2"})
    with pytest.raises(ConfigError, match="did you mean 'kv_heads'"):
        of(LLAMA).with_overrides({"kv_head": "4"})
