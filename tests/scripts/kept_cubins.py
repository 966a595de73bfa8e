"""``edge-dflash`` with an NVRTC that remembers: a kernel that was compiled before, here or by another tree, is read.

    python tests/scripts/kept_cubins.py CUBINS build --target ...

A cubin is kept under the SHA-256 of its source, of all headers of its include path and of the compiler's options.
"""

import hashlib
import importlib.util
import runpy
import sys
from pathlib import Path


def keep_cubins(nvrtc, cubins):
    """Wrap four functions of NVRTC: a program that was compiled before is not compiled again."""
    make, run, size, take = (
        getattr(nvrtc, f"nvrtc{name}") for name in ("CreateProgram", "CompileProgram", "GetCUBINSize", "GetCUBIN")
    )
    sources, found = {}, {}

    def create(source, *rest):
        status, program = make(source, *rest)
        sources[int(program)] = source
        return status, program

    def compile_program(program, count, options):
        digest = hashlib.sha256(sources[int(program)])
        for option in options:
            if option.startswith(b"--include-path="):
                headers = Path(option.partition(b"=")[2].decode())
                for path in sorted(path for path in headers.rglob("*") if path.suffix in (".cuh", ".h")):
                    digest.update(path.name.encode() + path.read_bytes())
            else:
                digest.update(option)
        found[int(program)] = path = cubins / f"{digest.hexdigest()[:24]}.cubin"
        if path.exists():
            return (nvrtc.nvrtcResult.NVRTC_SUCCESS,)
        status = run(program, count, options)
        if not status[0].value:
            data = bytearray(size(program)[1])
            take(program, data)
            cubins.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return status

    def give(program, data):
        data[:] = found[int(program)].read_bytes()
        return (nvrtc.nvrtcResult.NVRTC_SUCCESS,)

    nvrtc.nvrtcCreateProgram, nvrtc.nvrtcCompileProgram, nvrtc.nvrtcGetCUBIN = create, compile_program, give
    nvrtc.nvrtcGetCUBINSize = lambda program: (nvrtc.nvrtcResult.NVRTC_SUCCESS, found[int(program)].stat().st_size)


def main():
    if importlib.util.find_spec("cuda") is not None:
        from cuda.bindings import nvrtc

        keep_cubins(nvrtc, Path(sys.argv[1]))
    sys.argv = ["edge-dflash", *sys.argv[2:]]
    runpy.run_module("edge_dflash", run_name="__main__")


if __name__ == "__main__":
    main()
