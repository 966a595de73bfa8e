import contextlib
import json

import numpy as np
import pytest
import torch
from golden_pairs import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_dflash.errors import CheckpointError
from edge_dflash.weights.safetensors import INDEX, SINGLE, TensorFiles


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def checkpoint(tmp_path):
    def write(content, name=SINGLE):
        (tmp_path / name).write_bytes(content)
        return tmp_path

    return write


def test_values_equal_the_safetensors_package():
    from safetensors.torch import load_file

    tensors = TensorFiles.open(GOLDEN / "qwen3-tiny")
    reference = load_file(GOLDEN / "qwen3-tiny" / SINGLE)
    assert set(tensors.names()) == set(reference)
    for name, value in reference.items():
        kind, array = tensors.array(name)
        assert kind == "BF16"
        assert array.tobytes() == value.view(dtype=torch.int16).numpy().tobytes()
        assert array.shape == tuple(value.shape)


def test_arrays_are_read_only_views():
    tensors = TensorFiles.open(GOLDEN / "qwen3-tiny")
    _, array = tensors.array("model.norm.weight")
    assert not array.flags.writeable
    before = array.copy()
    tensors.release()
    assert np.array_equal(tensors.array("model.norm.weight")[1], before)


def test_misaligned_tensors_are_read(checkpoint):
    value = np.array([1.5, -2.0], np.float32)
    header = {"a": entry("U8", (1,), (0, 1)), "b": entry("F32", (2,), (1, 9))}
    tensors = TensorFiles.open(checkpoint(raw(header, b"\7" + value.tobytes())))
    assert np.array_equal(tensors.array("b")[1], value)


def test_shards(checkpoint, tmp_path):
    checkpoint(raw({"a": entry()}, bytes(8)), "one.safetensors")
    checkpoint(raw({"b": entry()}, bytes(8)), "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert set(TensorFiles.open(tmp_path).names()) == {"a", "b"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"says that a is in two\.safetensors"):
        TensorFiles.open(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "three.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"shard three\.safetensors .* missing"):
        TensorFiles.open(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with pytest.raises(CheckpointError, match="wanted a file of the same directory"):
        TensorFiles.open(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="no weight_map"):
        TensorFiles.open(tmp_path)


def test_a_tensor_in_two_shards_is_refused(checkpoint, tmp_path):
    for name in ("one.safetensors", "two.safetensors"):
        checkpoint(raw({"a": entry()}, bytes(8)), name)
    with pytest.raises(CheckpointError, match="also in one"):
        TensorFiles.open([tmp_path / "one.safetensors", tmp_path / "two.safetensors"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cut short"),
        (b"\x01\x02\x03", "cut short"),
        (raw({}, length=1 << 40), "cut short"),
        (raw(b"{not json"), "damaged header"),
        (raw(b"[1]"), "no JSON object"),
        (raw(b"\xff\xfe"), "damaged header"),
        (raw({"a": 3}), "tensor a has a damaged header entry"),
        (raw({"a": {"dtype": "F32", "shape": [2]}}), "tensor a has a damaged header entry"),
        (raw({"a": entry(shape=(-2,))}, bytes(8)), "tensor a has a damaged header entry"),
        (raw({"a": entry(shape=(True, 2))}, bytes(8)), "tensor a has a damaged header entry"),
        (raw({"a": entry("F7")}, bytes(8)), "dtype F7"),
        (raw({"a": entry(offsets=(0, 4))}, bytes(8)), "has 4 bytes, wanted 8 for F32"),
        (raw({"a": entry()}, bytes(7)), "cut short: tensor a ends at byte"),
        (raw({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "a and b overlap"),
        (raw({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)), "4 bytes between a and tensor b"),
        (raw({"a": entry(offsets=(8, 16))}, bytes(16)), "8 bytes between the header and tensor a"),
        (raw({"a": entry()}, bytes(9)), "1 bytes after a, the last tensor"),
        (raw(b'{"a": 1, "a": 2}'), "damaged header"),
        (raw(b"[" * 100_000), "damaged header"),
        (raw(b'{"a": ' + b"9" * 5000 + b"}"), "damaged header"),
    ],
)
def test_damaged_files_are_refused_by_name(checkpoint, content, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        TensorFiles.open(checkpoint(content))
    assert SINGLE in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_directories_and_files(tmp_path):
    with pytest.raises(CheckpointError, match="no directory"):
        TensorFiles.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="neither"):
        TensorFiles.open(tmp_path)


@settings(max_examples=150)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_random_bytes_never_raise_anything_else(tmp_path_factory, content, length):
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / SINGLE).write_bytes(length.to_bytes(8, "little") + content)
    with contextlib.suppress(CheckpointError):
        TensorFiles.open(directory)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3))
def test_random_headers_never_raise_anything_else(tmp_path_factory, header):
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / SINGLE).write_bytes(raw(header, bytes(16)))
    with contextlib.suppress(CheckpointError):
        TensorFiles.open(directory)
