"""kernels/tower.cu as a library of this CPU, and a device that runs a tower with it: no GPU, no cubin."""

import ctypes
import shutil
import subprocess

import numpy as np
from paths import ROOT

from edge_dflash.backends.cuda.compile import KERNELS
from edge_dflash.backends.cuda.driver import Kernel, as_argument
from edge_dflash.backends.cuda.kernels.linear import LinearWeights
from edge_dflash.backends.cuda.memory import DevicePointer
from edge_dflash.weights.formats import WideWeight

COMPILER = shutil.which("g++")
_SHIM = ROOT / "tests" / "support" / "kernels_on_cpu"
_ROWS_AT = {"patches": 2, "positions": 4, "norm": 4, "finish": 4, "turn": 3}  # of the library's functions


def tower_library(folder):
    """The kernels as functions; dynamic shared memory is the emulation's."""
    for path in (_SHIM / "prelude.cuh", _SHIM / "tower.cpp", KERNELS / "norm.cuh", KERNELS / "tower.cu"):
        text = path.read_text().replace("extern __shared__ __align__(16) u8 memory[];", "char* memory = cpu::memory;")
        (folder / path.name).write_text(text)
    library = folder / "tower.so"
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-w"]
    subprocess.run([COMPILER, *options, "-o", library, folder / "tower.cpp"], check=True)
    return ctypes.CDLL(str(library))


def bits(x):
    """BF16 bits of the nearest values, ties to even."""
    wide = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)


def wide(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


class HostGpu:
    """Device memory is this process's; a tower's kernels run by the library, matrix tiles by NumPy."""

    sm, sm_count = 87, 16

    def __init__(self, library):
        self.library, self.kept, self.matrices = library, [], {}

    def allocate(self, nbytes):
        array = np.full(nbytes + 256, 0xFF, np.uint8)  # NaN, if somebody reads what nobody wrote
        self.kept.append(array)
        return DevicePointer(-(-array.ctypes.data // 256) * 256, nbytes)

    def at(self, pointer, dtype, count):
        raw = (ctypes.c_uint8 * (np.dtype(dtype).itemsize * count)).from_address(getattr(pointer, "address", pointer))
        return np.frombuffer(raw, dtype)

    def write(self, pointer, array):
        assert array.nbytes <= pointer.nbytes
        self.at(pointer, np.uint8, array.nbytes)[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def upload(self, array):
        pointer = self.allocate(array.nbytes)
        self.write(pointer, array)
        return pointer

    def read(self, pointer, shape, dtype):
        assert np.prod(shape) * np.dtype(dtype).itemsize <= pointer.nbytes
        return self.at(pointer, dtype, int(np.prod(shape))).reshape(shape).copy()

    def load(self, cubin):
        return self

    def kernel(self, name, *, shared_bytes=0):
        return Kernel(shared_bytes, name)

    def launch(self, kernel, grid, block, arguments, *, shared_bytes=0, overlap=False):
        assert shared_bytes == kernel.handle
        if kernel.name.startswith("linear_tiles"):
            self._multiply(*arguments[:2])
            return
        name = kernel.name.removeprefix("tower_")
        values = [value if kind is None else kind(value) for value, kind in map(as_argument, arguments)]
        if name.startswith("attend"):
            assert (block, grid) == (128, (-(-arguments[2] // 64), arguments[3], 1))
            self.library.attend(*values)
            return
        assert (block, grid[1:]) == (256, (1, 1))
        values.insert(_ROWS_AT[name], grid[0])
        getattr(self.library, name)(*values)

    def _multiply(self, job, rows):
        matrix = self.matrices[job.weights]
        x = self.at(job.x, np.uint16, (rows - 1) * job.x_stride + job.k)
        x = np.lib.stride_tricks.as_strided(x, (rows, job.k), (2 * job.x_stride, 2))
        out = self.at(job.out[0], np.uint16, (rows - 1) * job.out_stride[0] + job.columns[0])
        out = np.lib.stride_tricks.as_strided(out, (rows, job.columns[0]), (2 * job.out_stride[0], 2))
        assert (matrix.shape, job.mode) == ((job.columns[0], job.k), 0)
        out[:] = bits(wide(x) @ matrix.T)


class HostWeights:
    """NativeWeights of a HostGpu, whose matrices NumPy reads."""

    def __init__(self, store, program):
        self._store, self._program = store, program

    @property
    def formats(self):
        return dict.fromkeys(self._program.weights, "bf16")

    def _values(self, name):
        weight = self._store.get(name)
        assert isinstance(weight, WideWeight)
        return weight.float32()

    def stack(self, gpu, stack):
        data = gpu.allocate(16)
        (name,) = stack.names
        gpu.matrices[data.address] = self._values(name).reshape(self._program.weights[name].shape)
        return LinearWeights(stack.layout, data, gpu.allocate(4 * stack.rows))

    def embedding(self, gpu, name):
        return gpu.upload(bits(self._values(name)))

    def vector(self, name):
        return self._values(name)
