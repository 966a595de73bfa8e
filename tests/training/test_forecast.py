"""What a training will take, by arithmetic, beside what torch allocates for small models."""

from dataclasses import replace
from math import prod

import pytest
import torch
from training_support import plan

from edge_dflash.bench.random_pair import synthetic_pair
from edge_dflash.common.files import directory
from edge_dflash.demo.tasks import MODELS
from edge_dflash.errors import RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.model.specs import PairSpec
from edge_dflash.training.drafter import TARGET, BlockDrafter
from edge_dflash.training.forecast import (
    FLOAT,
    Forecast,
    activation_bytes,
    drafter_parameters,
    gigabytes,
    logit_tensors,
    training_bytes,
)
from edge_dflash.training.losses import Batch, block_loss
from edge_dflash.training.start import random_weights
from edge_dflash.training.taps import shard_bytes

GB = 10**9
RUN, TOKENS = plan(sequences=2, anchors=4), 160


@pytest.fixture(scope="module")
def demo() -> PairSpec:
    return read_pair(MODELS / "target", MODELS / "drafter")


def close(found: float, wanted: float, share: float = 0.15) -> bool:
    return abs(found / wanted - 1) <= share


def test_parameters_gradients_and_moments_are_what_torch_allocates(demo):
    shapes = [w.shape for name, w in pair_programs(demo).weights.items() if name.startswith("drafter.")]
    model = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes])
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model).backward()
    optimizer.step()
    told = training_bytes(demo, RUN, TOKENS, mixed=False)
    held = list(model)
    assert told["parameters"] == sum(p.nbytes for p in held) == FLOAT * sum(map(prod, shapes))
    assert told["gradients"] == sum(p.grad.nbytes for p in held)
    moments = [x for state in optimizer.state.values() for x in state.values() if x.numel() > 1]
    assert close(told["moments"], sum(x.nbytes for x in moments))


def drafter_of(pair):
    """A drafter of random weights."""
    size = pair.target.vocab_size, pair.target.hidden_size
    return BlockDrafter(pair, random_weights(pair) | {name: torch.randn(size) for name in TARGET})


def kept_by_autograd(pair: PairSpec, sequences: int, tokens: int, count: int) -> int:
    """Bytes of the storages that a forward pass keeps, without parameters and what it is given."""
    torch.manual_seed(0)
    drafter, target = drafter_of(pair), pair.target
    taps = torch.randn(sequences, tokens, len(pair.drafter.target_layer_ids) * target.hidden_size)
    anchors = torch.randint(4, tokens - 20, (sequences, count))
    first = torch.randint(0, target.vocab_size, (sequences, count))
    given = {tensor.untyped_storage().data_ptr() for tensor in (taps, *drafter.buffers(), *drafter.parameters())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (where := tensor.untyped_storage().data_ptr()) not in given:
            kept[where] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rows = drafter.block(drafter.context(taps), anchors, first)
    assert rows.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ({}, (2, 160, 4)),
        ({}, (1, 448, 16)),
        ({"hidden_size": 64, "intermediate_size": 512, "heads": 8, "head_dim": 32}, (2, 160, 4)),
        ({"hidden_size": 512, "block_size": 8, "layers": 1}, (3, 100, 8)),
    ],
)
def test_activations_are_what_autograd_keeps(demo, sizes, batch):
    spec = demo.drafter
    attention = replace(
        spec.attention,
        heads=sizes.get("heads", spec.attention.heads),
        head_dim=sizes.get("head_dim", spec.attention.head_dim),
        rope=replace(spec.attention.rope, dims=sizes.get("head_dim", spec.attention.head_dim)),
    )
    hidden = sizes.get("hidden_size", spec.hidden_size)
    spec = replace(
        spec,
        hidden_size=hidden,
        intermediate_size=sizes.get("intermediate_size", spec.intermediate_size),
        attention=attention,
        block_size=sizes.get("block_size", spec.block_size),
        layers=spec.layers[: sizes.get("layers", 3)],
    )
    pair = PairSpec(replace(demo.target, hidden_size=hidden), spec)
    sequences, tokens, anchors = batch
    told = activation_bytes(spec, plan(sequences=sequences, anchors=anchors), tokens, FLOAT)
    assert close(told, kept_by_autograd(pair, *batch))


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_logits_are_what_the_loss_keeps_of_their_size(kind):
    """The gradient of the logits is one tensor more."""
    pair = read_pair(MODELS / "target", directory("calib") / "demo" / "drafters" / kind)
    torch.manual_seed(0)
    drafter, target, taps = drafter_of(pair), pair.target, len(pair.drafter.target_layer_ids)
    ids, tokens = torch.randint(0, 99, (2, 160)), torch.tensor([160, 160])
    last = torch.randn(2, 160, target.hidden_size) if pair.drafter.anchor_drafts else None
    batch = Batch(ids, tokens, torch.randint(4, 140, (2, 4)), torch.randn(2, 160, taps * target.hidden_size), last)
    size, kept = FLOAT * 2 * 4 * pair.drafter.drafts * target.vocab_size, dict[int, int]()

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.nbytes() >= size // 2:  # int64 indices and masks of that size too
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = block_loss(drafter, batch)
    given = {t.untyped_storage().data_ptr() for t in (batch.taps, *drafter.buffers(), *drafter.parameters())}
    found = sum(nbytes for place, nbytes in kept.items() if place not in given and nbytes % size == 0)
    assert loss.requires_grad
    assert found / size + 1 <= logit_tensors(pair) <= found / size + 2


def forecast(pair, run, tokens):
    """What a dry run makes of answers that have 1,024 tokens with their prompts at most."""
    return Forecast(
        drafter_parameters(pair),
        training_bytes(pair, run, 1024),
        device=80 * GB,
        disk=shard_bytes(pair, tokens),
        files=0,
        seconds={"answers": 180.0, "training": 7200.0},
        longest=1024,
    )


def test_the_drafter_of_27b_fits_a_gpu_of_80_gb():
    pair = synthetic_pair("qwen3.6-27b")
    assert 1.6e9 < drafter_parameters(pair) < 1.8e9
    run = plan(sequences=1, anchors=64, accumulate=16)
    told = forecast(pair, run, 20_000 * 800)
    assert training_bytes(pair, run, 2048)["total"] < 80 * GB
    assert not any("warning" in line for line in told.lines)
    assert any("needs about" in line for line in replace(told, device=24 * GB).lines)
    assert 27 * GB < sum(told.memory[name] for name in ("parameters", "gradients", "moments")) < 28 * GB
    assert told.to_json()["hours"] == 2.05
    assert told.disk == 20_000 * 800 * (4 + 5 * 5120 * 2)


def test_a_pair_without_a_drafter_is_refused(demo):
    with pytest.raises(RequestError, match="no drafter to train"):
        drafter_parameters(replace(demo, drafter=None))


def test_sizes_and_times_are_told_in_units_that_fit(demo):
    assert [gigabytes(size) for size in (697_700, 45_600_000, 1_234_000_000)] == ["697.7 kB", "45.6 MB", "1.23 GB"]
    told = forecast(demo, RUN, 3600)
    assert told.lines[-1] == told.time == "time at most: 2.0 h (answers 3 min, training 2.0 h)"
    assert replace(told, seconds={"taps": 9.2}).time == "time at most besides the steps: 9 s (taps 9 s)"
