"""Compiles the kernels and prints what each needs of a multiprocessor; needs no GPU.

python -m tests.scripts.kernels --arch sm87 sm110
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from edge_dflash.backends.cuda.compile import (
    ARCHS,
    KERNELS,
    KernelUse,
    bundled,
    cached_path,
    compile_cubin,
    compiled,
    kernel_use,
)
from edge_dflash.errors import EdgeDflashError

# Kernels of Hopper that tests leave out, of the units that have most: what is left has each format and number of rows,
# and each number of blocks of a cluster; of NVFP4, the default, the most rows. linear_cluster's others are compiled for
# SM110.
LEFT_OUT = {
    "linear_cluster": re.compile(rb"^LINEAR_FORMAT\((?!nvfp4,).*\n", re.M),
    "linear_wide": re.compile(rb"^LINEAR_ROWS\((?!nvfp4, Nvfp4, 128,|fp8, Fp8, 64,|bf16, Bf16, 32,).*\n", re.M),
}
COLUMNS = f"{'registers':>9} {'shared':>7} {'spilled':>7}  kernel (bytes; dynamic shared memory not counted)"


def main(argv: Sequence[str] | None = None) -> int:
    """Compile all units for each arch; return 0, or an error's exit code after one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.kernels", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=list(ARCHS), help="architectures, such as sm110; default: all")
    parser.add_argument("--unit", nargs="+", default=list(bundled()), help="compilation units; default: all")
    parser.add_argument("--cache", type=Path, help="folder that keeps what tests look at")
    chosen = parser.parse_args(argv)
    try:
        pairs = list(product(chosen.arch, chosen.unit))
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # the compiler leaves the interpreter free
            made = pool.map(lambda pair: _compiled(pair[0], pair[1], chosen.cache), pairs)
            for (arch, unit), (cubin, seconds) in zip(pairs, made, strict=True):
                print(f"{arch} {unit}: {len(cubin):,} bytes, {seconds:.1f} s\n{COLUMNS}")
                print("\n".join(lines(kernel_use(cubin))), flush=True)
    except EdgeDflashError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _compiled(arch: str, unit: str, cache: Path | None) -> tuple[bytes, float]:
    """A cubin, and the seconds that it took."""
    began = time.perf_counter()
    cubin = kept(unit, arch, cache).read_bytes() if cache else compile_cubin(unit, arch)
    return cubin, time.perf_counter() - began


def kept(unit: str, arch: str, cache: Path) -> Path:
    """The kept cubin of a unit, its PTX beside it: compiled once for each state of its sources, but for LEFT_OUT."""
    path, source = cached_path(unit, arch, cache), None
    if arch == "sm90a" and unit in LEFT_OUT:
        source = LEFT_OUT[unit].sub(b"", (KERNELS / f"{unit}.cu").read_bytes())
        path = path.with_name(f"some-{hashlib.sha256(source).hexdigest()[:8]}-{path.name}")
    if not path.with_suffix(".ptx").exists():
        cache.mkdir(parents=True, exist_ok=True)
        with compiled(unit, arch, source) as result:
            found = {path: result("CUBIN"), path.with_suffix(".ptx"): result("PTX").rstrip(b"\0")}
        for place, data in found.items():
            partial = place.with_name(f"{place.name}.{os.getpid()}")
            partial.write_bytes(data)
            partial.replace(place)
    return path


def lines(kernels: dict[str, KernelUse]) -> list[str]:
    """One line for each kernel, under :data:`COLUMNS`. Spilled registers are counted with arrays in local memory."""
    return [
        f"{use.registers:9} {use.shared_bytes:7,} {use.stack_bytes:7,}  {name}" for name, use in sorted(kernels.items())
    ]


if __name__ == "__main__":
    sys.exit(main())
