from __future__ import annotations

import pytest

from edge_dflash.common import files
from edge_dflash.errors import EdgeDflashError


def test_folders_of_the_checkout_are_found():
    for name in files.FOLDERS:
        assert files.directory(name).is_dir()
    assert (files.directory("jetson") / "agx-thor.yaml").is_file()


def test_an_installed_package_has_its_own_copy_and_prefers_it(tmp_path):
    package = tmp_path / "site-packages" / "edge_dflash"
    inside = package / "_data" / "jetson"
    inside.mkdir(parents=True)
    (package.parent / "jetson").mkdir()  # of somebody else
    assert files.find("jetson", package) == inside


def test_an_unknown_folder_is_refused_with_the_names():
    with pytest.raises(EdgeDflashError, match="'boards'; there are calib, deploy, engines, jetson"):
        files.directory("boards")


def test_a_lost_folder_names_the_remedy(tmp_path):
    with pytest.raises(EdgeDflashError, match="install edge-dflash again"):
        files.find("calib", tmp_path / "edge_dflash")
