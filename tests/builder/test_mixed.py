"""Mixed precision by budget: what is measured is what is built; its recipe repeats it; what cannot be is refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from builder_support import DRAFTERS, SHORT, add_tokenizer, config_of, copy_target, digests, poison, recipe
from paths import GOLDEN
from quality_support import sensitivities

from edge_dflash.board.profiles import load_board
from edge_dflash.builder import mixed as module
from edge_dflash.builder import write
from edge_dflash.builder.convert import by_max
from edge_dflash.builder.decide import BuildConfig, decide
from edge_dflash.builder.journal import WorkDir
from edge_dflash.builder.mixed import Converted
from edge_dflash.builder.write import build
from edge_dflash.bundle.reader import Bundle
from edge_dflash.checks.inspect import inspect_manifest
from edge_dflash.common.progress import unheard
from edge_dflash.errors import BackendError, BuildError, CheckpointError, RequestError
from edge_dflash.quality.measure import Stores
from edge_dflash.quality.stream import Passes, same
from edge_dflash.weights.formats import TIED
from edge_dflash.weights.recipe import load_recipe

MOE = {"target": GOLDEN / "qwen3_5_moe-tiny", "drafter": GOLDEN / "qwen3_5_moe-tiny-dflash"}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"ids": [(7 * i + j * j) % 190 for j in range(16)]}) + "\n" for i in range(3)))
    return path


def mix_of(config, chooser=lambda: by_max):
    return mixed(config, chooser)


def mixed(config, chooser=lambda: by_max, say=lambda line: None):
    decided = decide(config)
    mixing = module.Mixing(decided, chooser, unheard)
    with WorkDir(config.output, decided.fingerprint, config.command, force=config.force) as work:
        return mixing.mixed(work, say)


def whole_kld(bundle, pair, decided, texts):
    """The KLD of a finished bundle's weights, by the room that measures bundles."""
    found = sensitivities(Stores(decided.store, bundle), pair, texts, {"all": Passes.of(pair).weights})
    return found["all"].kld.mean if found else 0.0


def ids_of(path):
    return [json.loads(line)["ids"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("form", ["nvfp4", "fp8"])
def test_weights_on_the_way_are_those_of_the_build(tmp_path, form, monkeypatch):
    target = add_tokenizer(copy_target("qwen3_5", tmp_path / "target"), 512)
    text = SHORT + ("" if form == "nvfp4" else "target: {attention: fp8, gated_delta: fp8, mlp: fp8, lm_head: fp8}\n")
    config = config_of("qwen3_5", tmp_path / "out", target=target, recipe=recipe(tmp_path, text))
    choosers = []
    chooser = write._chooser
    monkeypatch.setattr(write, "_chooser", lambda *given: choosers.append(chooser(*given)) or choosers[-1])
    bundle, decided = Bundle.open(build(config).bundle), decide(replace(config, output=tmp_path / "other"))
    names = sorted(n for n in bundle.manifest.weights if n.startswith("target."))
    with ThreadPoolExecutor(2) as pool:
        store = Converted(decided, bundle.manifest.weights, choosers[0], pool)
        assert all(same(store.get(name), bundle.get(name)) for name in [*names, *reversed(names)])
    assert sum(bundle.manifest.weights[name] == form for name in names) > 10


def test_a_target_is_reached_and_its_recipe_repeats_the_build(tmp_path, prompts):
    base = mix_of(config_of("qwen3_5", tmp_path / "base", quality_target=1e9, prompts=prompts))[1]
    assert (base.units, len(base.curve)) == ({}, 16)
    lines = []
    config = config_of("qwen3_5", tmp_path / "out", quality_target=base.kld / 4, prompts=prompts)
    result = build(config, say=lines.append)
    mix, bundle = result.mix, Bundle.open(result.bundle)
    assert 0 < mix.kld <= base.kld / 4
    assert base.bytes < mix.bytes < max(point.bytes for point in mix.curve)
    decided = decide(replace(config, output=tmp_path / "other"))
    assert whole_kld(bundle, decided.pair, decided, ids_of(prompts)) == pytest.approx(mix.kld, rel=1e-6)
    assert inspect_manifest(bundle.manifest, board=load_board("thor")).cycle_bytes == mix.bytes
    assert lines[0].startswith("measuring ")
    assert any(f"KLD {mix.kld:.5f} on 48 tokens" in line and mix.recipe in line for line in lines)
    again = build(config_of("qwen3_5", tmp_path / "again", recipe=Path(mix.recipe)))
    assert digests(again.bundle) == digests(result.bundle)
    assert again.mix is None
    for point, following in zip(mix.curve, mix.curve[1:], strict=False):
        assert point.bytes < following.bytes
        assert point.predicted > following.predicted >= 0
        assert following.units


def test_a_budget_is_kept_and_used(tmp_path, prompts):
    config = config_of("qwen3", tmp_path / "out", bytes_budget=10**12, prompts=prompts)
    wide = mix_of(config)[1]
    least, most = wide.curve[0].bytes, wide.bytes
    for share in (0.2, 0.7):
        budget = round(least + share * (most - least))
        decided, mix = mix_of(replace(config, output=tmp_path / f"{share}", bytes_budget=budget))
        assert 0.9 * budget < mix.bytes <= budget
        assert 0 < mix.kld < wide.curve[0].measured
        assert inspect_manifest(decided.manifest, board=load_board("thor")).cycle_bytes == mix.bytes


def test_all_wide_is_lossless(tmp_path, prompts):
    decided, mix = mix_of(config_of("qwen3", tmp_path / "out", quality_target=1e-12, prompts=prompts))
    assert mix.kld == 0.0
    forms = decided.manifest.weights
    assert all(decided.store.get(n).format == f for n, f in forms.items() if n.startswith("target.") and f != TIED)


@pytest.mark.parametrize("pair", [{"name": "qwen3"}, {"name": "qwen3_5"}, {"name": "qwen3_5", **MOE}])
def test_overrides_are_the_units(tmp_path, pair):
    decided = decide(config_of(pair.pop("name"), tmp_path / "out", quality_target=1.0, **pair))
    mixing = module.Mixing(decided, lambda: by_max, unheard)
    for unit in mixing._units:
        made = module._widened(decided.recipe, {unit: "fp8"})
        found = made.formats(decided.programs.weights)
        assert {n for n, form in found.items() if form != decided.manifest.weights[n]} == mixing._units[unit], unit
    parts = {unit.rpartition(".")[2] for unit in mixing._units}
    assert parts >= ({"experts"} if pair else {"mlp"}) | {"attention", "lm_head"}


def test_experts_of_a_layer_keep_one_format(tmp_path, prompts):
    config = config_of("qwen3_5", tmp_path / "out", quality_target=1e-4, prompts=prompts, **MOE)
    decided, mix = mix_of(config)
    assert mix.kld <= 1e-4
    for layer in range(decided.pair.target.num_layers):
        own = f"target.layers.{layer}.mlp."
        forms = {f for n, f in decided.manifest.weights.items() if n.startswith(own) and n.endswith("_proj")}
        assert len(forms) == 1
    assert any(unit.endswith(".experts") for unit in mix.units)


def test_what_is_stored_quantized_stays(tmp_path, prompts):
    config = config_of("modelopt", tmp_path / "out", quality_target=1e-9, prompts=prompts)
    lines = []
    decided, mix = mixed(config, say=lines.append)
    assert "units stay quantized as they are" in lines[0]
    assert all(unit == "lm_head" or unit.endswith("attention") for unit in mix.units)
    stored = {n: decided.store.get(n).format for n in decided.programs.weights}
    assert all(decided.manifest.weights[n] == form for n, form in stored.items() if form in ("nvfp4", "fp8"))
    assert load_recipe(mix.recipe).keeps


class Killed(BaseException):
    """What ends a process in the middle."""


def dying(*_, **__):
    raise Killed


def test_a_killed_build_takes_up_its_recipe(tmp_path, prompts, monkeypatch):
    config = config_of("qwen3", tmp_path / "out", quality_target=0.001, prompts=prompts)
    path, mix = tmp_path / "out.recipe.yaml", build(replace(config, output=tmp_path / "other")).mix
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_whole", dying)
        with pytest.raises(Killed):
            build(config)
    assert not path.exists()
    with monkeypatch.context() as patch:
        patch.setattr(write, "_weights", dying)
        with pytest.raises(Killed):
            build(config)
    kept = path.read_bytes()
    monkeypatch.setattr(module, "Run", dying)
    result = build(config)
    assert path.read_bytes() == kept
    assert result.mix == replace(mix, recipe=str(path))
    assert not (tmp_path / "out.building").exists()
    wanted = build(config_of("qwen3", tmp_path / "whole", recipe=path))
    assert digests(result.bundle) == digests(wanted.bundle)


def test_a_killed_measurement_goes_on(tmp_path, prompts, monkeypatch):
    config = config_of("qwen3", tmp_path / "out", quality_target=0.001, prompts=prompts)
    runs, reads = [], []
    run, get = module.Run, Converted.get
    monkeypatch.setattr(module, "Run", lambda *given, **more: runs.append(1) or run(*given, **more))
    wanted = mix_of(replace(config, output=tmp_path / "whole"))[1]
    whole = len(runs)
    runs.clear()

    def few(*given, **more):
        runs.append(1)
        return run(*given, **more) if len(runs) != 3 else dying()

    def counted(store, name):
        reads.append(name)
        return get(store, name) if len(reads) != 30 else dying()

    monkeypatch.setattr(module, "Run", few)
    monkeypatch.setattr(Converted, "get", counted)
    for _ in range(2):  # in the middle of the units in the recipe's format, then at those in FP8
        with pytest.raises(Killed):
            mix_of(config)
        assert not (tmp_path / "out.recipe.yaml").exists()
    layers = [name.split(".")[2] for name in reads[30:] if ".layers." in name]
    assert layers[0] != "0"  # the run in the middle was taken up behind its first layer
    found = build(config).mix
    assert len(runs) == 3 + whole - 1
    assert replace(found, recipe="") == replace(wanted, recipe="")
    assert (tmp_path / "out.recipe.yaml").read_text() == (tmp_path / "whole.recipe.yaml").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {
        "out",
        "out.recipe.yaml",
        "whole.building",
        "whole.recipe.yaml",
    }


def test_ctrl_c_names_the_command(tmp_path, prompts, monkeypatch):
    config = config_of("qwen3_5", tmp_path / "out", bytes_budget=1 << 40, prompts=prompts)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "Run", stop)
    with pytest.raises(BuildError, match=f"resume with: .*--bytes-budget {1 << 40} --prompts {prompts}"):
        build(config)


def test_a_recipe_of_other_inputs_is_not_lost(tmp_path, prompts, monkeypatch):
    config = config_of("qwen3", tmp_path / "out", quality_target=1e9, prompts=prompts)
    mix_of(config)
    path = tmp_path / "out.recipe.yaml"
    text = path.read_text()
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"ids": list(range(30))}))
    changes = {"quality_target": 1e8}, {"prompts": other}, {"recipe": recipe(tmp_path, SHORT)}
    for changed in (replace(config, **change) for change in changes):
        with pytest.raises(BuildError, match="its inputs were others, or it was changed; build with --recipe"):
            build(changed)
    monkeypatch.setattr(module, "Run", dying)  # nothing is lost by a call that is refused
    for spoiled in (text.replace("nvfp4", "fp8", 1), text + "keeps: true\n", "", "\0", "#\n" * 70_000):
        path.write_text(spoiled)
        with pytest.raises(BuildError, match="it was changed"):
            mix_of(config)
    mix_of(replace(config, force=True))
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"quality_target": float("nan")}, "--quality-target is nan; give a KLD above 0"),
        ({"quality_target": float("inf")}, "--quality-target is inf"),
        ({"quality_target": -0.01}, "--quality-target is -0.01"),
        ({"quality_target": 0.0}, "--quality-target is 0.0"),
        ({"bytes_budget": 0}, "--bytes-budget is 0"),
        ({"bytes_budget": -5}, "--bytes-budget is -5"),
        ({"quality_target": 0.1, "bytes_budget": 10**9}, "give one of them"),
        ({"prompts": Path("x.jsonl")}, "measured on with --quality, --quality-target or"),
        ({"quality_target": 0.1, "prompts": Path("/nowhere/x")}, "cannot read /nowhere/x"),
        ({"quality_target": 0.1, "prompts": Path("/dev/zero")}, "cannot read /dev/zero: it is a device"),
        ({"quality_target": 0.1, "prompts": GOLDEN / "golden_qwen3.safetensors"}, "cannot read|is not JSON"),
    ],
)
def test_values_that_mean_nothing_are_refused_before_any_work(tmp_path, given, word, monkeypatch):
    monkeypatch.setattr(module, "Run", dying)
    with pytest.raises(RequestError, match=word):
        build(config_of("qwen3_5", tmp_path / "out", **given))
    assert not list(tmp_path.iterdir())


def test_a_budget_below_the_least_is_refused_before_any_work(tmp_path, prompts, monkeypatch):
    monkeypatch.setattr(module, "Run", dying)
    with pytest.raises(BuildError, match=r"--bytes-budget is 1000, and a cycle reads \d+ bytes"):
        build(config_of("qwen3_5", tmp_path / "out", bytes_budget=1000, prompts=prompts))
    assert not list(tmp_path.iterdir())


def test_formats_that_no_kernel_takes_are_refused_before_any_work(tmp_path, prompts, monkeypatch):
    def taken(choice, recipe, *_):
        if any(one.format == "fp8" for one in recipe.overrides):
            raise BackendError("no FP8 here")

    monkeypatch.setattr(module, "find_backends", taken)
    monkeypatch.setattr(module, "Run", dying)
    with pytest.raises(BackendError, match="no FP8 here"):
        build(config_of("qwen3_5", tmp_path / "out", quality_target=0.1, prompts=prompts))
    assert not list(tmp_path.iterdir())


def test_a_bundle_and_a_damaged_target_are_refused(tmp_path, prompts):
    bundle = build(config_of("qwen3", tmp_path / "bundle")).bundle
    with pytest.raises(BuildError, match=r"--quality-target is 0\.1 and --target is a bundle"):
        build(BuildConfig(bundle, DRAFTERS["qwen3"], tmp_path / "out", quality_target=0.1))
    with pytest.raises(BuildError, match=r"--prompts is .* and --target is a bundle"):
        build(BuildConfig(bundle, DRAFTERS["qwen3"], tmp_path / "out", prompts=prompts))
    poison(target := copy_target("qwen3_5", tmp_path / "target"), "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"layers\.1\.(mlp\.)?up"):
        build(config_of("qwen3_5", tmp_path / "out", target=target, quality_target=0.1, prompts=prompts))
