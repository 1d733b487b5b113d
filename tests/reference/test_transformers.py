"""The dense NumPy reference against Hugging Face transformers, on random weights."""

import numpy as np
import pytest

from tests.naive import dense
from wafer_emu.model import Model
from wafer_emu.rotary import inverse_frequencies
from wafer_emu.weights import Weights
from wafer_kernels.numeric_routing import choose_by_group
from wafer_kernels.numeric_storage import narrow_bfloat16

torch = pytest.importorskip("torch", reason="the extra 'reference' is not installed")
transformers = pytest.importorskip("transformers", reason="the extra 'reference' is not installed")

TOKENS = 40
TOLERANCE = 2e-5
SMALL = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
}


def rope(**values):
    return {"rope_parameters": {"rope_theta": 10000.0, **values}}


YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = rope(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
CASES = {
    "llama-gqa": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases-gelu": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "llama-exact-gelu": ("Llama", {"hidden_act": "gelu"}),
    "llama-head-dim": ("Llama", {"head_dim": 20}),
    "llama-linear": ("Llama", rope(rope_type="linear", factor=4.0)),
    "llama-llama3": ("Llama", LLAMA3),
    "llama-yarn": ("Llama", YARN),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 9, "head_dim": 12}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 12, "norm_topk_prob": True}),
    "qwen3-moe-sparse-step": (
        "Qwen3Moe",
        {**EXPERTS, "head_dim": 12, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "deepseek-v3-q-lora": ("DeepseekV3", {**LATENT, "q_lora_rank": 28}),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        {
            **LATENT,
            **rope(
                rope_type="yarn",
                factor=8.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=0.8,
            ),
        },
    ),
    "deepseek-v3-halves": ("DeepseekV3", {**LATENT, "rope_interleave": False}),
}


@pytest.fixture(params=CASES)
def peer(request):
    """A transformers model with weights that make every part matter, and its name."""
    kind, changes = CASES[request.param]
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                tensor.copy_(1 + 0.2 * torch.randn(tensor.shape))
            elif name.endswith(("bias", "e_score_correction_bias")):
                tensor.copy_(0.2 * torch.randn(tensor.shape))
            elif tensor.dim() > 1:
                tensor.copy_(torch.randn(tensor.shape) / tensor.shape[-1] ** 0.5)
    return model


def test_logits_and_hidden_state(peer, tmp_path):
    peer.save_pretrained(tmp_path)
    ids = np.random.default_rng(7).integers(0, SMALL["vocab_size"], TOKENS)
    with torch.no_grad():
        output = peer(torch.tensor(ids)[None], output_hidden_states=True, use_cache=False)
    model = Model.from_hf(tmp_path)
    found = dense.forward(model, Weights.open(tmp_path, model), ids)
    logits, hidden = output.logits[0].numpy(), output.hidden_states[-1][0].numpy()
    error = np.abs(found.logits - logits).max() / np.abs(logits).max()
    assert error <= TOLERANCE
    assert np.abs(found.hidden - hidden).max() <= TOLERANCE * np.abs(hidden).max()
    two_best = np.sort(logits, axis=1)[:, -2:]
    clear = two_best[:, 1] - two_best[:, 0] > 10 * TOLERANCE * np.abs(logits).max()
    assert clear.sum() > TOKENS // 2
    np.testing.assert_array_equal(found.logits[clear].argmax(1), logits[clear].argmax(1))


def test_rotary_frequencies(peer):
    """Of the product, within float32 rounding (a scalar power differs by single units)."""
    model = Model.from_hf(peer.config.to_dict())
    expected = peer.model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(
        inverse_frequencies(model.rope, model.rotary_dim), expected, rtol=3e-7
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sharded_checkpoints_are_read_exactly(dtype, tmp_path):
    config = transformers.Qwen2Config(**SMALL)
    peer = transformers.Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    peer.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    found = Weights.open(tmp_path, Model.from_hf(tmp_path))
    parameters = dict(peer.named_parameters())
    assert set(found) == set(parameters)
    for name, values in found.items():
        np.testing.assert_array_equal(values, parameters[name].detach().float().numpy())


def test_bfloat16_rounds_like_torch():
    bits = np.random.default_rng(2).integers(0, 2**32, 200_000, dtype=np.uint32)
    wide = bits.view(np.float32)
    number = wide[~np.isnan(wide)]
    narrow = np.zeros(number.size, np.uint16)
    narrow_bfloat16(narrow, number)
    expected = torch.from_numpy(number).to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(narrow.view(np.int16), expected)


@pytest.mark.parametrize("normalise", [True, False])
def test_routers_choose_alike(normalise):
    """The tile kernels against transformers' own router modules, fed with the same logits."""
    moe = {**LATENT, "norm_topk_prob": normalise}
    config = transformers.DeepseekV3Config(**{**SMALL, **moe})
    peer = transformers.DeepseekV3ForCausalLM(config).model.layers[1].mlp.gate
    torch.manual_seed(3)
    with torch.no_grad():
        peer.weight.copy_(torch.eye(16, SMALL["hidden_size"]))
        peer.e_score_correction_bias.copy_(0.3 * torch.randn(16))
        logits = torch.randn(TOKENS, SMALL["hidden_size"])
        _, expected_weights, expected = peer(logits[None])
    chosen, weights = np.empty((TOKENS, 4), np.int64), np.empty((TOKENS, 4), np.float32)
    choose_by_group(
        chosen,
        weights,
        np.ascontiguousarray(logits[:, :16].numpy()),
        peer.e_score_correction_bias.numpy(),
        groups=4,
        kept_groups=2,
        normalise=normalise,
        scale=config.routed_scaling_factor,
    )
    # A router may list a token's experts in any order.
    order, expected_order = np.argsort(chosen, axis=1), expected.numpy().argsort(axis=1)
    np.testing.assert_array_equal(
        np.take_along_axis(chosen, order, 1),
        np.take_along_axis(expected.numpy(), expected_order, 1),
    )
    np.testing.assert_allclose(
        np.take_along_axis(weights, order, 1),
        np.take_along_axis(expected_weights.numpy(), expected_order, 1),
        rtol=1e-6,
    )
