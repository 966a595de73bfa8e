"""What a native build decides before it writes: refusals, dropped scales, the compiler."""

import sys
from dataclasses import replace

import pytest
from builder_support import config_of
from cubin_support import need_compiler
from native_support import NATIVE_PAIR, formats_of, random_store

from edge_dflash.backends.cuda import compile as kernels
from edge_dflash.builder.decide import decide_native
from edge_dflash.builder.write import build
from edge_dflash.errors import BackendError, BuildError
from edge_dflash.weights.recipe import default_recipe

RECIPE = default_recipe()
GATE = "target.layers.0.mlp.gate_proj"


def test_scales_of_nvfp4_activations_are_dropped_with_one_warning():
    formats = formats_of("nvfp4")
    store = random_store(formats)
    assert decide_native("sm110a", RECIPE, NATIVE_PAIR, store, formats) == (formats, ())
    store[GATE] = replace(store[GATE], input_scale=0.5)
    (warning,) = decide_native("sm110a", RECIPE, NATIVE_PAIR, store, formats)[1]
    assert warning.startswith("1 linears of the checkpoint carry scales of NVFP4 activations, which are left out")


def test_a_recipe_with_nvfp4_activations_is_refused():
    recipe = replace(RECIPE, name="w4a4", activations="nvfp4")
    with pytest.raises(BackendError, match="recipe w4a4 asks for activations in nvfp4, the native backend computes"):
        decide_native("sm110a", recipe, NATIVE_PAIR, {}, formats_of("nvfp4"))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_a_pair_without_kernels_is_refused_before_anything_is_written(tmp_path, name):
    config = config_of(name, tmp_path / "out", arch="sm110a", backend="native")
    with pytest.raises(BackendError, match="head_dim is 32; the attention kernels take 64, 128 or 256; build it with"):
        build(config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["cuda.bindings", "NVRTC"])
def test_a_missing_compiler_is_named_before_anything_is_written(tmp_path, monkeypatch, missing):
    if missing == "cuda.bindings":
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    else:  # the robot's install: bindings without the library

        def no_library():
            raise RuntimeError("Failed to dlopen libnvrtc.so.13")

        monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", no_library)
    with pytest.raises(BuildError, match=rf"compiling kernels needs {missing}.*pip install 'edge-dflash\[compile\]'"):
        build(config_of("qwen3", tmp_path / "out", arch="sm110a", backend="native"))
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_compile_is_answered_with_the_first_error(tmp_path, monkeypatch):
    need_compiler()
    (tmp_path / "a.cu").write_text('extern "C" __global__ void f() {}\nextern "C" __global__ void g() { h(); }\n')
    monkeypatch.setattr(kernels, "KERNELS", tmp_path)
    with pytest.raises(
        BuildError, match=r'a.cu does not compile for sm87: a.cu\(2\): error: identifier "h" is undefined'
    ):
        kernels.compile_cubin("a", "sm87")
