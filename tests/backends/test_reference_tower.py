"""The vision tower of the reference against transformers' (golden_vision): rows of pictures and of a clip's frames."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_pairs import GOLDEN
from pictures_support import given, picture
from safetensors.numpy import save_file

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.tower import TorchTower
from edge_dflash.bench.observe import FLOAT32
from edge_dflash.errors import BackendError, CheckpointError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import FrameAttend, Linear
from edge_dflash.model.program import segments
from edge_dflash.weights.checkpoint import PairCheckpoint, checkpoint_pair
from edge_dflash.weights.safetensors import TensorFiles

TINY = GOLDEN / "vision-tiny"
PAIR = checkpoint_pair(TINY, None)
PROGRAMS = pair_programs(PAIR)
BF16 = replace(FLOAT32, activations="bfloat16")


def golden(key):
    return np.array(TensorFiles.open([GOLDEN / "golden_vision.safetensors"]).array(key)[1])


def tower(precision=FLOAT32):
    store = PairCheckpoint.open(TINY, None, PROGRAMS.weights)
    return TorchTower(PAIR.target.vision, PROGRAMS.see, TorchWeights(store), precision)


@pytest.mark.parametrize("index", range(3))
def test_pictures_give_the_rows_of_transformers(index):
    _, rows, columns = golden(f"img{index}.grid_thw")
    found = tower().run(golden(f"img{index}.pixel_values"), (int(rows), int(columns)))
    for role, key in (("embedded", "embed"), ("hidden", "hidden"), ("rows", "rows")):
        wanted = golden(f"img{index}.tower_{key}")
        assert found[role].shape == wanted.shape
        assert np.abs(found[role].numpy() - wanted).max() <= 1e-4, role


def test_frames_of_a_clip_are_passes_of_their_own():
    frames, rows, columns = (int(n) for n in golden("clip.grid_thw"))
    patches = golden("clip.pixel_values").reshape(frames, rows * columns, -1)
    runs = [tower().run(frame, (rows, columns)) for frame in patches]
    for role in ("hidden", "rows"):
        found = torch.cat([run[role] for run in runs]).numpy()
        assert np.abs(found - golden(f"clip.tower_{role}")).max() <= 1e-4


def test_rows_depend_on_the_picture_alone():
    one = tower(BF16)
    first = one.run(golden("img0.pixel_values"), (4, 6))["rows"]
    one.run(golden("img1.pixel_values"), (2, 14))
    assert torch.equal(one.run(golden("img0.pixel_values"), (4, 6))["rows"], first)
    assert torch.equal(tower(BF16).run(golden("img0.pixel_values"), (4, 6))["rows"], first)
    assert not torch.equal(one.run(golden("img0.pixel_values"), (6, 4))["rows"], first)


def test_the_backend_sees():
    store = PairCheckpoint.open(TINY, None, PROGRAMS.weights)
    backend = ReferenceBackend(PAIR, store, FLOAT32, max_context=64)
    seen = backend.see(picture(1))
    assert (len(seen), seen.nbytes) == (7, 7 * 64 * 4)
    assert np.abs(seen.host() - golden("img1.tower_rows")).max() <= 1e-4
    with pytest.raises(BackendError, match=r"are \[24, 1536\], not \[28, 1536\]"):
        backend.see(given(picture(1).levels, (4, 6)))
    blind = ReferenceBackend(PAIR.text_only, store, FLOAT32, max_context=64)
    with pytest.raises(BackendError, match="no vision tower"):
        blind.see(picture(1))


def test_bf16_activations_are_rounded_and_near():
    rows = tower(BF16).run(golden("img0.pixel_values"), (4, 6))["rows"]
    assert torch.equal(rows, rows.bfloat16().float())
    scale = np.abs(golden("img0.tower_rows")).max()
    assert 0 < np.abs(rows.numpy() - golden("img0.tower_rows")).max() <= 0.05 * scale


def test_the_tower_is_one_dense_segment():
    program = PROGRAMS.see
    (segment,) = segments(program)
    assert segment.state == ()
    assert set(segment.inputs) == {"patches", "corners", "shares", "cos", "sin"} == set(program.inputs)
    assert [type(op) for op in segment.dense].count(FrameAttend) == 2
    assert [type(op) for op in segment.dense].count(Linear) == 1 + 2 * 4 + 2
    assert program.columns["rows"] == PAIR.target.hidden_size
    assert {spec.module for spec in program.weights.values() if spec.kind == "linear"} == {"vision"}
    assert PROGRAMS.weights.keys() - pair_programs(PAIR.text_only).weights.keys() == program.weights.keys()


def test_a_tower_that_lacks_a_tensor_is_refused(tmp_path):
    names = ("config.json", "preprocessor_config.json")
    for name in names:
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    raw = TensorFiles.open(TINY)
    held = {name: raw.array(name) for name in raw.names()}
    assert {kind for kind, _ in held.values()} == {"BF16"}
    wide = {name: (data.astype(np.uint32) << 16).view(np.float32) for name, (_, data) in held.items()}

    def write(change):
        save_file(change, tmp_path / "model.safetensors")
        pair = checkpoint_pair(tmp_path, None)
        return pair, lambda: PairCheckpoint.open(tmp_path, None, pair_programs(pair).weights)

    pair, read = write({n: v for n, v in wide.items() if n != "model.visual.merger.norm.bias"})
    with pytest.raises(CheckpointError, match=r"model\.visual\.merger\.norm\.bias"):
        read()
    _, read = write({**wide, "model.visual.deepstack_merger_list.0.norm.bias": np.zeros(64, np.float32)})
    with pytest.raises(CheckpointError, match=r"deepstack_merger_list.*is not part of the target"):
        read()
    _, read = write({**wide, "model.visual.patch_embed.proj.weight": np.zeros((64, 1536), np.float32)})
    with pytest.raises(CheckpointError, match="channels, frames, rows, columns"):
        read()
    pair, read = write({n: v for n, v in wide.items() if "visual" not in n})
    assert pair.target.vision is None
    read()
