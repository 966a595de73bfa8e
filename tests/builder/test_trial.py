"""``build --finish`` of a bundle with two backends: both at the same work, the faster and the figures kept."""

import json
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from builder_support import digests
from cli_support import last_json
from fakes import FakeBackend
from tensorrt_build_support import config, fake, fake_tools, install, on

from edge_dflash.backends.cuda.support import DeviceFacts
from edge_dflash.bench.provenance import identity
from edge_dflash.builder import finish as finish_module
from edge_dflash.builder import finish as trial_module
from edge_dflash.builder.finish import finish
from edge_dflash.builder.write import build
from edge_dflash.bundle.manifest import Trial, dump_manifest, parse_manifest
from edge_dflash.bundle.reader import Bundle, read_manifest
from edge_dflash.checks.doctor import BundleFacts, Facts, engines
from edge_dflash.decode.shape import PairShape
from edge_dflash.errors import BackendError, BuildError, BundleError, VerificationError

__all__ = ["fake"]
JETPACK = "10.13.3.9"
SHAPE = PairShape(vocab_size=1024, block_size=16, mask_token_id=5, max_context=64, prefill_chunk=64, drafts=15)


class Timed(FakeBackend):
    """A backend whose verify takes some time of a clock, and that remembers what it was asked."""

    def __init__(self, board, name):
        super().__init__(SHAPE)
        self.board, self.name, self.asked = board, name, []
        self.wrong = name in board.wrong

    def prefill(self, ids, lane=0, sight=None):
        self.asked.append(("prefill", tuple(ids)))
        self.board.now += 10 * self.board.seconds[self.name]
        return super().prefill(ids, lane, sight)

    def _logits(self, context):
        return super()._logits([*context, 7] if self.wrong else context)

    def propose(self, anchor, lane=0):
        self.asked.append(("cycle", self.length(), anchor))
        return super().propose(anchor, lane)

    def verify(self, ids, lane=0, parents=None):
        self.board.now += self.board.seconds[self.name]
        return super().verify(ids, lane)


class Board:
    """The device of the tests: backends by name, with seconds a cycle, or the error of one that cannot be loaded."""

    def __init__(self):
        self.now, self.seconds, self.loaded, self.errors = 0.0, {"native": 0.020, "tensorrt": 0.015}, [], {}
        self.wrong = set()  # names of backends that compute something else

    def load(self, bundle, name):
        if name in self.errors:
            raise self.errors[name]
        assert all(backend.closed for backend in self.loaded)  # memory for one at a time
        self.loaded.append(Timed(self, name))
        return self.loaded[-1]


@pytest.fixture(scope="module")
def deferred(tmp_path_factory, whole_recording):
    """For which no self-test is recorded: its context is too short."""
    with pytest.MonkeyPatch.context() as patch:
        fake_tools(patch)
        output = tmp_path_factory.mktemp("trial") / "out"
        return build(config(output, arch="sm110", backend=None, max_context=64)).bundle


@pytest.fixture
def bundle(deferred, tmp_path):
    return shutil.copytree(deferred, tmp_path / "bundle")


@pytest.fixture
def board(fake, monkeypatch):
    made = Board()
    on(monkeypatch, 110)
    install(monkeypatch, JETPACK)
    monkeypatch.setattr(trial_module, "load", made.load)
    monkeypatch.setattr(trial_module, "time", SimpleNamespace(perf_counter=lambda: made.now, monotonic=time.monotonic))
    monkeypatch.setattr(trial_module, "device_facts", lambda: DeviceFacts("NVIDIA Thor", 110, (13, 0), True))
    return made


def test_both_are_timed_at_the_same_work_and_the_faster_runs(board, bundle):
    seen = []
    weights = {name: digest for name, digest in digests(bundle).items() if name.startswith("weights/")}
    result = finish(bundle, lambda *step: seen.append(step))
    manifest = Bundle.open(bundle).manifest
    assert (manifest.backend, manifest.standby) == ("tensorrt", ("native",))
    assert manifest.trial == Trial(
        "NVIDIA Thor",
        24,
        20,
        {"native": pytest.approx(20.0), "tensorrt": pytest.approx(15.0)},
        {"native": pytest.approx(200.0), "tensorrt": pytest.approx(150.0)},
        {},
    )
    one, other = board.loaded
    assert (one.name, other.name) == ("native", "tensorrt")
    assert one.asked == other.asked
    assert [step[1] for step in one.asked if step[0] == "cycle"] == list(range(24, 48))
    assert one.closed
    assert other.closed
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == ["checking", "plans", "timing"]
    assert weights.items() <= digests(bundle).items()
    assert (result.active, result.trial, result.nothing) == ("tensorrt", manifest.trial, "")
    assert result.bytes == sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())


def test_kernels_stay_where_they_are_not_slower(board, bundle):
    board.seconds["tensorrt"] = board.seconds["native"]
    assert finish(bundle).active == "native"
    manifest = read_manifest(bundle)
    assert (manifest.backend, manifest.standby) == ("native", ("tensorrt",))
    assert manifest.trial.cycle_ms.keys() == {"native", "tensorrt"}


@pytest.mark.parametrize(
    "error",
    [BackendError("TensorRT says no memory"), VerificationError("self-test of b failed: the target is another")],
)
def test_a_backend_that_cannot_run_is_not_used_and_is_tried_again(board, bundle, error):
    board.errors["tensorrt"] = error
    result = finish(bundle)
    assert (result.active, result.warnings) == ("native", (f"tensorrt is not used: {error}",))
    trial = read_manifest(bundle).trial
    assert (set(trial.cycle_ms), trial.failed) == ({"native"}, {"tensorrt": str(error)})
    board.errors.clear()
    assert finish(bundle).active == "tensorrt"


def test_a_backend_with_other_tokens_is_not_taken_however_fast_it_is(board, bundle):
    board.wrong.add("tensorrt")
    finish(bundle)
    manifest = Bundle.open(bundle).manifest
    assert (manifest.backend, set(manifest.trial.cycle_ms)) == ("native", {"native"})
    assert "of its tokens are those of the other backend" in manifest.trial.failed["tensorrt"]


def test_when_none_runs_the_bundle_keeps_its_new_plans_and_the_figures_are_missing(board, bundle):
    board.errors |= {"tensorrt": BackendError("no"), "native": BackendError("neither")}
    with pytest.raises(BackendError, match="no backend runs here: neither; no"):
        finish(bundle)
    manifest = Bundle.open(bundle).manifest
    assert (manifest.backend, manifest.plans.deferred, manifest.trial) == ("native", (), None)


def test_a_second_finish_has_nothing_to_do(board, bundle, cli):
    code, out, _ = cli("build", "--finish", bundle)
    assert code == 0
    assert out.startswith(f"built {bundle}: ")
    assert "native 20 ms a cycle, tensorrt 15 ms a cycle: tensorrt runs it" in out
    found, made = digests(bundle), len(board.loaded)
    code, out, _ = cli("build", "--finish", bundle)
    assert (code, out) == (0, f"nothing to do for {bundle}: its plans are those of TensorRT {JETPACK}\n")
    _, out, _ = cli("build", "--finish", bundle, "--json")
    assert last_json(out)["nothing_to_do"] == f"its plans are those of TensorRT {JETPACK}"
    assert last_json(out)["active"] == "tensorrt"
    assert (digests(bundle), len(board.loaded)) == (found, made)


def test_a_bundle_without_plans_says_that_there_is_nothing_to_do(fake, tmp_path, cli):
    made = build(config(tmp_path / "out", arch="sm87", backend=None)).bundle
    code, out, _ = cli("build", "--finish", made)
    assert (code, out) == (0, f"nothing to do for {made}: native runs it, and there are no plans to build\n")


def test_another_tensorrt_is_timed_again(board, bundle, monkeypatch):
    finish(bundle)
    board.seconds["tensorrt"] = 0.030
    install(monkeypatch, "10.16.2.10")
    assert finish(bundle).active == "native"
    assert read_manifest(bundle).trial.cycle_ms["tensorrt"] == pytest.approx(30.0)


def test_plans_that_were_built_elsewhere_are_timed_on_the_device(board, tmp_path, monkeypatch):
    install(monkeypatch, "1.7.1.116")
    made = build(config(tmp_path / "out", backend=None)).bundle
    on(monkeypatch, None)
    with pytest.raises(BackendError, match="its backends are timed on a device of SM 121, and here is none"):
        finish(made)
    assert read_manifest(made).trial is None
    on(monkeypatch, 121)
    assert finish(made).active == "tensorrt"
    assert board.loaded


def test_another_machine_is_refused_before_any_work(board, bundle, monkeypatch, refused):
    on(monkeypatch, 90)
    before = digests(bundle)
    code, line = refused("build", "--finish", bundle)
    assert code == BackendError.exit_code
    assert "its plans are built on a device of SM 110, this one is SM 90" in line
    assert digests(bundle) == before


def test_a_kill_while_the_figures_are_written_leaves_a_bundle(board, bundle, monkeypatch):
    def killed(path, target):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(finish_module.Path, "replace", killed)
        patch.setattr(finish_module, "_finish", lambda path, manifest, plans, report: (manifest, ()))
        with pytest.raises(SystemExit):
            finish(bundle)
    Bundle.open(bundle)
    assert finish(bundle).active == "tensorrt"
    assert not bundle.with_name("bundle.manifest").exists()


def test_inspect_shows_both_figures(board, bundle, cli):
    _, out, _ = cli("inspect", bundle)
    assert "built by edge-dflash 0.1.0 for --backend native,tensorrt --arch sm110" in out
    assert f"native runs it; 14 plans are yet to be built: edge-dflash build --finish {bundle} on the board" in out
    assert "memory of Jetson AGX Thor" in out
    finish(bundle)
    _, out, _ = cli("inspect", bundle)
    assert (
        "tensorrt runs it: native 20 ms a cycle, tensorrt 15 ms a cycle (20 cycles behind 24 tokens on NVIDIA Thor)"
        in out
    )
    _, out, _ = cli("inspect", bundle, "--json")
    found = last_json(out)
    assert (found["backend"], found["backends"]) == ("tensorrt", ["native", "tensorrt"])
    assert found["trial"]["cycle_ms"] == {"native": pytest.approx(20), "tensorrt": pytest.approx(15)}


def test_doctor_and_report_carry_the_figures(board, bundle):
    def judged():
        held = BundleFacts(bundle, read_manifest(bundle), None, 0, False)
        return engines(Facts(tensorrt={"tensorrt": "10.13.3"}, bundle=held))

    check = judged()
    assert (check.status, check.found) == ("warn", "14 of 14 plans are yet to be built; native runs")
    assert f"build --finish {bundle} on this board" in check.remedy
    finish(bundle)
    check = judged()
    assert check.status == "ok"
    assert check.found.endswith("native 20 ms a cycle, tensorrt 15 ms a cycle: tensorrt runs")
    report = json.loads(json.dumps(identity(bundle, read_manifest(bundle))))
    assert (report["backend"], report["backends"]) == ("tensorrt", ["native", "tensorrt"])
    assert report["trial"]["cycle_ms"]["native"] == pytest.approx(20)


def test_a_trial_of_another_backend_is_refused(board, bundle):
    finish(bundle)
    manifest = read_manifest(bundle)
    trial = replace(manifest.trial, cycle_ms={"native": 1.0})
    with pytest.raises(BundleError, match="trial has no figure of tensorrt among two backends"):
        parse_manifest(dump_manifest(replace(manifest, trial=trial)))


def test_an_interrupt_while_timing_says_how_to_resume(board, bundle):
    def interrupt(stage, done, total):
        if stage == "timing":
            raise KeyboardInterrupt

    with pytest.raises(BuildError, match=f"resume with: edge-dflash build --finish {bundle}"):
        finish(bundle, interrupt)
    assert Bundle.open(bundle).manifest.plans.version == JETPACK
    assert finish(bundle).active == "tensorrt"
