"""The self-test of a pair with nearly flat logits: what rounding does passes and is named, a fault is a fault."""

import numpy as np
import pytest
from fakes import FakeRows
from selftest_support import TARGET_STORES, Damaged, backend_of, outcome
from synthetic import drafter_config, qwen3_5_config, write_drafter, write_target

from edge_dflash.backends.reference import dense
from edge_dflash.backends.selftest import run_selftest
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import load_selftest
from edge_dflash.decode.backend import Precision
from edge_dflash.decode.delegate import Delegate


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory, whole_recording):
    """A random hybrid of 8 layers, NVFP4 with FP8 KV: its logits are nearly flat."""
    root = tmp_path_factory.mktemp("hybrid")
    target = qwen3_5_config(
        hidden_size=128, intermediate_size=192, head_dim=64, num_attention_heads=4, num_key_value_heads=1,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        vocab_size=2048, num_hidden_layers=8,
    )  # fmt: skip
    write_target(root / "target", target, seed=3)
    write_drafter(root / "drafter", drafter_config(target, hidden_size=128, head_dim=32, block_size=8), seed=4)
    build(BuildConfig(root / "target", root / "drafter", root / "bundle", calibrate=False))
    return Bundle.open(root / "bundle")


@pytest.fixture(scope="module")
def loaded(hybrid):
    return backend_of(hybrid)


class Perturbed(Delegate):
    """A backend whose logits are up to ``steps`` BF16 steps off, each by chance."""

    def __init__(self, backend, steps, seed):
        super().__init__(backend)
        self._steps, self._chance = steps, np.random.default_rng(seed)

    def prefill(self, ids, lane=0, sight=None):
        return self._rows(super().prefill(ids, lane, sight))

    def propose(self, anchor, lane=0):
        return self._rows(super().propose(anchor, lane))

    def verify(self, ids, lane=0, parents=None):
        return self._rows(super().verify(ids, lane))

    def _rows(self, rows):
        logits = rows.logits()
        step = 2.0 ** (np.floor(np.log2(logits.max(-1, keepdims=True))) - 7)
        off = self._chance.integers(-self._steps, self._steps + 1, logits.shape) * step
        return FakeRows(logits + off)


@pytest.mark.parametrize(("steps", "seed"), [(1, 1), (2, 1), (3, 1), (3, 4)])
def test_flat_logits_that_are_some_steps_off_pass_as_rounding(hybrid, loaded, steps, seed):
    selftest = load_selftest(hybrid)
    result = run_selftest(Perturbed(loaded, steps, seed), selftest)
    assert result.differences
    assert 0 < result.worst.steps <= 2 * steps
    assert result.verdict == "rounding"
    count, worst = (
        len(result.differences),
        f"{result.worst.steps:.2g} BF16 steps, which rounding explains (logits moved",
    )
    differ = "1 token differs by" if count == 1 else f"{count} tokens differ by at most"
    assert f"; {differ} {worst}" in result.summary


def test_tokens_that_differ_may_be_more_than_few_exceptions(hybrid, loaded):
    """How many do is chance, and another one with each processor's arithmetic: one of the tries has many."""
    selftest = load_selftest(hybrid)
    results = (run_selftest(Perturbed(loaded, 3, seed), selftest) for seed in range(1, 17))
    many = next(one for one in results if len(one.differences) * 16 > one.tokens)
    assert many.verdict == "rounding"


@pytest.mark.parametrize(
    "precision", [Precision("float32", "fp8"), Precision("bfloat16", "bfloat16"), Precision("float32", "bfloat16")]
)
def test_flat_logits_in_another_rounding_pass(hybrid, precision):
    _, rounded = outcome(hybrid, load_selftest(hybrid), precision=precision)
    assert rounded.verdict == "rounding"
    assert rounded.moved < 2 * rounded.recorded.rounding
    assert rounded.moved_most < 4 * rounded.recorded.rounding_most


def test_flat_logits_of_sums_in_another_order_pass(hybrid, monkeypatch):
    def wide(x, weight, row_tile):
        y = x.double() @ weight.matrix.double().T
        return (y if weight.scale is None else y * weight.scale).float()

    monkeypatch.setattr(dense, "linear", wide)
    _, rounded = outcome(hybrid, load_selftest(hybrid))
    assert rounded.verdict == "rounding"


@pytest.mark.parametrize("fault", TARGET_STORES)
def test_a_damaged_target_of_flat_logits(hybrid, fault):
    _, rounded = outcome(hybrid, load_selftest(hybrid), store=Damaged(hybrid, **TARGET_STORES[fault]))
    assert rounded.verdict == "fault"
    assert not rounded.target_ok
    assert rounded.moved > 1.4 * rounded.bound


def test_a_target_of_zeros(hybrid, loaded):
    class Zeros(Delegate):
        def prefill(self, ids, lane=0, sight=None):
            return FakeRows(0 * super().prefill(ids, lane, sight).logits())

        def verify(self, ids, lane=0, parents=None):
            return FakeRows(0 * super().verify(ids, lane).logits())

    result = run_selftest(Zeros(loaded), load_selftest(hybrid))
    assert result.worst.steps == 0  # all tokens are equally good
    assert not result.target_ok
