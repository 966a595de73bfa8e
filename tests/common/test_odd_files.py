"""Whatever a model directory, a recipe or a bundle holds under a known name: one line, soon, and nothing is made."""

import shutil
import signal
from pathlib import Path

import pytest
from odd_files import BUNDLES, CONFIGS, LONG, RECIPES, TENSORS, put

from edge_dflash.common import files
from edge_dflash.errors import RecipeError
from edge_dflash.weights.recipe import load_recipe

MOST_SECONDS = 60  # of this process's own time, which others on the machine take nothing of; each takes below 2 s
HUNG = 600  # seconds, whatever the machine does: it waits for something


@pytest.fixture(autouse=True)
def soon():
    """Nothing is waited for: what blocks or does not end is interrupted, which fails the test."""

    def late(number, frame):
        raise TimeoutError(f"not done after {MOST_SECONDS} s of work, or {HUNG} s")

    limits = ((signal.SIGPROF, signal.ITIMER_PROF, MOST_SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, HUNG))
    before = [signal.signal(number, late) for number, _, _ in limits]
    for _, timer, seconds in limits:
        signal.setitimer(timer, seconds)
    yield
    for (number, timer, _), handler in zip(limits, before, strict=True):
        signal.setitimer(timer, 0)
        signal.signal(number, handler)


@pytest.mark.parametrize("name", CONFIGS)
def test_odd_configs_are_refused_by_every_command(refused, build_pair, pair, tmp_path, name):
    CONFIGS[name](*pair)
    for argv in (build_pair, ["inspect", *build_pair[1:5]]):
        code, line = refused(*argv)
        assert code == 3
        assert len(line) < 600
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", TENSORS)
def test_odd_tensor_files_make_no_bundle(refused, build_pair, pair, tmp_path, monkeypatch, name):
    TENSORS[name](*pair)
    code, line = refused(*build_pair)
    assert code == (5 if name.startswith("other.") else 3)
    assert len(line) < 600
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", RECIPES)
def test_odd_recipes_make_no_bundle(refused, build_pair, pair, tmp_path, name):
    body = RECIPES[name]
    recipe = tmp_path / "r.yaml"
    recipe.write_bytes(body if isinstance(body, bytes) else body.encode())
    for argv in (build_pair, ["inspect", *build_pair[1:5]]):
        code, line = refused(*argv, "--recipe", recipe)
        assert code == 4
        assert len(line) < 600
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["FIFO", "directory", "socket", "/dev/zero", "loop"])
def test_a_recipe_that_is_no_file_is_not_waited_for(refused, build_pair, tmp_path, kind):
    put(tmp_path / "r.yaml", kind)
    code, line = refused(*build_pair, "--recipe", tmp_path / "r.yaml")
    assert code == 4
    assert "no recipe file" in line


@pytest.mark.parametrize("name", ['"a\\0b"', LONG])
def test_a_calibration_file_that_no_file_system_has(tmp_path, name):
    (tmp_path / "r.yaml").write_text(f"schema: 1\nname: x\ncalibration: {{file: {name}}}")
    with pytest.raises(RecipeError, match="neither in calib/ nor beside the recipe"):
        _ = load_recipe(tmp_path / "r.yaml").calibration.path


@pytest.mark.parametrize("name", BUNDLES)
def test_odd_bundles_are_refused(refused, ids_bundle, tmp_path, name):
    bundle = shutil.copytree(ids_bundle, tmp_path / "bundle")
    BUNDLES[name](bundle)
    commands = [["generate", bundle, "--ids", "1"]]
    if name.startswith("manifest"):
        commands.append(["inspect", bundle])
    for argv in commands:
        code, line = refused(*argv)
        assert code == 6
        assert len(line) < 600


@pytest.mark.parametrize("kind", ["FIFO", "/dev/zero", "directory", "hole"])
def test_prompts_schemas_and_goldens_that_are_no_files(refused, ids_bundle, pair, tmp_path, kind):
    file = tmp_path / "file"
    put(file, kind)
    assert refused("generate", ids_bundle, "--prompt-file", file)[0] == 8
    assert refused("generate", ids_bundle, "--ids", "1", "--schema", file)[0] == 8
    assert refused("verify", ids_bundle, "--prompts", file)[0] == 8


def test_paths_that_no_file_system_has(refused, build_pair, ids_bundle):
    assert refused("inspect", "--target", LONG, "--drafter", LONG)[0] == 3
    assert refused(*build_pair, "--recipe", LONG)[0] == 4
    assert refused("generate", ids_bundle, "--prompt-file", LONG)[0] == 8
    assert refused("generate", LONG, "--ids", "1")[0] in (1, 6)


def test_reading_is_bounded_and_says_what_is_wrong(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    assert files.read_bytes(file, 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, wanted at most 4"):
        files.read_bytes(file, 4)
    with pytest.raises(OSError, match="it is a device, wanted a regular file"):
        files.read_bytes(Path("/dev/zero"))
    with pytest.raises(OSError, match="NUL"):
        files.read_bytes(Path("a\0"))
    with pytest.raises(FileNotFoundError):
        files.read_bytes(tmp_path / "nowhere")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for kind in ("FIFO", "directory"):
        put(tmp_path / kind, kind)
        with pytest.raises(OSError, match=f"it is a {kind}, wanted a regular file"):
            files.read_text(tmp_path / kind)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    file.write_bytes(b"a\r\nb\rc\n")
    assert files.read_text(file) == "a\nb\nc\n"


@pytest.mark.parametrize(
    "argv",
    [
        ("verify", "BUNDLE", "--report", "/proc/x.json"),
        ("bench", "BUNDLE", "--plot", "/proc/x.svg"),
        ("bench", "BUNDLE", "--record", "/proc/x.json"),
        ("bench", "BUNDLE", "--cubins", "/proc/x/y"),
        ("demo", "--image", "--save", "/proc/x.png"),
        ("demo", "--bundle", "/proc/x/y"),
        ("build", "--target", "TARGET", "--drafter", "DRAFTER", "--output", "/proc/x/y"),
        ("train-drafter", "--target", "TARGET", "--data", "/dev/null", "--output", "/proc/x", "--steps", "1"),
        ("serve", "BUNDLE", "--socket", "/proc/x.sock", "--state-dir", "/proc/x/state"),
        ("service", "install", "BUNDLE", "--root", "/proc/x"),
    ],
    ids=" ".join,
)
def test_outputs_are_tried_before_any_work(refused, ids_bundle, golden, argv, monkeypatch):
    """Nothing is loaded, built or measured for what cannot be written."""

    def work(*given, **named):
        raise AssertionError("work began")

    for place in ("planner.Planner.open", "builder.write._fill", "bundle.reader.hash_file"):
        monkeypatch.setattr(f"edge_dflash.{place}", work)
    paths = {"BUNDLE": ids_bundle, "TARGET": golden / "qwen3_5-tiny", "DRAFTER": golden / "qwen3_5-tiny-dflash"}
    code, line = refused(*(paths.get(word, word) for word in argv))
    assert code not in (0, 2)
    assert "/proc" in line
