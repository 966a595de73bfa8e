from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

import edge_dflash
from edge_dflash import errors

PUBLIC = [
    "AsyncPlanStream",
    "BackendError",
    "BuildError",
    "Bundle",
    "BundleError",
    "CheckpointError",
    "ConfigError",
    "ContextError",
    "DeviceLostError",
    "EdgeDflashError",
    "EngineFailedError",
    "ImageError",
    "Increment",
    "MalformedToolCall",
    "Plan",
    "PlanOptions",
    "PlanStream",
    "PlanTimings",
    "Planner",
    "PlannerSession",
    "QueueFullError",
    "RecipeError",
    "Relaxation",
    "RemotePlanner",
    "RemoteSession",
    "RequestCancelledError",
    "RequestError",
    "Score",
    "ServiceError",
    "StorageError",
    "TokenLogprob",
    "ToolCall",
    "UnsupportedModelError",
    "VerificationError",
    "__version__",
]


def test_the_public_names_are_these():
    assert sorted(edge_dflash.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(edge_dflash, name) is not None


def test_every_error_is_public():
    tree = {n for n, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert tree <= set(edge_dflash.__all__)


def imported(code: str) -> list[str]:
    code += "; import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_package_does_not_import_torch():
    assert "torch" not in imported("import edge_dflash")


def test_the_planner_imports_no_yaml_and_no_torch():
    assert not {"yaml", "torch", "typer", "starlette", "llguidance"} & set(imported("import edge_dflash.planner"))


def test_what_a_robot_runs_imports_no_safetensors():
    """Files of tensors are read by our own reader; only training writes them with the library."""
    block = "import sys; sys.modules['safetensors'] = None; sys.modules['torch'] = None; import edge_dflash.cli as c; "
    code = "import edge_dflash.planner, edge_dflash.serve.app, edge_dflash.cli.verify; c.main(['doctor', '--json'])"
    done = subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, check=False)
    assert '"checks"' in done.stdout, done.stderr


def test_importing_the_package_and_its_command_line_needs_no_extra():
    extras = {"starlette", "uvicorn", "prometheus_client", "httpx2"}
    for module in ("edge_dflash", "edge_dflash.cli"):
        assert not extras & set(imported(f"import {module}"))


@pytest.mark.parametrize(
    ("missing", "code", "extra"),
    [
        ("uvicorn", "import edge_dflash.cli as c; c.main(['serve', 'bundle'])", "serve"),
        ("prometheus_client", "import edge_dflash.cli as c; c.main(['serve', 'bundle'])", "serve"),
        ("httpx2", "import edge_dflash; edge_dflash.Planner.connect('http://localhost:1')", "client"),
    ],
)
def test_a_missing_extra_is_named(missing, code, extra):
    code = f"import sys; sys.modules[{missing!r}] = None; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"{missing} is missing; install it with: pip install 'edge-dflash[{extra}]'" in done.stderr


def test_a_name_is_imported_when_it_is_used():
    assert "edge_dflash.planner" not in imported("import edge_dflash")
    assert "edge_dflash.planner" in imported("from edge_dflash import Planner")
    with pytest.raises(AttributeError, match="module 'edge_dflash' has no attribute 'Planer'"):
        _ = edge_dflash.Planer
    found = {}
    exec("from edge_dflash import *", found)
    assert set(PUBLIC) <= set(found)


@pytest.mark.parametrize("argv", [["--version"], ["--help"], []])
def test_the_list_of_commands_needs_none_of_them(argv):
    loaded = imported(f"import edge_dflash.cli as c; c.run({argv})")
    assert not {"numpy", "rich.table", "edge_dflash.planner", "edge_dflash.cli.demo"} & set(loaded)


def test_a_terminal_shows_that_a_command_starts_before_it_is_imported(monkeypatch, capsys):
    from edge_dflash import cli

    def load(name):
        assert capsys.readouterr().err == "starting\r"
        return import_module(name)

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(cli, "import_module", load)
    assert cli._Commands(cli.COMMANDS)["doctor"] is not None
    assert capsys.readouterr().err == "        \r"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    monkeypatch.setattr(cli, "import_module", import_module)
    assert cli._Commands(cli.COMMANDS)["doctor"] is not None
    assert capsys.readouterr().err == ""


def test_the_command_line_imports_torch_only_when_it_is_needed():
    assert "torch" not in imported("import edge_dflash.cli")
