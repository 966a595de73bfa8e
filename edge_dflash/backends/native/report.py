"""``python -m edge_dflash.backends.native.report``: compile the kernels and print what each needs. Needs no GPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from edge_dflash.backends.native.compile import ARCHS, bundled, cached_cubin, compile_cubin
from edge_dflash.backends.native.cubin import KernelUse, kernel_use
from edge_dflash.errors import EdgeDflashError

COLUMNS = f"{'registers':>9} {'shared':>7} {'spilled':>7}  kernel (bytes; dynamic shared memory not counted)"


def main(argv: Sequence[str] | None = None) -> int:
    """Compile all units for each arch; return 0, or an error's exit code after one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m edge_dflash.backends.native.report", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=list(ARCHS), help="architectures, such as sm110a; default: all")
    parser.add_argument("--unit", nargs="+", default=list(bundled()), help="compilation units; default: all")
    parser.add_argument("--cache", type=Path, help="folder that keeps cubins for the next time")
    chosen = parser.parse_args(argv)
    try:
        for arch in chosen.arch:
            for unit in chosen.unit:
                began = time.perf_counter()
                cubin = cached_cubin(unit, arch, chosen.cache) if chosen.cache else compile_cubin(unit, arch)
                seconds = time.perf_counter() - began
                print(f"{arch} {unit}: {len(cubin):,} bytes, {seconds:.1f} s\n{COLUMNS}")
                print("\n".join(lines(kernel_use(cubin))), flush=True)
    except EdgeDflashError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def lines(kernels: dict[str, KernelUse]) -> list[str]:
    """One line for each kernel, under :data:`COLUMNS`. Spilled registers are counted with arrays in local memory."""
    return [
        f"{use.registers:9} {use.shared_bytes:7,} {use.stack_bytes:7,}  {name}" for name, use in sorted(kernels.items())
    ]


if __name__ == "__main__":
    sys.exit(main())
