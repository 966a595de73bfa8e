"""What all tests share: where the goldens lie, and a bundle of the demo pair that is built once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edge_dflash.resources import directory

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "edge_dflash" / "demo"

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other, worst on a busy machine


@pytest.fixture(scope="session")
def golden() -> Path:
    """Directory of the golden files and of the checkpoints that they were made from."""
    return Path(__file__).resolve().parent / "golden"


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory) -> Path:
    """The demo pair, built with its recipe."""
    from edge_dflash.build.builder import BuildConfig, build

    output = tmp_path_factory.mktemp("demo") / "demo-bundle"
    recipe = directory("engines") / "demo-cpu.yaml"
    build(BuildConfig(DEMO / "models" / "target", DEMO / "models" / "drafter", output, recipe=recipe))
    return output
