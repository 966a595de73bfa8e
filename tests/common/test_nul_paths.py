"""A path with a NUL, wherever one is taken: an error in one line, and nothing made of what stands before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import SHAPE, FakeBackend

from edge_dflash import EdgeDflashError, Planner
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import ConfigError, RequestError
from edge_dflash.install.service import InstallOptions, install, remove, rollback
from edge_dflash.runner.recording import Recording
from edge_dflash.serve.config import ServeConfig, load_config
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.recipe import load_recipe

KINDS = [str, Path]


@pytest.fixture
def nul(tmp_path):
    """Ends in a NUL, and what stands before it can be made."""
    yield str(tmp_path / "made") + "\0x"
    assert list(tmp_path.iterdir()) == []


def refused(call, kind=EdgeDflashError):
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_planner(nul, kind):
    path = kind(nul)
    refused(lambda: Planner.open(path))
    for record in (path, Recording(path)):
        refused(lambda record=record: Planner(FakeBackend(SHAPE), None, [], record=record), RequestError)
    with Planner(FakeBackend(SHAPE), None, []) as planner, planner.session() as session:
        session.plan((3, 1, 4), max_new_tokens=2)
        refused(lambda: session.save(path), RequestError)
        refused(lambda: planner.load_session(path), RequestError)


@pytest.mark.parametrize("path", ["", "/", ".", 5, None, b"/tmp/x", "x\0", "\0"])
def test_what_is_no_path_of_a_file_is_refused_by_name(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with Planner(FakeBackend(SHAPE), None, []) as planner, planner.session() as session:
        session.plan((3, 1, 4), max_new_tokens=2)
        with pytest.raises(RequestError, match=r"^path is "):
            session.save(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["unix:{}", "http+unix://{}", "http://a{}:80", "https://a\n{}"])
def test_of_an_address(nul, url):
    quoted = nul.replace("/", "%2F").replace("\0", "%00") if url.startswith("http+") else nul
    refused(lambda: Planner.connect(url.format(quoted)))


@pytest.mark.parametrize("field", ["target", "drafter", "output", "recipe"])
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_build(nul, tmp_path, field, kind, demo_bundle):
    given = {"target": demo_bundle, "drafter": None, "output": tmp_path / "out", field: kind(nul)}
    refused(lambda: build(BuildConfig(**given)), RequestError)


def test_of_a_training(nul, tmp_path, demo_bundle):
    run = pytest.importorskip("edge_dflash.training.run")
    settings = pytest.importorskip("edge_dflash.training.settings")
    given = {"target": demo_bundle, "data": (tmp_path / "x",), "output": tmp_path / "out", "steps": 1}
    for field in ("target", "data", "output", "drafter", "recipe"):
        path = (Path(nul),) if field == "data" else Path(nul)
        refused(lambda field=field, path=path: run.train_drafter(settings.TrainingRun(**{**given, field: path})))


def test_of_an_installation(nul, tmp_path, demo_bundle):
    path, options = Path(nul), InstallOptions(start=False)
    refused(lambda: install(path, tmp_path / "root", options))
    refused(lambda: install(demo_bundle, path, options))
    refused(lambda: install(demo_bundle, tmp_path / "root", options, program=path))
    refused(lambda: rollback(path))
    refused(lambda: remove(path))


@pytest.mark.parametrize("read", [Bundle.open, Tokenizer.open, load_recipe, load_config])
def test_of_what_is_read(nul, read):
    refused(lambda: read(Path(nul)))


@pytest.mark.parametrize("key", ["bundle", "model", "socket", "state_dir", "api_key_file", "tcp", "socket_mode"])
def test_of_a_configuration(tmp_path, key):
    file = tmp_path / "config.toml"
    file.write_text(f'[service]\n{key} = "{tmp_path}/made\\u0000x"\n')
    refused(lambda: load_config(file), ConfigError)
    with pytest.raises(ConfigError, match=r"service.socket is .*; give a text without NUL"):
        ServeConfig(service=type(ServeConfig().service)(socket="a\0"))
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
