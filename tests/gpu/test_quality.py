"""Quality measured on a GPU: the stream there gives the figures of the CPU, and native kernels lose next to nothing."""

import json

import pytest
import torch
from cli_support import last_json
from native_backend_support import DEMO
from native_linear_support import cubin
from quality_support import Changed, rounded, sensitivities, source, task_texts

from edge_dflash.builder import write as builder
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.quality.measure import Stores

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA")
def test_the_stream_on_a_gpu_gives_the_figures_of_the_cpu():
    store, pair = source()
    stores = Stores(store, Changed(store, rounded(pair)), "fp8")
    one, other = (sensitivities(stores, pair, task_texts(), device=device) for device in ("cpu", "cuda"))
    assert one.keys() == other.keys()
    for name, figures in one.items():
        assert other[name].kld.mean == pytest.approx(figures.kld.mean, rel=0.02), name
        assert other[name].perplexity.bundle == pytest.approx(figures.perplexity.bundle, rel=1e-3)


def test_a_native_bundle_is_measured_by_its_kernels(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(builder, "compile_cubin", cubin)
    bundle, prompts = tmp_path / "bundle", tmp_path / "prompts.jsonl"
    build(BuildConfig(DEMO / "target", DEMO / "drafter", bundle, arch="sm90", backend="native", max_context=512))
    prompts.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in task_texts()))
    quick = ("--count", 1, "--max-new-tokens", 8, "--prompts", prompts, "--json")
    code, out, err = cli("verify", bundle, "--quality", DEMO / "target", *quick)
    assert code == 0, err
    found = last_json(out)["quality"]
    assert found["backend"]["name"] == "native"
    assert found["backend"]["against_reference"]["kld"]["mean"] < 2e-3
    assert found["backend"]["kld"]["mean"] < found["kld"]["mean"] + 5e-3
