"""What kernels and the code that launches them must both know: names, sizes, registers and shared memory."""

import re
from types import SimpleNamespace

import pytest
from cubin_support import cubin, kernel_use

from edge_dflash.backends.cuda.compile import KERNELS
from edge_dflash.backends.cuda.kernels import experts, sample, splits, walk
from edge_dflash.backends.cuda.kernels.linear import UNITS, Linears
from edge_dflash.backends.cuda.memory import Control
from edge_dflash.board.archs import KERNEL_ARCHS
from edge_dflash.weights.layout import Layout
from tests.scripts.kernels import LEFT_OUT


@pytest.mark.parametrize(
    ("sm", "rows", "units"),
    [
        *((87, 16, ("linear",)), (121, 16, ("linear",))),
        *((110, 32, ("linear_cluster",)), (90, 32, ("linear_cluster",)), (90, 16, None)),
    ],
)
def test_every_kernel_that_a_device_has_is_loaded(sm, rows, units):
    loaded = {}

    def load(unit):
        names = loaded.setdefault(unit, [])
        return SimpleNamespace(kernel=lambda name, **_: names.append(name))

    Linears(SimpleNamespace(sm=sm, load=load, prefer_shared=lambda kernel: None), lambda unit: unit, most_rows=rows)
    arch = f"sm{sm}" + ("a" if sm >= 90 else "")
    units = units or ("linear_cluster", "linear_hopper")
    assert set(loaded) - {"linear_tiles", "finish"} == set(units)
    for unit in (*units, "finish"):
        names = set(loaded[unit])
        if sm == 90 and unit in LEFT_OUT:
            names = {name for name in names if not re.search("_(fp8|bf16)_", name)}
        assert names == set(kernel_use(cubin(unit, arch)))
        assert len(loaded[unit]) == len(set(loaded[unit]))
    for unit in {"linear", "linear_cluster", "linear_hopper", "linear_wide"} - set(units):
        assert sm == 90 or not kernel_use(cubin(unit, arch)), f"{unit} is built and never loaded"


ALL = ("sm87", "sm90a", "sm110a", "sm121a")  # others have the same source


@pytest.mark.parametrize(
    ("unit", "archs", "registers", "stack"),
    [
        *((unit, ("sm87", "sm121a"), 255, 0) for unit in ("linear",)),
        *((unit, ("sm90a", "sm110a"), 255, 0) for unit in UNITS),
        ("finish", ALL, 255, 0),
        ("experts", ALL, 144, 0),
        ("experts_linear", ALL, 144, 0),
        ("walk", KERNEL_ARCHS, 128, 0),
        ("conv", KERNEL_ARCHS, 128, 0),
        ("sample", ALL, 128, 32),
        ("attend", ALL, 255, 96),
        ("delta", ALL, 255, 96),
        ("small", ALL, 255, 96),
    ],
)
def test_kernels_take_few_registers_and_hardly_spill(unit, archs, registers, stack):
    for arch in archs:
        for kernel, use in kernel_use(cubin(unit, arch)).items():
            assert 0 < use.registers <= registers, (arch, kernel)
            assert use.stack_bytes <= stack, (arch, kernel)
            if unit.startswith("linear") and arch != "sm87" and kernel.endswith("_16"):
                assert use.registers <= 128, kernel  # two blocks an SM: the next launch starts under this one


def test_kernels_of_warpgroups_and_clusters_are_where_these_are():
    attend, delta = (lambda arch, unit=unit: kernel_use(cubin(unit, arch)).keys() for unit in ("attend", "delta"))
    for arch in ALL:
        assert any("wide" in name for name in attend(arch)) == (arch == "sm90a")
        assert ("delta_verify" in delta(arch)) == (arch != "sm87")
        assert ("delta_verify_crowded" in delta(arch)) == (arch == "sm90a")


@pytest.mark.parametrize(
    ("file", "sizes"),
    [
        ("walk.cu", {"TOP_THREADS": walk._TOP_THREADS, "SPLITS": walk.SPLITS, "MIX_WARPS": walk._MIX_WARPS,
                     "WALK_THREADS": walk._WALK_THREADS, "PROJECT_WARPS": walk._PROJECT_THREADS // 32,
                     "SLICE": walk._SLICE}),
        ("sample.cu", {"BINS": sample._BINS, "SLICE": sample._SLICE, "THREADS": sample._THREADS,
                       "COUNT_THREADS": sample._COUNT_THREADS, "CHUNK": sample._BINS // sample._CHUNKS}),
        ("experts.cu", {"WARPS": experts._THREADS // 32, "GROUP": experts._GROUP, "MOST_CHOSEN": experts._MOST_CHOSEN}),
        ("experts_linear.cu", {n: getattr(experts, n) for n in ("WARPS", "UP_PARTS", "DOWN_PARTS")}),
        ("experts.cuh", {n: getattr(experts, n) for n in ("LIST_HEAD", "ENTRY_HEAD")}),
        ("control.cuh", {word.name: word.value for word in Control}),
    ],
)  # fmt: skip
def test_sizes_are_those_of_the_kernels(file, sizes):
    found = dict(re.findall(r"(\w+) = (\d+)", (KERNELS / file).read_text()))
    assert {name: int(found[name]) for name in sizes} == sizes


def test_shared_memory_on_hopper_is_what_the_kernel_lays_out():
    """Offsets and rings of kernels/linear_hopper.cu, from its source; rows of x are swizzled: 1,024 bytes."""
    source = "".join((KERNELS / name).read_text() for name in ("blocks.cuh", "linear_hopper.cu"))

    def constant(name):
        return int(re.search(rf"\b{name} = (\d+)[,;]", source)[1])

    warps, sums = constant("SLICES") * constant("QUAD"), constant("SUMS")
    assert 32 * warps + constant("FINISHERS") == splits.HOPPER_THREADS
    assert constant("ROWS") == splits.HOPPER_ROWS
    head = constant("BEST") + 8 * constant("ROWS")
    assert -(-head // 1024) * 1024 == constant("EXCHANGE")
    units = {"nvfp4": 1152, "fp8": 2048, "bf16": 2048}
    depths = dict(re.findall(r"^LINEAR_FORMAT\((\w+), \w+, (\d+)\)", source, re.M))
    assert set(depths) == set(units)
    for kind, depth in depths.items():
        for count in (1, 2, 4, 8):
            blocks = 5120 // constant("BLOCK_K") // count
            slots = constant("SLOTS") * constant("QUAD") * sums if count > 1 else 0
            x = blocks * constant("BLOCK_K") * constant("ROWS") * 2
            ring = warps * int(depth) * units[kind]
            found = splits.HopperSplits.of(Layout(kind, (640,), 5120), count, 132, None)
            assert found.shared_bytes == constant("EXCHANGE") + warps * sums + slots + x + ring
