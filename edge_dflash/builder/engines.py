"""The TensorRT engines of a bundle (its *plans*): what is decided of them, and how they are built.

Several are built at a time, each kept as soon as it is there, so that a build resumes. TensorRT releases the
interpreter's lock while it builds (measured), so threads are enough. A thread holds one unit's weights as views of the
mapped files, and its engine. TensorRT for a Jetson times kernels on the GPU while it builds, so there engines are built
one by one, with a timing cache that lies beside the journal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock
from typing import TYPE_CHECKING

from edge_dflash.backends.cuda.compile import compiler_version
from edge_dflash.backends.cuda.support import device_sm
from edge_dflash.backends.cuda.tensorrt.flavours import TENSORRT_RTX, Flavour, flavour_of, load, version
from edge_dflash.backends.cuda.tensorrt.units import Unit, bundle_units, engine_units
from edge_dflash.board.archs import find_arch
from edge_dflash.board.linux import read_memory
from edge_dflash.builder.journal import WorkDir
from edge_dflash.bundle.manifest import EngineFiles, FileEntry
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.files import write_whole
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import WeightFormat, WeightStore
from edge_dflash.weights.recipe import Recipe
from edge_dflash.weights.safetensors import forget_pages

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.tensorrt.compile import Compiler

TIMING_CACHE = "timing.cache"  # in the working directory
AT_ONCE = 4  # most engines in work
UNIT_BYTES = 2 << 30  # of memory that one engine in work may take
_POLL = 0.1  # seconds between two reports


def decide_engines(
    arch: str, recipe: Recipe, pair: PairSpec, store: WeightStore, formats: Mapping[str, WeightFormat], chunk: int
) -> tuple[dict[str, WeightFormat], EngineFiles]:
    """Formats of a TensorRT bundle; its engines, to be built here or deferred to the device.

    Raises BuildError without a kernel compiler, BackendError without TensorRT for RTX where that is what builds, and
    for what engines or state kernels do not take.
    """
    compiler_version()
    from edge_dflash.backends.cuda.support import narrowed  # the bindings of CUDA, only here
    from edge_dflash.backends.cuda.tensorrt.dense import check_engines

    flavour = flavour_of(arch)
    check_engines(pair, formats, arch, recipe.kv_format)
    names = tuple(sorted(bundle_engines(pair, formats, chunk)))
    found = _builder_version(arch, flavour)
    engines = EngineFiles(
        "tensorrt_rtx" if flavour is TENSORRT_RTX else "tensorrt", found, names, () if found is not None else names
    )
    return narrowed(formats, pair_programs(pair), store), engines


def expanded_weights(recipe: Recipe, pair: PairSpec, formats: Mapping[str, WeightFormat]) -> tuple[str, ...]:
    """A warning about what is right and slow."""
    specs = pair_programs(pair).weights
    names = [n for n, spec in specs.items() if formats[n] == "nvfp4" and not recipe.nvfp4_activations(spec, "nvfp4")]
    if not names:
        return ()
    return (
        f"{len(names)} NVFP4 linears ({names[0]} ...) read BF16 activations: TensorRT for RTX 1.7 expands such "
        "weights to BF16 on every run, several times the bytes; set activations: nvfp4 in the recipe, and fp8 for "
        "lm_head and fc",
    )


def bundle_engines(pair: PairSpec, formats: Mapping[str, WeightFormat], chunk: int) -> Mapping[str, Unit]:
    """What each engine of a bundle computes, by its file."""
    return engine_units(bundle_units(pair, formats, chunk).units)


def _builder_version(arch: str, flavour: Flavour) -> str | None:
    """Version of the TensorRT that builds for ``arch`` on this machine; None: that is left to the device."""
    if flavour is TENSORRT_RTX:
        return checked_version(flavour)
    try:
        return checked_version(flavour) if device_sm() == find_arch(arch).sm else None
    except BackendError:
        return None


def checked_version(flavour: Flavour) -> str:
    """Version of an installed flavour. Raises BackendError when it is missing or too old for our layers."""
    found = version(load(flavour))
    if _numbers(found)[:2] < _numbers(flavour.first):
        raise BackendError(f"{flavour.product} is {found}, plans need {flavour.first} or later; {flavour.install}")
    return found


def check_device(arch: str, where: str, what: str) -> None:
    """Raise BackendError unless this machine's GPU is the one for ``what``, such as "its plans are built"."""
    wanted = find_arch(arch).sm
    try:
        sm = device_sm()
        found = f"this one is SM {sm}"
    except BackendError as error:
        sm, found = None, f"and here is none ({error})"
    if sm != wanted:
        raise BackendError(
            f"{where}: {what} on a device of SM {wanted}, {found}; "
            f"copy the bundle to the board and run there: edge-dflash build --finish {where}"
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def build_engines(bundle: Bundle, directory: WorkDir, share: Callable[[int, int], None]) -> dict[str, FileEntry]:
    """Build the engines of ``bundle``, or find them built; entries by path. ``share`` is told (done, in all).

    Raises BackendError and BuildError naming engine, op and tensor; engines that are there by then are kept.
    """
    manifest, arch = bundle.manifest, bundle.manifest.arch
    units = bundle_engines(manifest.pair, manifest.weights, manifest.prefill_chunk)
    files = {name: entry for name in units if (entry := directory.reuse(name)) is not None}
    wanted = {name: unit for name, unit in units.items() if name not in files}
    if not wanted:
        return files
    count, shares = min(workers(arch), len(wanted)), dict.fromkeys(wanted, 0.0)
    work = _Engines(arch, bundle, directory, count, shares)
    with ThreadPoolExecutor(count, thread_name_prefix="plan") as pool:
        names = {pool.submit(work.build, name, unit): name for name, unit in wanted.items()}
        left = set(names)
        try:
            while left:
                done, left = wait(left, _POLL, FIRST_COMPLETED)
                files |= {names[future]: future.result() for future in done}
                share(int(1000 * (len(units) - len(wanted) + sum(shares.values()))), 1000 * len(units))
        finally:
            work.stopped.set()  # those in work stop at TensorRT's next step
            pool.shutdown(cancel_futures=True)
    return files


def workers(arch: str) -> int:
    """How many engines may be in work at a time on this machine."""
    if flavour_of(arch) is not TENSORRT_RTX:
        return 1
    memory = read_memory(Path("/"))
    room = memory.available // UNIT_BYTES if memory is not None else 1
    return max(1, min(AT_ONCE, os.cpu_count() or 1, room))


class _Engines:
    """Engines in work: what the threads share."""

    def __init__(self, arch: str, store: WeightStore, directory: WorkDir, count: int, shares: dict[str, float]) -> None:
        from edge_dflash.backends.cuda.tensorrt.compile import Compiler  # the bindings of CUDA, only here

        self._store, self._directory, self._shares = store, directory, shares
        self._cache = directory.root / TIMING_CACHE
        timing = self._cache.read_bytes() if self._cache.is_file() else b""
        self._compilers: SimpleQueue[Compiler] = SimpleQueue()
        for _ in range(count):
            self._compilers.put(Compiler(arch, timing))
        self._lock = Lock()
        self.stopped = Event()

    def build(self, name: str, unit: Unit) -> FileEntry:
        """Build an engine and keep it as the file ``name``."""
        compiler = self._compilers.get()

        def advance(share: float) -> bool:
            self._shares[name] = 0.99 * share
            return not self.stopped.is_set()

        try:
            lowered = compiler.lower(unit, self._store)
            engine = compiler.build(lowered, advance)
            for array in lowered.net.held:
                forget_pages(array)
            del lowered
            entry = self._directory.add(name, [engine])
            with self._lock:
                if compiler.timing:
                    write_whole(self._cache, compiler.timing)
            self._shares[name] = 1.0
            return entry
        finally:
            self._compilers.put(compiler)
