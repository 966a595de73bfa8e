"""Calibrated scales against the golden arrays, direct computation and badly chosen scales."""

import numpy as np
import pytest
from golden_pairs import FLOAT32, NAMES, golden, pair, programs, store

from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.builder.scales import calibrate
from edge_dflash.errors import BuildError
from edge_dflash.model.ops import Linear
from edge_dflash.weights.formats import WideWeight
from edge_dflash.weights.quantize import dequantize, quantize_nvfp4

IDS = tuple(int(i) for i in np.random.default_rng(0).integers(0, 511, 40))


class Wrapped:
    """A store with some weights replaced, and a record of what was read."""

    def __init__(self, inner, replaced=None):
        self.inner, self.replaced, self.read, self.kv_scale = inner, replaced or {}, [], inner.kv_scale

    def get(self, name):
        self.read.append(name)
        return self.replaced[name] if name in self.replaced else self.inner.get(name)


def largest(array):
    return float(np.abs(array).max())


@pytest.mark.parametrize("name", NAMES)
def test_scales_are_those_of_the_golden_keys_and_values(name):
    """K and V of an independent implementation: target caches and drafter context after prefill."""
    arrays, checked = golden(name), 0
    ids = [int(i) for i in arrays["p2.prompt"]]
    scales = calibrate(pair(name), store(name), ids, margin=1.0, proposals=0, activations="float32")
    for state, (k, v) in scales.kv.items():
        model, _, layer, _ = state.split(".")
        prefix = "p2.kv.{}.{}" if model == "target" else "p2.draft_ctx_{1}.{0}"
        assert k == pytest.approx(largest(arrays[prefix.format(layer, "k")]) / 448, rel=1e-4)
        assert v == pytest.approx(largest(arrays[prefix.format(layer, "v")]) / 448, rel=1e-4)
        checked += 1
    assert checked == len([s for s in programs(name).states if s.endswith(".kv")])
    assert scales.tokens == len(ids)


@pytest.mark.parametrize("name", NAMES)
def test_scales_cover_draft_blocks_and_linear_inputs(name):
    """Direct computation: run the untouched Programs with an observer, tile by tile, and take maxima."""
    linears = {
        op.weight for p in (programs(name).prefill, programs(name).propose) for op in p.ops if isinstance(op, Linear)
    }
    seen = {}

    def observe(op, role, values):
        names = [op.weight] if isinstance(op, Linear) else [f"{op.state}.{role}"]
        for key in names:
            seen[key] = max(seen.get(key, 0.0), float(values.abs().max()))

    passes = programs(name)
    interpreter = Interpreter(TorchWeights(store(name)), FLOAT32)
    memory = Memory.allocate(passes.states, 64, FLOAT32, lambda _: (1.0, 1.0))
    interpreter.run(passes.prefill, IDS, memory, observer=observe)
    block = pair(name).drafter
    for start in (39, 19):
        memory.length = start
        draft = [IDS[start]] + [block.mask_token_id] * (block.block_size - 1)
        interpreter.run(passes.propose, draft, memory, observer=observe)

    scales = calibrate(pair(name), store(name), IDS, margin=1.5, proposals=2, linears=linears, activations="float32")
    for state, (k, v) in scales.kv.items():
        assert k == pytest.approx(seen[f"{state}.k"] * 1.5 / 448, rel=1e-4)
        assert v == pytest.approx(seen[f"{state}.v"] * 1.5 / 448, rel=1e-4)
    assert scales.inputs.keys() == linears
    for linear, sx in scales.inputs.items():
        assert sx == pytest.approx(seen[linear] / 2688, rel=1e-4), linear
        assert sx == float(np.float32(sx))


def test_weights_are_streamed_and_the_tail_is_not_run():
    """No lm_head and no MLP of the last layer; each target weight is read once; progress ends at its total."""
    watched, steps = Wrapped(store("qwen3_5")), []
    calibrate(pair("qwen3_5"), watched, IDS, progress=lambda done, total: steps.append((done, total)))
    assert "target.lm_head" not in watched.read
    assert "drafter.layers.2.mlp.down_proj" not in watched.read
    for name in ("target.embed_tokens", "target.layers.5.mlp.up_proj", "drafter.fc"):
        wanted = 5 if name == "target.embed_tokens" else 1  # one prefill and four propose passes embed ids
        assert watched.read.count(name) == wanted
    totals = {total for _, total in steps}
    assert [done for done, _ in steps] == list(range(1, totals.pop() + 1))
    assert not totals


def test_quantized_and_wide_stores_calibrate_alike():
    """An NVFP4 store gives the scales of its dequantized values; a stored activation scale is not applied."""
    name, weight = "qwen3", "target.layers.0.self_attn.q_proj"
    down = "target.layers.0.mlp.down_proj"
    matrix = dequantize(store(name).get(weight))
    quantized = quantize_nvfp4(matrix)
    static = type(quantized)(quantized.packed, quantized.block_scale, quantized.global_scale, 0.125)
    wide = WideWeight(dequantize(quantized).numpy())
    a, b = (
        calibrate(pair(name), Wrapped(store(name), {weight: w}), IDS, linears=(weight, down), activations="float32")
        for w in (static, wide)
    )
    for name in (weight, down):
        assert a.inputs[name] == pytest.approx(b.inputs[name], rel=1e-4)
    for state, scales in a.kv.items():
        assert scales == pytest.approx(b.kv[state], rel=1e-4)


def test_one_token_and_zero_tensors():
    name = "qwen3"
    value = "target.layers.2.self_attn.v_proj"
    zeros = WideWeight(np.zeros(store(name).get(value).shape, dtype=np.float32))
    scales = calibrate(pair(name), Wrapped(store(name), {value: zeros}), [3])
    assert scales.kv["target.layers.2.kv"][1] == 1.0
    assert scales.tokens == 1


def test_refusals():
    name = "qwen3"
    with pytest.raises(BuildError, match="no token ids"):
        calibrate(pair(name), store(name), [])
    with pytest.raises(BuildError, match=r"ids 5..512, wanted ids 0..511"):
        calibrate(pair(name), store(name), [5, 512])
    with pytest.raises(BuildError, match=r"did not reach target\.layers\.99\.mlp"):
        calibrate(pair(name), store(name), [5], linears=("target.layers.99.mlp.up_proj",))
    value = "target.layers.1.self_attn.v_proj"
    damaged = dequantize(store(name).get(value)).numpy().copy()
    damaged[0, 0] = np.inf
    with pytest.raises(BuildError, match=r"calibration found (inf|nan) in target.layers.1.kv.v"):
        calibrate(pair(name), Wrapped(store(name), {value: WideWeight(damaged)}), IDS)
