"""The self-test of a vision tower: rows of the test's picture, recorded at build and compared at open."""

import json
from dataclasses import replace

import numpy as np
import pytest
from golden_pairs import directories

from edge_dflash import Planner
from edge_dflash.backends import load
from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.backends.selftest import replay, run_selftest
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import BLOCKS, SUMS, TowerTest, chart, dump_selftest, load_selftest
from edge_dflash.errors import BundleError, VerificationError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import GeluErf, GeluTanh
from edge_dflash.weights.formats import WideWeight


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("tower") / "bundle"
    build(BuildConfig(*directories("vision"), path, max_context=200))
    return Bundle.open(path)


class Changed:
    """A bundle's weights, some of the tower's changed: ``change(values)`` of float32 values."""

    def __init__(self, bundle, end, change):
        self._bundle, self._end, self._change = bundle, end, change
        self.hits = 0

    def kv_scale(self, state):
        return self._bundle.kv_scale(state)

    def get(self, name):
        weight = self._bundle.get(name)
        if not (name.startswith("target.visual.") and name.endswith(self._end)):
            return weight
        self.hits += 1
        wide = (np.asarray(weight.data).astype(np.uint32) << 16).view(np.float32)
        return WideWeight(np.ascontiguousarray(self._change(wide), np.float32))


def judged(bundle, store=None, pair=None, programs=None, exact=False):
    """The tower's part of the self-test with other weights, another spec or other ops."""
    pair = pair or bundle.pair
    options = {"max_context": 200, "prefill_chunk": bundle.manifest.prefill_chunk}
    backend = ReferenceBackend(pair, store or bundle, bundle.manifest.precision, programs=programs, **options)
    return run_selftest(backend, load_selftest(bundle), exact=exact, vision=pair.target.vision)


def test_a_bundle_that_sees_passes(bundle):
    result = replay(bundle, load(bundle))
    assert result.ok
    assert result.verdict == "identical"
    assert result.to_json()["tower"] == {"ok": True, "moved": 0.0, "bound": result.tower.bound}
    test = load_selftest(bundle).tower
    assert np.array(test.sums).shape == (BLOCKS[0] * BLOCKS[1], SUMS)
    assert 0 < test.rounding < 0.1


def test_other_rounding_passes_where_no_bits_are_promised(bundle):
    options = {"max_context": 200, "prefill_chunk": bundle.manifest.prefill_chunk}
    precision = replace(bundle.manifest.precision, activations="float32")
    backend = ReferenceBackend(bundle.pair, bundle, precision, **options)
    result = run_selftest(backend, load_selftest(bundle), vision=bundle.pair.target.vision)
    assert result.tower.ok
    assert not result.tower.identical
    strict = run_selftest(backend, load_selftest(bundle), exact=True, vision=bundle.pair.target.vision)
    assert not strict.ok


@pytest.mark.parametrize(
    ("end", "change"),
    [
        ("pos_embed", lambda x: np.roll(x, 1, 0)),
        ("pos_embed", lambda x: x.reshape(6, 6, -1).swapaxes(0, 1).reshape(36, -1)),
        ("patch_embed.proj", lambda x: x.reshape(64, 3, -1)[:, ::-1].reshape(64, -1)),
        ("patch_embed.proj.bias", np.zeros_like),
        ("blocks.0.attn.qkv", lambda x: np.concatenate([x[64:128], x[:64], x[128:]])),
        ("blocks.1.attn.proj", np.transpose),
        ("blocks.1.norm2", lambda x: 1 + x),
        ("blocks.0.mlp.linear_fc2.bias", np.zeros_like),
        ("merger.linear_fc1", lambda x: x.reshape(256, 4, 64)[:, [0, 2, 1, 3]].reshape(256, 256)),
        ("merger.linear_fc2", lambda x: np.roll(x, 1, 0)),
        ("merger.norm.bias", lambda x: x + np.nan),
    ],
)
def test_wrong_weights_are_seen(bundle, end, change):
    store = Changed(bundle, end, change)
    result = judged(bundle, store)
    assert store.hits
    assert not result.tower.ok, result.tower.summary
    assert not result.ok
    assert result.verdict == "fault"
    assert "the vision tower is not the one that was built" in result.diagnosis


def test_another_theta_is_seen(bundle):
    target = bundle.pair.target
    pair = replace(bundle.pair, target=replace(target, vision=replace(target.vision, theta=1e3)))
    assert not judged(bundle, pair=pair).tower.ok


def test_one_gelu_for_the_other_is_seen_where_bits_are_promised(bundle):
    programs = pair_programs(bundle.pair)
    swapped = tuple(
        GeluErf(inputs=op.inputs, output=op.output) if isinstance(op, GeluTanh) else op for op in programs.see.ops
    )
    assert swapped != programs.see.ops
    result = judged(bundle, programs=replace(programs, see=replace(programs.see, ops=swapped)), exact=True)
    assert not result.tower.ok


def test_a_planner_refuses_a_wrong_tower(bundle, monkeypatch):
    test = load_selftest(bundle)
    wrong = replace(test, tower=replace(test.tower, sums=tuple(row[::-1] for row in test.tower.sums)))
    monkeypatch.setattr("edge_dflash.backends.selftest.load_selftest", lambda _: wrong)
    with pytest.raises(VerificationError, match="the vision tower is not the one that was built"):
        Planner.open(bundle.path)


@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda tower: None, "tower has no rows"), (lambda tower: replace(tower, sums=tower.sums[:-1]), "other rows")],
)
def test_a_self_test_of_another_tower_is_refused(bundle, tmp_path, monkeypatch, change, words):
    test = load_selftest(bundle)
    text = dump_selftest(replace(test, tower=change(test.tower)))
    monkeypatch.setattr("edge_dflash.bundle.selftest.read_bytes", lambda file, most: text)
    with pytest.raises(BundleError, match=words):
        load_selftest(bundle)


def test_a_bundle_of_text_says_nothing_of_a_tower(tmp_path):
    build(BuildConfig(*directories("vision"), tmp_path / "text", max_context=200, text_only=True))
    bundle = Bundle.open(tmp_path / "text")
    assert "tower" not in json.loads((bundle.path / "selftest.json").read_text())
    assert replay(bundle, load(bundle)).tower is None


def test_the_picture_has_patches_of_every_level(bundle):
    picture = chart(bundle.pair.target.vision.patches)
    assert picture.values().shape == (80, 1536) == (picture.grid[0] * picture.grid[1], 1536)
    assert picture.tokens == 20
    assert (picture.levels.min(), picture.levels.max()) == (0, 255)
    first = picture.values().reshape(80, 3, 2, 256)
    assert np.array_equal(first[:, :, 0], first[:, :, 1])
    assert np.abs(first[:, :, 0].reshape(80, -1) - (picture.levels / 127.5 - 1)).max() <= 1e-6
    assert chart(bundle.pair.target.vision.patches).digest == picture.digest


def test_rows_that_are_all_the_same_have_no_spread():
    rows = np.ones((6, 8), np.float32)
    test = TowerTest.of(rows, rows)
    assert not test.fits()
    assert test.moved(rows) == 0
    assert np.isinf(test.moved(rows + 1))
