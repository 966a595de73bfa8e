"""What pyproject.toml says of the package agrees with the tree."""

from __future__ import annotations

import tomllib
from pathlib import Path

import edge_dflash
from edge_dflash.common import files

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def test_every_package_of_the_tree_is_shipped():
    tree = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "edge_dflash").rglob("__init__.py")}
    data = {f"edge_dflash._data.{name}" for name in files.FOLDERS}
    assert set(SETUPTOOLS["packages"]) == tree | data


def test_every_data_folder_is_shipped_from_the_root():
    assert SETUPTOOLS["package-dir"] == {f"edge_dflash._data.{name}": name for name in files.FOLDERS}


def test_every_file_that_is_not_code_matches_a_pattern():
    """A new kind of data file must be added to package-data, or wheels lack it."""
    shipped, found = set(), set()
    for package in SETUPTOOLS["packages"]:
        folder = ROOT / SETUPTOOLS["package-dir"].get(package, package.replace(".", "/"))
        for pattern in SETUPTOOLS["package-data"].get(package, []):
            shipped |= set(folder.glob(pattern))
        depth = ("*",) if "_data" in package else ("*", "*/*", "*/*/*")  # bundles may lie in folders of engines/
        found |= {path for pattern in depth for path in folder.glob(pattern) if path.is_file()}
    code = {path for path in found if path.suffix in (".py", ".pyc")}
    assert found - code == shipped


def test_version_is_one():
    assert PROJECT["project"]["version"] == edge_dflash.__version__


def test_run_time_needs_no_torch():
    assert not [name for name in PROJECT["project"]["dependencies"] if "torch" in name]
    assert PROJECT["project"]["optional-dependencies"]["build"] == ["torch>=2.11,<2.14"]


def test_a_robot_gets_the_bindings_of_the_driver_and_no_compiler():
    extras = PROJECT["project"]["optional-dependencies"]
    installed = [
        *PROJECT["project"]["dependencies"],
        *extras["cuda"],
        *extras["serve"],
        *extras["images"],
        *extras["robot"],
    ]
    assert extras["robot"][0] == "edge-dflash[cuda,serve,images]"
    assert [name for name in installed if name.startswith(("cuda", "nvidia"))] == ["cuda-bindings==13.*"]
    assert extras["compile"] == ["edge-dflash[cuda]", "nvidia-cuda-nvrtc==13.*"]


def test_licence_is_apache_2():
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_a_plugin_that_warns_of_parallel_tests_does_not_end_them():
    """pytest-benchmark, where somebody has it, warns under -n, and warnings are errors."""
    options = PROJECT["tool"]["pytest"]["ini_options"]
    assert options["filterwarnings"] == ["error"]
    assert "-p no:benchmark" in options["addopts"]
