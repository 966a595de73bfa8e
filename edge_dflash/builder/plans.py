"""The TensorRT plans of a bundle: several at a time, each kept as soon as it is there, so that a build resumes.

TensorRT releases the interpreter's lock while it builds (measured), so threads are enough. A thread holds one unit's
weights as views of the mapped files, and its plan; there are a few threads. TensorRT for a Jetson times kernels on the
GPU while it builds, so there plans are built one by one, with a timing cache that lies beside the journal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock

from edge_dflash.backends.tensorrt.api import TENSORRT_RTX, flavour_of
from edge_dflash.backends.tensorrt.compile import Compiler
from edge_dflash.backends.tensorrt.units import Unit
from edge_dflash.board.linux import read_memory
from edge_dflash.builder.journal import WorkDir
from edge_dflash.bundle.manifest import FileEntry
from edge_dflash.bundle.parts import DurableFile
from edge_dflash.weights.formats import WeightStore
from edge_dflash.weights.safetensors import forget_pages

TIMING_CACHE = "timing.cache"  # in the working directory
AT_ONCE = 4  # most plans in work
UNIT_BYTES = 2 << 30  # of memory that one plan in work may take
_POLL = 0.1  # seconds between two reports

Share = Callable[[int, int], None]  # (done, in all)


@dataclass
class _Work:
    """What the threads share."""

    store: WeightStore
    directory: WorkDir
    compilers: SimpleQueue[Compiler]
    shares: dict[str, float]  # of each plan, how much is done
    files: dict[str, FileEntry]
    stopped: Event
    lock: Lock


def build_plans(
    arch: str, units: Mapping[str, Unit], store: WeightStore, directory: WorkDir, share: Share
) -> dict[str, FileEntry]:
    """Build the plans of ``units`` (by path) for ``arch``, or find them built; entries by path.

    Raises BackendError and BuildError naming plan, op and tensor; plans that are there by then are kept.
    """
    found = {name: entry for name in units if (entry := directory.reuse(name, lambda count: None)) is not None}
    wanted = {name: unit for name, unit in units.items() if name not in found}
    if not wanted:
        return found
    timing, count = _read(directory.root / TIMING_CACHE), min(workers(arch), len(wanted))
    compilers: SimpleQueue[Compiler] = SimpleQueue()
    for _ in range(count):
        compilers.put(Compiler(arch, timing))
    work = _Work(store, directory, compilers, {}, found, Event(), Lock())
    with ThreadPoolExecutor(count, thread_name_prefix="plan") as pool:
        pending = {pool.submit(_build, work, name, unit) for name, unit in wanted.items()}
        try:
            while pending:
                done, pending = wait(pending, _POLL, FIRST_COMPLETED)
                for future in done:
                    future.result()
                share(int(1000 * (len(units) - len(wanted) + sum(work.shares.values()))), 1000 * len(units))
        finally:
            work.stopped.set()  # those in work stop at TensorRT's next step
            pool.shutdown(cancel_futures=True)
    return work.files


def workers(arch: str) -> int:
    """How many plans may be in work at a time on this machine."""
    if flavour_of(arch) is not TENSORRT_RTX:
        return 1
    memory = read_memory(Path("/"))
    room = memory.available // UNIT_BYTES if memory is not None else 1
    return max(1, min(AT_ONCE, os.cpu_count() or 1, room))


def _build(work: _Work, name: str, unit: Unit) -> None:
    compiler = work.compilers.get()

    def advance(share: float) -> bool:
        work.shares[name] = 0.99 * share
        return not work.stopped.is_set()

    try:
        lowered = compiler.lower(unit, work.store)
        plan = compiler.build(lowered, advance)
        for array in lowered.net.held:
            forget_pages(array)
        del lowered
        entry = work.directory.add(name, partial(_write, plan))
        with work.lock:
            work.files[name] = entry
            if compiler.timing:
                _save(work.directory.root / TIMING_CACHE, compiler.timing)
        work.shares[name] = 1.0
    finally:
        work.compilers.put(compiler)


def _write(plan: memoryview, path: Path) -> FileEntry:
    with DurableFile(path, lambda count: None) as file:
        file.write(plan)
    return file.entry


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _save(path: Path, data: bytes) -> None:
    partial_path = path.with_name(f"{path.name}.partial")
    partial_path.write_bytes(data)
    partial_path.replace(path)
