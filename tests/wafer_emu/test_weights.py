"""Weights: safetensors files written by the safetensors library, damaged files, random weights."""

import json

import numpy as np
import pytest

from wafer_emu.model import Model
from wafer_emu.weights import Weights, weight_shapes
from wafer_kernels.errors import ConfigError, FileError
from wafer_kernels.numeric_storage import narrow_bfloat16

safetensors = pytest.importorskip("safetensors.numpy")

TINY = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


@pytest.fixture
def model():
    return Model.from_hf(TINY)


def save(path, tensors):
    path.write_bytes(safetensors.save(dict(tensors), metadata={"format": "pt"}))


def save_raw(path, stored_type, tensors):
    """The format by hand, for types that NumPy lacks: length, JSON header, bytes."""
    header, end = {}, 0
    for name, values in tensors.items():
        offsets = [end, end := end + values.nbytes]
        header[name] = {"dtype": stored_type, "shape": values.shape, "data_offsets": offsets}
    table = json.dumps(header).encode()
    content = b"".join(values.tobytes() for values in tensors.values())
    path.write_bytes(len(table).to_bytes(8, "little") + table + content)


def bfloat16_bits(values):
    bits = np.zeros(values.shape, np.uint16)
    narrow_bfloat16(bits, values)
    return bits


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_stored_type_is_read_exactly(model, tmp_path, dtype):
    random = Weights.random(model, seed=3, dtype=dtype)
    path = tmp_path / "model.safetensors"
    if dtype == "bfloat16":
        save_raw(path, "BF16", {name: bfloat16_bits(values) for name, values in random.items()})
    else:
        save(path, {name: values.astype(dtype) for name, values in random.items()})
    found = Weights.open(tmp_path, model)
    assert list(found) == list(random) == list(weight_shapes(model))
    for name, values in random.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], values)


def test_shards(model, tmp_path):
    random = Weights.random(model)
    names = list(random)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save(tmp_path / file, {name: random[name] for name in part})
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        found = Weights.open(path, model)
        assert all(np.array_equal(found[name], random[name]) for name in names)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(FileError, match=r"b\.safetensors: cannot be read"):
        Weights.open(tmp_path, model)


def test_tensors_that_the_model_does_not_use_are_ignored(model, tmp_path):
    tensors = {**Weights.random(model), "model.layers.9.extra": np.zeros(3, np.float32)}
    save(tmp_path / "m.safetensors", tensors)
    found = Weights.open(tmp_path / "m.safetensors", model)
    assert "model.layers.9.extra" not in found
    with pytest.raises(KeyError):
        found["model.layers.9.extra"]


def test_tied_embeddings_need_no_head(tmp_path):
    model = Model.from_hf({**TINY, "tie_word_embeddings": True})
    random = Weights.random(model)
    save(tmp_path / "model.safetensors", random)
    assert "lm_head.weight" not in Weights.open(tmp_path, model)


def test_missing_tensors_are_named(model, tmp_path):
    tensors = dict(Weights.random(model))
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    save(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"1 of the 27 .*layers\.1\.self_attn\.k_proj\.bias"):
        Weights.open(tmp_path, model)


def test_wrong_shape_is_named_with_both_shapes(model, tmp_path):
    tensors = {**Weights.random(model), "model.norm.weight": np.zeros(15, np.float32)}
    save(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"model.norm.weight has the shape \[15\].* \[16\]"):
        Weights.open(tmp_path, model)


def test_unsupported_type_is_named(model, tmp_path):
    shapes = weight_shapes(model)
    tensors = {name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}
    save_raw(tmp_path / "model.safetensors", "F8_E4M3", tensors)
    with pytest.raises(ConfigError, match="stored as F8_E4M3; convert"):
        Weights.open(tmp_path, model)


@pytest.mark.parametrize("kept", [0, 5, 40, 2000, -1])
def test_truncated_files(model, tmp_path, kept):
    save(tmp_path / "model.safetensors", Weights.random(model))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(FileError, match=r"truncated|copy it again"):
        Weights.open(tmp_path, model)


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"[1, 2]",
        b'{"t": 7}',
        b'{"t": {"dtype": "F32", "shape": [2]}}',
        b'{"t": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}',
        b'{"t": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"t": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"t": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}',
        b"\xff\xfe",
    ],
)
def test_damaged_headers(model, tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(FileError, match=r"model\.safetensors: "):
        Weights.open(path, model)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"t": 1}}'])
def test_damaged_index(model, tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FileError, match="weight_map"):
        Weights.open(tmp_path, model)


def test_shards_outside_the_folder_are_refused(model, tmp_path):
    index = {"weight_map": {"t": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileError, match="not a file of its own folder"):
        Weights.open(tmp_path, model)


def test_absent_checkpoint(model, tmp_path):
    with pytest.raises(FileError, match="holds neither"):
        Weights.open(tmp_path, model)
    with pytest.raises(FileError, match="cannot be read"):
        Weights.open(tmp_path / "none.safetensors", model)


def test_random_weights_depend_on_seed_and_name_only(model):
    again, other = Weights.random(model, seed=1), Weights.random(model, seed=2)
    more_layers = Weights.random(Model.from_hf({**TINY, "num_hidden_layers": 3}), seed=1)
    for name, values in Weights.random(model, seed=1).items():
        np.testing.assert_array_equal(values, again[name])
        np.testing.assert_array_equal(values, more_layers[name])
        assert not np.array_equal(values, other[name])


def test_random_matrices_keep_the_size_of_activations(model):
    random = Weights.random(model)
    assert 0.9 < random["model.layers.0.mlp.up_proj.weight"].std() * 4 < 1.1
    assert 0.9 < random["model.embed_tokens.weight"].std() < 1.1
    assert abs(random["model.norm.weight"].mean() - 1) < 0.1


def test_random_weights_of_unknown_type(model):
    with pytest.raises(ConfigError, match="int8"):
        Weights.random(model, dtype="int8")
