"""What is put together for a bundle and for a synthetic pair, on a device that only keeps time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmark_support import SHAPE, Clock, TimedBackend, device

from edge_dflash.backends.cuda import compile as kernels
from edge_dflash.backends.cuda.compile import ARCHS, KERNELS
from edge_dflash.bench import subjects
from edge_dflash.bench.device import cubins
from edge_dflash.bench.subjects import Prompts, bench_bundle, bench_synthetic
from edge_dflash.bench.workload import Workload
from edge_dflash.board.archs import find_arch
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.errors import BackendError, BuildError, RequestError
from edge_dflash.planner import Planner

WORK = Workload(context=64, tokens=20, prefill=(32,))


@pytest.fixture
def native(monkeypatch, ids_bundle):
    """A bundle that says it is native, opened on a fake device; returns its backend and what was said."""
    backend, said = TimedBackend(Clock().install(monkeypatch)), []
    manifest = replace(read_manifest(ids_bundle), backend="native", arch="sm90a")

    def opened(path, *, self_test, fallback, drafter, lanes):
        assert lanes is None  # as many as the bundle says
        assert drafter
        assert self_test == "off"
        assert not fallback  # cycles that draft are what is timed
        return Planner(backend, None, fallback=fallback)

    monkeypatch.setattr(subjects, "read_manifest", lambda path: manifest)
    monkeypatch.setattr(subjects.Planner, "open", opened)
    monkeypatch.setattr(subjects, "probe_device", lambda folder, say: (device(), str.encode))
    return SimpleNamespace(backend=backend, said=said, path=ids_bundle)


def asking(prompt):
    return lambda planner: Prompts("a test", [prompt])


def test_a_native_bundle_is_timed_against_its_own_bytes(native):
    prompts = [[1] * n for n in (10, 20, 30, 40, 50)]
    found = bench_bundle(native.path, lambda planner: Prompts("a test", prompts), WORK, say=native.said.append)
    assert found.prompts == "4 of a test"
    assert found.schema is None  # no tokenizer
    assert found.backend == "native"
    assert found.pair == str(native.path)
    assert found.cycle.whole.floor_ms > 0
    assert sum(found.cycle.verify_traffic.weights.values()) > 0
    assert found.forced_accept_length is None
    assert found.memory.allocations_after_load == 0
    assert 50 not in native.backend.lengths  # four prompts are enough


def test_an_accept_length_is_forced_on_a_native_bundle(native):
    work = replace(WORK, accept_length=3.0)
    found = bench_bundle(native.path, asking([1, 2, 3]), work, say=native.said.append)
    assert found.speculative.accept_length == pytest.approx(3.0)
    block = read_manifest(native.path).pair.block_size
    with pytest.raises(RequestError, match=rf"is outside 1\.\.{block}"):
        bench_bundle(native.path, asking([1]), replace(WORK, accept_length=block + 1.0), say=print)


def test_without_a_compiler_a_native_bundle_is_timed_without_floors(native, monkeypatch):
    def no_compiler(folder, say):
        raise BuildError("compiling kernels needs NVRTC; install it")

    monkeypatch.setattr(subjects, "probe_device", no_compiler)
    found = bench_bundle(native.path, asking([1, 2, 3]), WORK, say=native.said.append)
    assert found.read_bandwidth is None
    assert found.cycle.whole.bytes > 0
    assert found.cycle.whole.over_floor is None
    assert any("no floors: the device's read bandwidth cannot be measured: compiling" in line for line in native.said)


def test_without_a_gpu_the_bundle_is_named(native, monkeypatch):
    def no_driver(folder, say):
        raise BackendError("no NVIDIA driver was found (X); install the driver")

    monkeypatch.setattr(subjects, "probe_device", no_driver)
    with pytest.raises(BackendError, match="bundle was built for sm90a: no NVIDIA driver was found"):
        bench_bundle(native.path, asking([1]), WORK, say=native.said.append)


def test_a_synthetic_pair_is_loaded_with_room_for_all_that_is_asked(monkeypatch):
    import edge_dflash.backends.cuda.backend as native_backend

    clock, made = Clock().install(monkeypatch), {}

    def backend(pair, weights, precision, *, cubin, max_context, prefill_chunk, lanes):
        made.update(formats=weights.formats, kv=precision.kv, prefill_chunk=prefill_chunk, lanes=lanes)
        sizes = {"vocab_size": pair.target.vocab_size, "block_size": pair.block_size, "drafts": pair.drafts}
        shape = replace(SHAPE, max_context=max_context, **sizes)
        return TimedBackend(clock, shape)

    monkeypatch.setattr(native_backend, "NativeBackend", backend)
    monkeypatch.setattr(subjects, "probe_device", lambda folder, say: (device(), str.encode))
    monkeypatch.setattr(subjects, "device_sm", lambda: 90)
    work = Workload(context=512, tokens=64, prefill=(128, 2048), contexts=(1024, 4096))
    said = []
    found = bench_synthetic("qwen3-8b", "bf16", work, say=said.append)
    assert found.speculative.accept_length == pytest.approx(5)  # unless another one is asked for
    assert found.pair == "qwen3-8b, random weights"
    assert [row.tokens for row in found.prefill] == [128, 2048]
    assert [1024 < found.contexts[0].context < 1200, 4096 < found.contexts[1].context < 4300] == [True, True]
    assert not any("do not fit" in line for line in said)
    assert made["kv"] == "fp8"
    assert made["prefill_chunk"] == find_arch("sm90").most_rows
    assert set(made["formats"].values()) == {"bf16"}
    assert found.cycle.whole.bytes > 16e9
    assert found.prompts == "512 random ids"
    assert found.schema.schema == "endless steps of an action (8) and a target (24 names)"
    assert found.schema.replaced > 0.9  # drafts of ones are none
    assert found.schema.accept_length >= 1


def test_every_arch_has_a_device_and_others_are_refused():
    for arch in ARCHS:
        assert cubins(Path(), int(arch.removeprefix("sm").removesuffix("a"))).keywords["arch"] == arch
    with pytest.raises(BackendError, match="this GPU is SM75; the kernels are built for sm87, sm89"):
        cubins(Path(), 75)


def test_a_cubin_is_compiled_once_and_again_when_its_source_changes(monkeypatch, tmp_path):
    compiled, sources = [], tmp_path / "kernels"
    sources.mkdir()
    (sources / "bench.cu").write_bytes((KERNELS / "bench.cu").read_bytes())
    monkeypatch.setattr(kernels, "compile_cubin", lambda unit, arch: compiled.append((unit, arch)) or b"cubin")
    monkeypatch.setattr(kernels, "unit_sources", lambda unit: (sources / f"{unit}.cu",))
    for _ in range(2):
        assert cubins(tmp_path / "cache", 90)("bench") == b"cubin"
    assert compiled == [("bench", "sm90a")]
    (sources / "bench.cu").write_text("// another")
    cubins(tmp_path / "cache", 90)("bench")
    cubins(tmp_path / "cache", 87)("bench")
    assert compiled == [("bench", "sm90a")] * 2 + [("bench", "sm87")]
    assert all(file.suffix == ".cubin" for file in (tmp_path / "cache").iterdir())
