"""What cubins say of their kernels, for people and in ``inspect``; what a digest of the kernels covers."""

from types import SimpleNamespace

import pytest
from cli_support import last_json
from cubin_support import CACHE, cubin, kernel_use, need_compiler
from native_support import formats_of, write_native_bundle

from edge_dflash.backends.cuda import compile as kernels
from edge_dflash.backends.cuda.kernels import cycle, sample, small
from edge_dflash.errors import BackendError
from tests.scripts.kernels import main


def test_a_report_names_every_kernel_of_every_arch(capsys):
    need_compiler()
    assert main(["--arch", "sm87", "sm121a", "--unit", "finish", "small", "--cache", str(CACHE)]) == 0
    out = capsys.readouterr().out
    for arch in ("sm87", "sm121a"):
        for unit in ("finish", "small"):
            uses = kernel_use(cubin(unit, arch))
            assert f"{arch} {unit}: " in out
            for name, use in uses.items():
                assert f"{use.registers:9} {use.shared_bytes:7,} {use.stack_bytes:7,}  {name}" in out
                assert 0 < use.registers <= 255
    assert kernel_use(cubin("small", "sm87"))["rms_norm"].shared_bytes == 32  # eight sums of 4 bytes


@pytest.mark.parametrize(
    ("unit", "kernels_of"),
    [(small.UNIT, small.Small), (cycle.UNIT, cycle.CycleKernels), (sample.UNIT, sample.Sampler)],
)
def test_every_kernel_of_a_unit_is_loaded(unit, kernels_of):
    loaded = []
    kernels_of(None, SimpleNamespace(kernel=loaded.append))
    assert sorted(loaded) == sorted(kernel_use(cubin(unit, "sm87")))


def test_a_report_of_an_unknown_arch_is_an_error(capsys):
    assert main(["--arch", "sm42", "--unit", "finish"]) == BackendError.exit_code
    assert capsys.readouterr().err.startswith(
        "error: arch is 'sm42', which the native backend does not run on; accepted are sm87"
    )


def test_what_a_build_compiles_is_what_the_tests_look_at():
    need_compiler()
    assert kernels.compile_cubin("conv", "sm87") == cubin("conv", "sm87")


def test_cubins_are_compiled_once_for_each_state_of_their_sources(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(kernels, "compile_cubin", lambda unit, arch: compiled.append((unit, arch)) or b"cubin")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cu").write_text('#include "b.cuh"\n')
    (tmp_path / "kernels" / "b.cuh").write_text('// one\n#include "c.cuh"\n')
    (tmp_path / "kernels" / "c.cuh").write_text("int c;\n")
    monkeypatch.setattr(kernels, "KERNELS", tmp_path / "kernels")
    assert [path.name for path in kernels.unit_sources("a")] == ["a.cu", "b.cuh", "c.cuh"]
    digest = kernels.kernels_digest()
    for _ in range(2):
        assert kernels.cached_cubin("a", "sm87", tmp_path / "cache") == b"cubin"
    (tmp_path / "kernels" / "b.cuh").write_text('/* two */ #include "c.cuh"\n'.replace(" #", "\n#"))
    assert kernels.kernels_digest() == digest  # comments and blanks do not matter to bundles
    kernels.cached_cubin("a", "sm87", tmp_path / "cache")
    (tmp_path / "kernels" / "c.cuh").write_text("int c, d;\n")
    assert kernels.kernels_digest() != digest
    kernels.cached_cubin("a", "sm87", tmp_path / "cache")
    kernels.cached_cubin("a", "sm89", tmp_path / "cache")
    assert compiled == [("a", "sm87")] * 3 + [("a", "sm89")]
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_the_kernels_of_benchmarks_are_not_bundled():
    assert set(kernels.bundled()) == set(kernels.sources()) - {"bench"}
    assert {"attend", "delta", "linear", "small"} <= set(kernels.bundled())


@pytest.mark.parametrize(
    "damage", [lambda c: b"", lambda c: c[:100], lambda c: b"x" + c[1:], lambda c: c[: len(c) // 2]]
)
def test_bytes_that_are_no_cubin_are_refused(damage):
    with pytest.raises(BackendError, match="these bytes are no cubin"):
        kernel_use(damage(cubin("finish", "sm87")))


def test_inspect_shows_arch_and_kernels_of_a_native_bundle(cli, refused, tmp_path, ids_bundle):
    path = tmp_path / "bundle"
    write_native_bundle(path, formats_of("nvfp4", target__lm_head="tied"))
    code, out, _ = cli("inspect", path, "--json")
    found = last_json(out)
    assert code == 0
    assert (found["backend"], found["arch"]) == ("native", "sm90a")
    assert [unit["unit"] for unit in found["kernels"]] == sorted(kernels.bundled())
    use = kernel_use(cubin("finish", "sm90a")).values()  # every unit of the test's bundle
    assert found["kernels"][0] == {
        "unit": "attend",
        "kernels": len(use),
        "registers": max(u.registers for u in use),
        "shared_bytes": max(u.shared_bytes for u in use),
        "stack_bytes": max(u.stack_bytes for u in use),
    }
    out = cli("inspect", path)[1]
    assert "Kernels for sm90a" in out
    assert "built by edge-dflash 0.0.0 for --backend native --arch sm90a" in out
    reference = last_json(cli("inspect", ids_bundle, "--json")[1])
    assert (reference["backend"], reference["arch"], reference["kernels"]) == ("reference", "cpu", [])
    file = path / "kernels" / "small.cubin"
    file.write_bytes(bytes(file.stat().st_size))
    code, line = refused("inspect", path)
    assert code == 6
    assert "kernels/small.cubin: these bytes are no cubin" in line
