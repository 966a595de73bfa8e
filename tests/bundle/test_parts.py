import numpy as np
import pytest
from bundle_support import PAIR, random_weights, write_part
from safetensors import safe_open

from edge_dflash.bundle.parts import CHUNK, from_tensors, hash_file, part_of, to_tensors
from edge_dflash.model import pair_programs
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, WideWeight


def test_every_weight_has_a_file_of_its_layer():
    names = pair_programs(PAIR).weights
    assert {part_of(name) for name in names} == {
        f"weights/{stem}.safetensors"
        for stem in (
            "target-embed",
            "target-layer-000",
            "target-layer-001",
            "target-head",
            "drafter-context",
            "drafter-layer-000",
            "drafter-layer-001",
            "drafter-head",
        )
    }
    assert part_of("target.layers.12.mlp.up_proj") == "weights/target-layer-012.safetensors"


def test_files_are_safetensors_with_modelopt_names(tmp_path):
    weights = {
        "a": Nvfp4Weight(np.ones((4, 16), np.uint8), np.ones((4, 2), np.uint8), 0.5, 0.25),
        "b": Fp8Weight(np.ones((4, 32), np.uint8), np.ones(4, np.float32)),
        "c": WideWeight(np.ones(3, np.uint16)),
        "d": WideWeight(np.ones((2, 1, 4), np.float32)),
    }
    counts: list[int] = []
    entry = write_part(tmp_path / "part", weights, counts.append)
    assert sum(counts) == entry.size == (tmp_path / "part").stat().st_size
    assert hash_file(tmp_path / "part") == entry
    with safe_open(tmp_path / "part", "np") as file:
        found = {key: (file.get_slice(key).get_dtype(), file.get_slice(key).get_shape()) for key in tuple(file.keys())}
    assert found == {
        "a.weight": ("U8", [4, 16]),
        "a.weight_scale": ("F8_E4M3", [4, 2]),
        "a.weight_scale_2": ("F32", []),
        "a.input_scale": ("F32", []),
        "b.weight": ("F8_E4M3", [4, 32]),
        "b.weight_scale": ("F32", [4]),
        "c.weight": ("BF16", [3]),
        "d.weight": ("F32", [2, 1, 4]),
    }


def test_bytes_do_not_depend_on_the_order_of_the_weights(tmp_path):
    weights = random_weights(seed=5)
    entry = write_part(tmp_path / "a", weights)
    turned = dict(reversed(weights.items()))
    assert write_part(tmp_path / "b", turned) == entry


def test_large_tensors_are_written_in_chunks(tmp_path):
    counts: list[int] = []
    write_part(tmp_path / "part", {"a": WideWeight(np.zeros(CHUNK, np.float32))}, counts.append)
    assert max(counts) == CHUNK
    assert len(counts) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.weight": ("I64", np.zeros(4, np.int64))}, "a.weight is I64, wanted U8 of nvfp4, as the manifest says"),
        ({"a.weight_scale": ("F32", np.zeros((4, 2), np.float32))}, "weight_scale is F32"),
        ({"a.weight_scale_2": ("F32", np.zeros(1, np.float32))}, r"weight_scale_2 is F32 \[1\], wanted F32 \[\]"),
        ({"a.k_scale": ("F32", np.zeros((), np.float32))}, "a.k_scale is not part of a weight stored as nvfp4"),
        ({"a.weight": ("U8", np.zeros((5, 16), np.uint8))}, r"a has shape \[5, 32\], wanted \[4, 32\]"),
    ],
)
def test_tensors_that_make_no_weight_are_refused(change, message):
    weight = Nvfp4Weight(np.ones((4, 16), np.uint8), np.ones((4, 2), np.uint8), 0.5)
    with pytest.raises(ValueError, match=message):
        from_tensors("a", {**to_tensors("a", weight), **change}, (4, 32), "nvfp4")
