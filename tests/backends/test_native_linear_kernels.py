"""What kernels of linears and the code that launches them must both know: names, and shared memory."""

import re
from types import SimpleNamespace

import pytest
from cubin_support import cubin, kernel_use

from edge_dflash.backends.cuda.compile import KERNELS
from edge_dflash.backends.cuda.kernels import splits
from edge_dflash.backends.cuda.kernels.linear import Linears
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
