"""TensorRT's run time without TensorRT: plans are JSON, contexts remember what they were told and when they ran.

As in the library, nothing holds what it points at: a context its configuration and its engine, a configuration its
cache, an engine the runtime, the runtime its log. Where the library would read freed memory, these raise.
"""

import json
import weakref
from enum import IntEnum
from types import SimpleNamespace

from edge_dflash.backends.cuda.tensorrt.lower import DTYPES
from edge_dflash.backends.cuda.tensorrt.units import TOWER, engine_file

SCRATCH = 4096


class Whence(IntEnum):
    SET, CUR, END = 0, 1, 2


class Strategy(IntEnum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = 0, 1, 2


class Specialization(IntEnum):
    LAZY, EAGER, NONE = 0, 1, 2


class Pointer:
    """What one object of the library reads of another without holding it."""

    def __set_name__(self, owner, name):
        self.name = name

    def __set__(self, holder, found):
        holder.__dict__[self.name] = weakref.ref(found)

    def __get__(self, holder, owner):
        found = holder.__dict__[self.name]()
        assert found is not None, f"{type(holder).__name__} reads {self.name}, which is gone"
        return found


DATA_TYPES = SimpleNamespace(**{name: name for name in ("FLOAT", "BF16", "FP8", "FP4", "INT32")})


def write_plans(folder, units, **changes):
    """A JSON plan for each unit; ``changes`` replace what a plan (by key) says of itself."""
    files = {}
    for number, (key, unit) in enumerate(units.items()):
        tensors = {b.name: [DTYPES[b.dtype], b.columns] for b in (*unit.inputs, *unit.outputs)}
        inputs = [b.name for b in unit.inputs]
        said = {"key": key, "tensors": tensors, "inputs": inputs, "profiles": len(unit.profiles)}
        said |= {"scratch": SCRATCH + 256 * number} | changes.get(key, {})
        path = folder / engine_file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(said))
        files[engine_file(key)] = path
    return files


class FakeTensorrt:
    """Looks like the module. ``refuse`` (method, key) makes a call fail."""

    __version__ = "10.13.3.9"
    SeekPosition, ExecutionContextAllocationStrategy, DataType = Whence, Strategy, DATA_TYPES
    DynamicShapesKernelSpecializationStrategy = Specialization

    class ILogger:
        ERROR, INTERNAL_ERROR, WARNING = "error", "internal", "warning"

    class IStreamReaderV2:
        pass

    def __init__(self, gpu, *, rtx=False):
        self.gpu, self.rtx = gpu, rtx
        self.contexts, self.loaded, self.refuse, self.caches = [], [], None, []

    def Runtime(self, log):
        if self.refuse == ("Runtime", None):
            raise RuntimeError("[ERROR] Failed to open cuda driver.")
        return FakeRuntime(self, log)


class FakeRuntime:
    log = Pointer()

    def __init__(self, trt, log):
        self.trt, self.log = trt, log

    def deserialize_cuda_engine(self, reader):
        text = b""
        assert reader.seek(0, Whence.SET)
        while part := reader.read(16, 0):
            text += part
        assert reader.seek(-1, Whence.END)
        assert reader.read(8, 0) == text[-1:]
        assert not reader.seek(-1, Whence.SET)
        said = json.loads(text)
        if self.refused("deserialize_cuda_engine", said["key"]):
            return None
        self.trt.loaded.append(said["key"])
        return FakeEngine(self, said)

    def refused(self, method, key):
        log = self.log  # read at every call, as the library does to say what failed
        if self.trt.refuse == (method, key):
            log.log("error", f"{method}: Error Code 4:\n  no")
            return True
        return False


class FakeEngine:
    runtime = Pointer()

    def __init__(self, runtime, said):
        self.runtime, self.trt, self.said = runtime, runtime.trt, said
        self.names = list(said["tensors"])
        self.num_io_tensors, self.num_optimization_profiles = len(self.names), said["profiles"]
        self.device_memory_size_v2 = said["scratch"]

    def get_tensor_name(self, index):
        return self.names[index]

    def get_tensor_dtype(self, name):
        return self.said["tensors"][name][0]

    def get_tensor_shape(self, name):
        columns = self.said["tensors"][name][1]
        return (-1,) if columns is None else (-1, columns)

    def create_runtime_config(self):
        assert self.trt.rtx
        return FakeConfig(self.trt)

    def create_execution_context(self, config):
        if self.trt.rtx:
            assert config.strategy == Strategy.USER_MANAGED
            assert config.dynamic_shapes_kernel_specialization_strategy == Specialization.EAGER
            assert len(self.trt.caches) == 1  # one for all contexts
        else:
            assert config == Strategy.USER_MANAGED
        if self.runtime.refused("create_execution_context", self.said["key"]):
            return None
        self.trt.contexts.append(FakeContext(self, config))
        return self.trt.contexts[-1]


class FakeConfig:
    cache = Pointer()

    def __init__(self, trt):
        self.trt = trt

    def set_execution_context_allocation_strategy(self, strategy):
        self.strategy = strategy

    def create_runtime_cache(self):
        made = FakeCache()
        self.trt.caches.append(weakref.proxy(made))
        return made

    def set_runtime_cache(self, cache):
        self.cache = cache


class FakeCache:
    """Kernels compiled for this GPU."""


class FakeContext:
    """Raises when it is told something twice, or after it ran, or when what it points at is gone."""

    engine, config = Pointer(), Pointer()

    def __init__(self, engine, config):
        self.engine, self.trt, self.key = engine, engine.trt, engine.said["key"]
        if self.trt.rtx:
            self.config = config
        self.scratch = self.profile = None
        self.shapes, self.addresses, self.ran = {}, {}, 0

    def refused(self, method):
        """Every call reads configuration, cache, engine, runtime and log."""
        if self.trt.rtx:
            assert self.config.cache
        return self.engine.runtime.refused(method, self.key)

    def set_device_memory(self, address, size):
        assert not self.refused("set_device_memory")
        assert self.scratch is None
        assert size >= self.engine.device_memory_size_v2
        self.scratch = address

    def set_optimization_profile_async(self, profile, stream):
        assert self.profile is None
        assert stream == self.trt.gpu.stream
        self.profile = profile
        return profile < self.engine.num_optimization_profiles and not self.refused("profile")

    def set_input_shape(self, name, shape):
        assert name not in self.shapes or self.key == TOWER  # each picture has its own
        assert name in self.engine.said["inputs"]
        self.shapes[name] = shape
        return not self.refused("set_input_shape")

    def set_tensor_address(self, name, address):
        assert name not in self.addresses
        assert not self.ran
        assert address % 256 == 0
        self.addresses[name] = address
        return not self.refused("set_tensor_address")

    def infer_shapes(self):
        return ["rows"] if self.refused("infer_shapes") else []

    def execute_async_v3(self, stream):
        assert stream == self.trt.gpu.stream
        assert self.addresses.keys() == self.engine.said["tensors"].keys()
        assert self.shapes.keys() == set(self.engine.said["inputs"])
        self.ran += 1
        if self.trt.gpu.enqueued is not None:
            self.trt.gpu.enqueued.append(("plan", self))
        return not self.refused("execute_async_v3")
