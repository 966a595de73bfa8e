"""A bundle is measured against its source, killed runs go on, and figures live in the bundle without changing it."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from native_support import NATIVE_PAIR, write_native_bundle
from paths import GOLDEN
from quality_support import task_texts

from calib.demo.storage import load_target
from edge_dflash.backends import load
from edge_dflash.bundle.manifest import QUALITY, fingerprint
from edge_dflash.bundle.reader import Bundle, read_manifest
from edge_dflash.common.files import locked
from edge_dflash.common.progress import unheard
from edge_dflash.demo.tasks import TARGET, assemble
from edge_dflash.errors import BundleError, CheckpointError, RequestError, VerificationError
from edge_dflash.model import pair_programs
from edge_dflash.quality import bundle as module
from edge_dflash.quality import compare
from edge_dflash.quality.bundle import SourceModel, TaskSet, keep, measure
from edge_dflash.quality.measure import ALL, Run, Stores, all_variants
from edge_dflash.quality.report import dump_quality, read_quality
from edge_dflash.quality.stream import Passes
from edge_dflash.weights.checkpoint import checkpoint_pair

TASKS = [
    [{"role": "user", "content": "Tidy up."}, {"role": "assistant", "content": 'Done: {"goal": "tidy"}'}],
    [{"role": "user", "content": "Rules: none\nGoal: Check black_vial."}],
]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(module, "TOKENS", 150)
    monkeypatch.setattr(module, "ANSWER", 24)


@pytest.fixture
def bundle(demo_bundle, tmp_path):
    return Bundle.open(shutil.copytree(demo_bundle, tmp_path / "bundle"), check_hashes=False)


def measured(bundle, source=TARGET, tasks=TASKS, *, backend=None, say=lambda line: None):
    folder, prompts = bundle.path.with_name("work"), TaskSet(tasks, "a test's")
    source = SourceModel.open(Path(source), bundle.pair)
    return measure(bundle, source, prompts, folder=folder, backend=backend, progress=unheard, say=say)


@pytest.fixture(scope="module")
def figures(demo_bundle, tmp_path_factory):
    """What one measurement found, for the tests of where it is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TOKENS", 60)
        copy = shutil.copytree(demo_bundle, tmp_path_factory.mktemp("figures") / "bundle")
        return measured(Bundle.open(copy, check_hashes=False))


def test_figures_of_a_bundle_with_its_backend(bundle):
    said = []
    found = measured(bundle, backend=load(bundle), say=said.append)
    assert 0 < found.kv.kld.mean < found.weights.kld.mean < 0.5
    assert set(found.parts) == {"attention", "gated_delta", "mlp", "lm_head"}
    assert {"prompt", "prose", "json_keys", "json_values", "json_structure"} >= set(found.where) > {"prompt"}
    assert sum(one.tokens for one in found.where.values()) == found.tokens
    costs = [one.kld.mean for one in found.layers.values()]
    assert costs == sorted(costs, reverse=True)
    assert len(costs) == 8
    for name, one in found.layers.items():
        units = [unit.kld.mean for key, unit in found.units.items() if key.startswith(f"{name}.")]
        assert one.kld.mean == pytest.approx(sum(units))
    own = found.backend
    assert own.name == "reference"
    assert own.tokens == sum(one.tokens for place, one in found.where.items() if place != "prompt")
    assert own.against_reference.kld.mean < 1e-3  # BF16 activations alone
    assert found.protocol.answers == "given, or the bundle's own, greedy: 2 of 2"
    assert len(said) == 1
    assert "GB of memory" in said[0]
    assert not bundle.path.with_name("work").exists()


def test_a_backends_logits_are_those_of_decoding(bundle, monkeypatch):
    """Logits of other rows, or against another row's, would be far away."""
    ids = list(task_texts()[0][:140])
    monkeypatch.setattr(module, "TOKENS", len(ids))  # no room for an answer
    found = measured(bundle, tasks=[ids], backend=load(bundle))
    with torch.no_grad():
        logits = load_target(TARGET)(torch.tensor([ids]))[0, :-1].double()
    following = torch.tensor(ids[1:])
    wanted = float(torch.nn.functional.cross_entropy(logits, following).exp())
    assert found.perplexity.source == pytest.approx(wanted, rel=1e-3)
    assert found.backend.kld.mean == pytest.approx(found.kld.mean, rel=0.2)


def test_logits_of_a_backend_that_are_not_finite_are_said(bundle, monkeypatch):
    rows = SimpleNamespace(logits=lambda: np.full((1, 1024), np.nan, np.float32))
    monkeypatch.setattr(module, "forced", lambda *_: [SimpleNamespace(rows=rows)])
    with pytest.raises(VerificationError, match="logits of the reference backend are not finite"):
        measured(bundle, tasks=TASKS[1:], backend=load(bundle))


def test_without_a_backend_nothing_is_answered(bundle):
    found = measured(bundle, tasks=TASKS[1:])
    assert found.protocol.answers == "none: no backend of the bundle runs here"
    assert found.backend is None
    assert set(found.where) == {"prompt"}


class Killed(BaseException):
    """What ends a process in the middle."""


def killed_at(monkeypatch, layer, bundle, **given):
    get = Bundle.get

    def until(self, name):
        if name.startswith(f"target.layers.{layer}."):
            raise Killed
        return get(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Bundle, "get", until)
        with pytest.raises(Killed):
            measured(bundle, **given)


def test_a_killed_measurement_goes_on(bundle, monkeypatch):
    wanted = measured(bundle)
    killed_at(monkeypatch, 6, bundle)
    assert len(list(bundle.path.with_name("work").glob("*.safetensors"))) == 1
    read = []
    get = Bundle.get
    monkeypatch.setattr(Bundle, "get", lambda self, name: (read.append(name), get(self, name))[1])
    assert dump_quality(measured(bundle)) == dump_quality(wanted)
    assert not any(".layers.4." in name for name in read)
    assert not bundle.path.with_name("work").exists()


def test_a_source_that_changed_in_between_is_measured_anew(bundle, tmp_path, monkeypatch):
    source = shutil.copytree(TARGET, tmp_path / "source")
    killed_at(monkeypatch, 6, bundle, source=source)
    file = source / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # behind what the fingerprint reads
    file.write_bytes(data)
    os.utime(file, (1, 1))
    read = []
    get = Bundle.get
    monkeypatch.setattr(Bundle, "get", lambda self, name: (read.append(name), get(self, name))[1])
    measured(bundle, source)
    assert any(".layers.0." in name for name in read)


def test_two_at_a_time_are_refused_and_foreign_files_stay(bundle):
    folder = bundle.path.with_name("work")
    folder.mkdir()
    (folder / "mine.txt").touch()
    with locked(folder), pytest.raises(RequestError, match="another process measures"):
        measured(bundle)
    measured(bundle)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_a_folder_with_files_of_another_kind_is_left_alone(bundle):
    folder = shutil.copytree(bundle.path, bundle.path.with_name("work"))
    with pytest.raises(RequestError, match=r"work is in the way: .* is none of it; move it away"):
        measured(bundle)
    Bundle.open(folder)  # as whole as before


def test_a_source_of_another_model_is_refused_by_name(bundle):
    with pytest.raises(RequestError, match=r"qwen3-tiny: architecture is 'qwen3', that of the bundle's target"):
        measured(bundle, GOLDEN / "qwen3-tiny")
    with pytest.raises(RequestError, match=r"qwen3_5-tiny: vocab_size is "):
        measured(bundle, GOLDEN / "qwen3_5-tiny")


def test_a_source_with_a_folder_for_a_file_is_refused_by_name(bundle, tmp_path):
    (shutil.copytree(TARGET, tmp_path / "source") / "x.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"x\.safetensors: it is a directory, wanted a regular file; remove it"):
        measured(bundle, tmp_path / "source")


def test_eyes_are_left_out(tmp_path, bundle):
    assemble(tmp_path / "sees")
    sees = checkpoint_pair(tmp_path / "sees", None)
    assert sees.target.vision
    opened = [SourceModel.open(path, pair) for path, pair in ((tmp_path / "sees", bundle.pair), (TARGET, sees))]
    assert opened[0].digest != opened[1].digest
    assert opened[0].store.get("target.norm").shape == (256,)


def test_stacked_weights_are_read_as_they_were(tmp_path):
    formats = {n: "nvfp4" if s.kind == "linear" else "bf16" for n, s in pair_programs(NATIVE_PAIR).weights.items()}
    formats |= {name: "bf16" for name in formats if "in_proj_a" in name or "in_proj_b" in name}
    store = write_native_bundle(tmp_path, formats)
    other = Bundle.open(tmp_path)
    passes, ids = Passes.of(NATIVE_PAIR), [[1, 2, 3, 4, 5, 6, 7, 8]]
    run = Run(passes, Stores(store, other, release=other.release), ids, all_variants(passes, "float32", 8))
    assert compare.figures(run.compared()[ALL]).kld.max < 1e-9
    assert np.isfinite(other.get("target.layers.0.mlp.up_proj").block_scale).all()  # pages come back


def test_figures_in_a_bundle_change_nothing_else(bundle, figures, monkeypatch):
    before = fingerprint(bundle.manifest)
    assert read_quality(bundle.path, bundle.manifest) is None
    for one in (figures, replace(figures, top1=0.5)):
        keep(bundle.path, one)
        opened = Bundle.open(bundle.path)
        assert fingerprint(opened.manifest) == before
        assert read_quality(bundle.path, opened.manifest) == one
    monkeypatch.chdir(bundle.path)
    keep(Path(), replace(figures, top5=0.25))
    assert read_quality(bundle.path, read_manifest(bundle.path)) == replace(figures, top5=0.25)
    (bundle.path / QUALITY).write_bytes(dump_quality(figures))
    with pytest.raises(BundleError, match=r"another hash .* measure it again"):
        read_quality(bundle.path, read_manifest(bundle.path))


@pytest.mark.parametrize("step", range(7))
def test_a_kill_at_any_step_leaves_a_whole_bundle(bundle, figures, monkeypatch, step):
    keep(bundle.path, figures)
    left = step

    def stepping(original):
        def run(*arguments):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return original(*arguments)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_file", stepping(module.write_file))
        patch.setattr(Path, "replace", stepping(Path.replace))
        try:
            keep(bundle.path, replace(figures, top5=0.5))
        except Killed:
            assert step < 6
    opened = Bundle.open(bundle.path)
    assert read_quality(bundle.path, opened.manifest) in (None, figures, replace(figures, top5=0.5))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (100 << 20, "it has 104857600 bytes, wanted at most"),
        (b'{"text": "%s"}' % (b"x" * (16 << 20)), "at most 1048576 are taken"),
        (b'{"text": "a\x00b"}', "is not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"", "holds no prompts"),
    ],
    ids=["large", "a long line", "NUL", "bytes", "empty"],
)
def test_hostile_prompt_files_are_refused(tmp_path, content, words):
    file = tmp_path / "prompts.jsonl"
    with file.open("wb") as opened:
        if isinstance(content, int):
            opened.truncate(content)
        else:
            opened.write(content)
    with pytest.raises(RequestError, match=words):
        TaskSet.read(file)


def test_prompts_behind_the_calibration_are_taken(bundle):
    found = TaskSet.held_out(bundle)
    assert found.origin.startswith("calib/robot_planning.jsonl from prompt ")
    assert 60 < len(found.tasks) < 107
    manifest = replace(bundle.manifest, tokenizer=False)
    without = Bundle.staged(bundle.path, manifest)
    assert TaskSet.held_out(without).origin == "random ids (no tokenizer)"


def test_memory_and_work_bound_the_tokens(monkeypatch):
    from edge_dflash.model.registry import read_pair

    monkeypatch.setattr(module, "TOKENS", 2048)
    pair = read_pair(Path("tests/configs/qwen3.6-27b/target"), None).text_only
    passes = Passes.of(pair)
    tokens = module.most_tokens(passes, "fp8", "cpu")
    assert 200 < tokens < 2048
    variants = all_variants(passes, "fp8", tokens)
    flop, memory = module.demand(passes, variants)
    assert memory <= 8e9
    assert sum(flop) <= 1.1 * module.FLOP["cpu"]
