"""What all tests share: where the goldens lie, and a bundle of the demo pair that is built once."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli_support import PAIR
from hypothesis import HealthCheck, settings
from paths import DEMO, GOLDEN, ROOT

from edge_dflash.common.files import directory

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's, before it is loaded; as torch's below
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # how fast is no verdict
settings.load_profile("busy")

if find_spec("torch"):
    import torch

    torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other, worst on a busy machine
else:

    class NoTorch:
        """A robot's install: a test that comes to import torch is skipped, every other must pass."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "torch":
                pytest.skip("needs torch", allow_module_level=True)

    sys.meta_path.insert(0, NoTorch)


SLOW = (  # what begins so takes two thirds of the time
    *("gpu", "demo", "test_readme", "common/test_odd_files", "install/test_service", "text/test_template.py"),
    *("builder/test_write", "training/test_run", "training/test_trainer"),
    *("backends/test_native_attend_wide", "backends/test_native_build", "backends/test_native_experts"),
    *("checks/test_acceptance", "checks/test_expert_bytes", "checks/test_golden.py", "checks/test_lossless"),
    *("cli/test_cli.py", "cli/test_cli_demo_image", "cli/test_cli_ending", "cli/test_cli_errors"),
    *("decode/test_drafters", "decode/test_experts", "decode/test_grammar_processes", "decode/test_lanes.py"),
    *("decode/test_pictured_lossless", "decode/test_sessions", "decode/test_loop"),
    *("model/test_config_keys", "weights/test_mutations"),
    *("runner/test_candidates", "runner/test_planner_calls", "runner/test_planner_schema", "runner/test_session_files"),
    *("serve/test_serve_disk", "serve/test_serve_floods", "serve/test_serve_log", "serve/test_serve_names"),
)


def pytest_collection_modifyitems(items):
    """Mark what ``-m "not slow"`` leaves out, what needs a GPU or TensorRT included."""
    for item in items:
        name = item.path.relative_to(ROOT / "tests").as_posix()
        if name.startswith(SLOW) or item.get_closest_marker("tensorrt"):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores: tests of the service and of other processes mostly wait."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(scope="session", autouse=True)
def _few_measurements():
    """Opening a bundle measures each number of drafts once, and what a build records as its self-test is short."""
    from edge_dflash.decode import drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "REPEATS", 1)
        if not find_spec("torch"):
            yield None
            return
        from edge_dflash.builder import record

        whole = record.NEW_TOKENS
        patch.setattr(record, "NEW_TOKENS", 16)
        yield whole


@pytest.fixture(scope="module")
def whole_recording(_few_measurements):
    """Builds of a module record self-tests as long as everywhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge_dflash.builder.record.NEW_TOKENS", _few_measurements)
        yield


_OPENED: dict = {}  # what self-tests and measurements of this process found


def _once(function, key):
    """``function``, called once for each key of its arguments."""

    def found(*arguments):
        name = function.__name__, key(*arguments)
        if name not in _OPENED:
            _OPENED[name] = function(*arguments)
        return _OPENED[name]

    return found


@pytest.fixture(scope="module")
def opened_once():
    """Opening a bundle again skips its self-test and its measurements: for modules on what is done with it then.

    A bundle is the same one while its files are those of before; other files, and other lanes, are tested anew.
    """
    from edge_dflash.backends import selftest
    from edge_dflash.decode import drafts

    def files(bundle, backend):
        stats = [path.stat() for path in sorted(bundle.path.rglob("*"))]
        return repr(backend.shape), *((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in stats)

    def sizes(backend, lanes=1, limit=0.0):
        return repr(backend.shape), lanes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "replay", _once(selftest.replay, files))
        patch.setattr(drafts, "measure", _once(drafts.measure, sizes))
        yield


@pytest.fixture(scope="session")
def golden() -> Path:
    """Directory of the golden files and of the checkpoints that they were made from."""
    return GOLDEN


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """``shared(name, make)``: the folder that ``make(path)`` made, once for all workers; no test changes it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # which the workers have in common

    def found(name, make):
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (root / name).exists():
                make(root / name)
        return root / name

    return found


@pytest.fixture(scope="session")
def build_demo():
    """A function that builds the demo pair with its recipe."""
    from edge_dflash.builder.write import BuildConfig, build

    models, recipe = DEMO / "models", directory("engines") / "demo-cpu.yaml"
    return lambda output: build(BuildConfig(models / "target", models / "drafter", output, recipe=recipe))


@pytest.fixture(scope="session")
def demo_bundle(shared, build_demo) -> Path:
    """The demo pair, built with its recipe."""
    return shared("demo-bundle", build_demo)


@pytest.fixture
def cli(capsys):
    """Run a command; return exit code, stdout and stderr."""

    from edge_dflash.cli import run

    def call(*argv):
        code = run([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def refused(cli):
    """Run a command that must fail: nothing on stdout, one ``error:`` line on stderr. Returns code and line."""

    def call(*argv):
        code, out, err = cli(*argv)
        lines = [line for line in err.splitlines() if not line.startswith(("warning:", "task:", "building"))]
        assert code != 0
        assert out == ""
        assert len(lines) == 1, err
        assert lines[0].startswith("error: ")
        return code, lines[0]

    return call


@pytest.fixture
def pair(golden, tmp_path):
    """Copies of a target and a drafter checkpoint, to be spoiled."""
    return [shutil.copytree(golden / name, tmp_path / name) for name in PAIR]


@pytest.fixture
def build_pair(pair, tmp_path):
    """The arguments that build the pair."""
    target, drafter = pair
    return ["build", "--target", target, "--drafter", drafter, "--no-calibrate", "--output", tmp_path / "out"]


@pytest.fixture(scope="session")
def ids_bundle(golden, shared):
    """A bundle without tokenizer."""
    from edge_dflash.cli import run

    target, drafter = (golden / name for name in PAIR)
    argv = ["build", "--target", target, "--drafter", drafter, "--no-calibrate", "--output"]

    def make(output):
        assert run([str(word) for word in (*argv, output)]) == 0

    return shared("ids-bundle", make)


@pytest.fixture
def start(tmp_path):
    """What begins services of fake models, each with its client; they end with the test."""
    from service_support import services

    with services(tmp_path) as begin:
        yield begin


@pytest.fixture
def service(tmp_path):
    """A service that is ready, of a model that is a few lines of hashing."""
    from service_support import fake_service

    service = fake_service(tmp_path)
    yield service
    service.close()


@pytest.fixture
def client(service):
    """A client of the service."""
    from service_support import client_of

    with client_of(service) as client:
        yield client
