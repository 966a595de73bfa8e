"""A small tied pair that the native kernels take, native bundles made of it, and a device that only remembers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
from bundle_support import PAIR, random_weight, write_manifest
from cubin_support import cubin
from golden_pairs import pair as golden_pair

from edge_dflash.backends.cuda.compile import bundled, kernels_digest
from edge_dflash.backends.cuda.driver import Kernel
from edge_dflash.backends.cuda.memory import DevicePointer
from edge_dflash.board.archs import find_arch
from edge_dflash.builder.convert import weight_tensors
from edge_dflash.bundle.parts import bundle_parts, tensor_file, write_file
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import AttentionSpec, ExpertsSpec, GatedDeltaSpec, RopeSpec
from edge_dflash.weights.formats import Nvfp4Weight
from edge_dflash.weights.layout import words_of

NATIVE_PAIR = replace(
    PAIR,
    target=replace(
        PAIR.target,
        attention=AttentionSpec(2, 1, 64, RopeSpec(1e7, 16), gated=True),
        gated_delta=GatedDeltaSpec(1, 2, 32, 32, 4),
    ),
    drafter=replace(PAIR.drafter, attention=AttentionSpec(2, 1, 64, RopeSpec(1e6, 64), gated=False)),
)
MIXED = replace(
    NATIVE_PAIR, target=replace(NATIVE_PAIR.target, experts=ExpertsSpec(8, 2, 32, 64, True), intermediate_size=0)
)
"""The same with experts in the place of MLPs."""
SIGHTED = replace(
    NATIVE_PAIR,
    target=replace(
        NATIVE_PAIR.target,
        attention=replace(
            NATIVE_PAIR.target.attention, rope=replace(NATIVE_PAIR.target.attention.rope, mrope_section=(3, 3, 2))
        ),
        vision=replace(golden_pair("vision").target.vision, out=NATIVE_PAIR.target.hidden_size, image_token_id=40),
    ),
)
"""With the eyes of the golden pair."""


def programs(pair=NATIVE_PAIR):
    return pair_programs(pair)


def formats_of(form="nvfp4", pair=NATIVE_PAIR, **others):
    """Formats with all linears alike; ``others`` by the end of a weight's name, dots as two underscores."""
    found = {}
    for name, spec in pair_programs(pair).weights.items():
        chosen = [value for end, value in others.items() if name.endswith(end.replace("__", "."))]
        found[name] = chosen[0] if chosen else form if spec.kind == "linear" and spec.module != "router" else "bf16"
    return found


@cache
def fake_cubin(unit, arch):
    """A cubin that compiles in no time, in the place of another."""
    return cubin("finish", arch)


class Store(dict):
    """A WeightStore over a dict."""

    def get(self, name):
        return self[name]

    def kv_scale(self, state):
        return (1.0, 1.0)


def random_store(formats, pair=NATIVE_PAIR, seed=0):
    rng = np.random.default_rng(seed)
    weights = Store()
    for name, spec in pair_programs(pair).weights.items():
        if formats[name] != "tied":
            weights[name] = random_weight(rng, spec.shape, formats[name], None)
    return weights


def write_native_bundle(path, formats, pair=NATIVE_PAIR, seed=0, **changes):
    """Write a native bundle; return its weights. ``changes`` replace fields of its manifest."""
    store = random_store(formats, pair, seed)
    for folder in ("weights", "kernels"):
        (path / folder).mkdir(parents=True)
    arch = changes.get("arch", "sm90a")
    with ThreadPoolExecutor(1) as pool:
        for name, part in bundle_parts(pair_programs(pair), formats, stacked=True).items():
            tensors = weight_tensors(part, store, formats, {}, pool, words_of(find_arch(arch).sm))
            write_file(path / name, tensor_file(tensors))
    for unit in bundled():
        (path / "kernels" / f"{unit}.cubin").write_bytes(fake_cubin(unit, arch))
    given = {"arch": arch, "backend": "native", "tools": {"kernels": kernels_digest()}, "weights": formats}
    write_manifest(path, pair, **given | changes)
    return store


def same(a, b):
    """Weights of equal codes and scales; NVFP4 blocks of scale zero count as zero codes."""
    assert type(a) is type(b)
    assert a.shape == b.shape
    if isinstance(a, Nvfp4Weight):
        assert np.float32(a.global_scale) == np.float32(b.global_scale)
        assert np.array_equal(a.block_scale, b.block_scale)
        zero = np.repeat(a.block_scale == 0, 8, axis=1)
        assert np.array_equal(np.where(zero, 0, a.packed), np.where(zero, 0, b.packed))
        return
    assert np.array_equal(a.data, b.data)
    if hasattr(a, "scale"):
        assert np.array_equal(*np.broadcast_arrays(a.scale, b.scale))


class FakeGpu:
    """The memory of a device as host arrays, by address."""

    sm = 90

    def __init__(self):
        self.memory = {}
        self.allocated = 0

    def allocate(self, nbytes):
        self.allocated += 1
        self.memory[self.allocated << 40] = np.full(nbytes, 0xCC, np.uint8)
        return DevicePointer(self.allocated << 40, nbytes)

    def write(self, pointer, array):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        base = pointer.address >> 40 << 40
        at = pointer.address - base
        assert data.size <= pointer.nbytes
        self.memory[base][at : at + data.size] = data

    def upload(self, array):
        pointer = self.allocate(array.nbytes)
        self.write(pointer, array)
        return pointer

    def bytes_of(self, pointer):
        base = pointer.address >> 40 << 40
        return self.memory[base][pointer.address - base :][: pointer.nbytes]


class Recorder(FakeGpu):
    """A device, and a module of it, that keeps launches: name, grid, block, arguments, dynamic shared memory."""

    sm_count = 132

    def __init__(self, sm=90):
        super().__init__()
        self.sm, self.launches = sm, []

    def kernel(self, name, *, shared_bytes=0):
        return Kernel(None, name)

    def launch(self, kernel, grid, block, arguments, *, shared_bytes=0, overlap=False):
        self.launches.append((kernel.name, grid, block, arguments, shared_bytes))
