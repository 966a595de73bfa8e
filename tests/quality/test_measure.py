"""Figures equal those of an independent implementation, and name a fault that was planted."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
from golden_pairs import EXPERTS, FLOAT32
from golden_pairs import pair as golden_pair
from golden_pairs import store as golden_store
from quality_support import SEQUENCES, Changed, kld, rounded, sensitivities, source, stretched, task_texts

from calib.demo.storage import load_target
from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.bundle.reader import Bundle
from edge_dflash.demo.tasks import TARGET
from edge_dflash.errors import CheckpointError
from edge_dflash.model import pair_programs
from edge_dflash.quality import measure
from edge_dflash.quality.compare import figures
from edge_dflash.quality.measure import ALL, KV, WEIGHTS, Run, Stores, all_variants
from edge_dflash.quality.stream import Passes, Variant
from edge_dflash.weights.formats import WideWeight
from edge_dflash.weights.quantize import dequantize

TOKENS = sum(map(len, SEQUENCES))


def run_of(stores, pair, **more):
    passes = Passes.of(pair)
    return Run(passes, stores, SEQUENCES, all_variants(passes, stores.kv, TOKENS), **more)


def independent(store):
    """Logits of the demo target by the code that trained it, in float32, with a store's weights."""
    target = load_target(TARGET)
    named = dict(target.named_parameters())
    with torch.no_grad():
        for name, value in named.items():
            plain = name.removeprefix("model.").removesuffix(".weight")
            value.copy_(dequantize(store.get(f"target.{plain}")).view_as(value))
        return torch.cat([target(torch.tensor([ids]))[0, :-1].double() for ids in SEQUENCES])


def test_weights_alone_are_what_an_independent_model_gives(demo_bundle):
    store, pair = source()
    bundle = Bundle.open(demo_bundle)
    found = run_of(Stores(store, bundle, "fp8"), pair).compared()
    p, q = independent(store), independent(bundle)
    wanted = kld(p, q)
    cost = figures(found[WEIGHTS])
    assert cost.kld.mean == pytest.approx(float(wanted.mean()), rel=0.01)
    assert cost.kld.max == pytest.approx(float(wanted.max()), rel=0.01)
    assert cost.top1 == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()), abs=0.02)
    following = torch.tensor([one for ids in SEQUENCES for one in ids[1:]])
    for mine, z in ((cost.perplexity.source, p), (cost.perplexity.bundle, q)):
        assert mine == pytest.approx(float(torch.nn.functional.cross_entropy(z, following).exp()), rel=1e-3)
    assert 0 < figures(found[KV]).kld.mean < cost.kld.mean
    assert figures(found[ALL]).tokens == TOKENS - len(SEQUENCES)


def test_the_kv_cache_alone_is_what_decoding_with_it_gives(demo_bundle):
    store, pair = source()
    bundle = Bundle.open(demo_bundle)
    found = run_of(Stores(store, bundle, "fp8"), pair).compared()[KV]
    program = pair_programs(pair).verify  # all rows have logits
    rows = []
    for kv in ("float32", "fp8"):
        precision = type(FLOAT32)("float32", kv)
        interpreter = Interpreter(TorchWeights(store), precision)
        logits = []
        for ids in SEQUENCES:
            memory = Memory.allocate(program.states, len(ids), precision, bundle.kv_scale)
            logits.append(interpreter.run(program, ids, memory)["logits"][:-1])
        rows.append(torch.cat(logits))
    assert figures(found).kld.mean == pytest.approx(float(kld(*rows).mean()), rel=0.01)


def test_a_mixture_of_experts_is_what_the_interpreter_gives():
    pair, store = golden_pair(EXPERTS), golden_store(EXPERTS)
    other = Changed(store, rounded(pair))
    sequences = [[one % pair.target.vocab_size for one in ids] for ids in SEQUENCES]
    program, rows = pair_programs(pair).verify, []
    for one in (store, other):
        interpreter, logits = Interpreter(TorchWeights(one), FLOAT32), []
        for ids in sequences:
            memory = Memory.allocate(program.states, len(ids), FLOAT32, store.kv_scale)
            logits.append(interpreter.run(program, ids, memory)["logits"][:-1])
        rows.append(torch.cat(logits))
    passes = Passes.of(pair)
    run = Run(passes, Stores(store, other), sequences, all_variants(passes, "float32", TOKENS))
    found = run.compared()
    assert figures(found[ALL]).kld.mean == pytest.approx(float(kld(*rows).mean()), rel=0.01)
    assert "parts/experts" in found
    assert KV not in found


def test_equal_weights_are_lossless_and_name_no_unit():
    store, pair = source()
    found = run_of(Stores(store, Changed(store)), pair).compared()
    assert found.keys() == {ALL}
    assert figures(found[ALL]).kld.max == 0


@pytest.mark.parametrize("layer", [5, 7])
def test_a_stretched_global_scale_is_named(layer):
    store, pair = source()
    faulty = Changed(Changed(store, rounded(pair)), stretched(layer, 1.05))
    found = sensitivities(Stores(store, faulty), pair, task_texts()[:1])
    layers = Counter()
    for name, cost in found.items():
        layers[name.rpartition(".")[0]] += cost.kld.mean
    del layers[""]  # the head
    (worst, most), (_, second) = layers.most_common(2)
    assert worst == f"layers.{layer}"
    assert most > 1.2 * second


@pytest.mark.parametrize(("part", "times"), [(2, 1.3), (4, 30)])
def test_a_smaller_kv_scale_is_named(demo_bundle, part, times):
    store, pair = source()
    bundle = Bundle.open(demo_bundle)
    smaller = Changed(bundle, scale=lambda state, kv: (kv[0] / part, kv[1] / part) if ".3." in state else kv)
    units = {name: names for name, names in Passes.of(pair).units.items() if name.endswith(".kv")}
    before, after = (sensitivities(Stores(store, one, "fp8"), pair, task_texts(), units) for one in (bundle, smaller))
    assert after["layers.3.kv"].kld.mean > times * before["layers.3.kv"].kld.mean
    assert after["layers.3.kv"].kld.mean > after["layers.7.kv"].kld.mean
    assert after["layers.7.kv"] == before["layers.7.kv"]


def test_units_of_a_caller_are_measured(demo_bundle):
    store, pair = source()
    units = {"both": {"target.layers.0.mlp.up_proj", "target.layers.0.mlp.gate_proj"}, "head": {"target.lm_head"}}
    found = sensitivities(Stores(store, Bundle.open(demo_bundle)), pair, SEQUENCES, units)
    assert found.keys() == units.keys()
    assert all(cost.kld.mean > 0 for cost in found.values())


def test_nan_in_the_source_is_named():
    store, pair = source()

    def spoiled(name, weight):
        if name != "target.layers.2.mlp.up_proj":
            return weight
        values = weight.float32().copy()
        values[3, 3] = float("nan")
        return WideWeight(values)

    with pytest.raises(CheckpointError, match=r"target\.layers\.2\.up is not finite with the weights of the source"):
        run_of(Stores(Changed(store, spoiled), store), pair).compared()


class Killed(BaseException):
    """What ends a process in the middle."""


@pytest.mark.parametrize("layer", [1, 5])
def test_a_killed_run_goes_on_and_gives_the_same(demo_bundle, tmp_path, layer, monkeypatch):
    store, pair = source()
    stores = Stores(store, Bundle.open(demo_bundle), "fp8")
    wanted = run_of(stores, pair).compared()

    def dying(name, weight):
        if name.startswith(f"target.layers.{layer}.mlp"):
            raise Killed
        return weight

    with pytest.raises(Killed):
        run_of(Stores(store, Changed(stores.other, dying), "fp8"), pair, folder=tmp_path).compared()
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "999999.part").write_bytes(b"half")
    read = set()

    def noting(name, weight):
        read.add(name)
        return weight

    run = run_of(Stores(Changed(store, noting), stores.other, "fp8"), pair, folder=tmp_path)
    found = run.compared()
    assert not any(".layers.0." in name for name in read)
    assert {name: figures(one) for name, one in found.items()} == {n: figures(one) for n, one in wanted.items()}


def test_a_state_that_a_crash_tore_is_begun_again(tmp_path):
    store, pair = source()
    (tmp_path / measure.STATE).write_bytes(b"half")
    run = Run(Passes.of(pair), Stores(store, store), [[1, 2]], {ALL: Variant(frozenset(), 2)}, folder=tmp_path)
    assert figures(run.compared()[ALL]).kld.max == 0


def test_units_cost_as_much_as_all_the_rest():
    passes = Passes.of(source()[1])
    variants = all_variants(passes, "fp8", 10_000)
    units = {name: one for name, one in variants.items() if name.startswith(measure.UNITS)}
    whole = {name: one for name, one in variants.items() if not name.startswith(measure.UNITS)}
    spent, alone = (sum(measure.demand(passes, some)[0]) for some in (whole, units))
    assert {one.rows for one in whole.values()} == {10_000}
    assert 0.9 * spent < alone <= spent


def test_nothing_but_training_needs_the_safetensors_library():
    code = "import sys; sys.modules['safetensors'] = None; import edge_dflash.builder.write, edge_dflash.quality.bundle"
    subprocess.run([sys.executable, "-c", code], check=True)
