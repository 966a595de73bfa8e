"""Bounds on the service's memory, from what its bundle and its configuration say that it takes.

They are there for a leak, or a request that nobody foresaw: the robot's other programs live in the same memory. Every
part counts in full, as if the driver charged what is on the GPU to the service. On a Jetson it mostly does not: the
driver takes such pages from the system itself, and a unit's bounds neither see nor hold them. Where they are installed
on the machine itself, its memory bounds them, too: all that may be charged can be more than the board has.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict

from edge_dflash.bundle.manifest import Manifest
from edge_dflash.checks.footprint import memory_bytes, stored_bytes
from edge_dflash.model import pair_programs
from edge_dflash.pictures.decode import DEFAULT_LIMITS, in_flight
from edge_dflash.serve.config import MIB, ServeConfig

PROGRAM = 3 << 30
"""Python, NumPy, the driver's libraries and context, and the processes of grammars and templates."""
OWNERS = 4  # with all the sessions that they may have open, each at the whole context
MARGIN = 0.25  # of all of it, between what is slowed down (MemoryHigh) and what is ended (MemoryMax)
RESERVE = 0.125  # of the machine's memory, for its other programs: a leak ends the service before it ends the machine
_NEEDED = ("the pair", "system prompts", "larger images", "program")  # by every service that works

log = logging.getLogger("edge_dflash.install")


def memory_parts(manifest: Manifest, config: ServeConfig) -> Mapping[str, int]:
    """Bytes by what takes them, each at its most."""
    engine, programs = config.engine, pair_programs(manifest.pair)
    lanes = engine.lanes or manifest.lanes
    stored = stored_bytes(programs, manifest.weights)
    sizes = (manifest.max_context, manifest.prefill_chunk, manifest.precision.kv, lanes)
    pair = memory_bytes(programs, stored, manifest.pair, *sizes)
    session = (pair.target_kv + pair.drafter_kv + pair.delta_state) // lanes
    sees = manifest.pair.target.vision is not None
    return {
        "the pair": sum(asdict(pair).values()),
        "sessions": OWNERS * config.limits.sessions * session,
        "requests that wait": engine.queue * (session + sees * 3 * engine.image_pixels),
        "system prompts": engine.prefix_bytes,
        "larger images": sees * max(0, in_flight(engine.image_pixels - DEFAULT_LIMITS.pixels)),
        "bodies": 2 * config.limits.connections * config.limits.body_bytes * 3,
        "program": PROGRAM,
    }


def bounds(parts: Mapping[str, int], machine: int | None) -> tuple[int, int]:
    """MemoryHigh and MemoryMax of a service with these parts, on a machine of so many bytes; None: they are unknown.

    Never below what the service needs at work; a warning says where that leaves the machine less than its reserve.
    """
    high = sum(parts.values())
    top = int(high * (1 + MARGIN))
    if machine is not None:
        needed, most = sum(parts[name] for name in _NEEDED), int(machine * (1 - RESERVE))
        if needed > most:
            log.warning(
                "the service needs %d MiB of this machine's %d MiB, which leaves less than %g %% to other programs; "
                "serve a smaller bundle, or fewer lanes (engine.lanes)",
                -(-needed // MIB), machine // MIB, 100 * RESERVE,
            )  # fmt: skip
        top = max(needed, min(top, most))
        high = min(high, max(needed, int(top / (1 + MARGIN))))
    return high, top


def bounded(unit: str, manifest: Manifest, config: ServeConfig, machine: int | None = None) -> str:
    """The unit with the bounds of a bundle in the place of those that it has; see :func:`bounds`."""
    parts = memory_parts(manifest, config)
    high, top = bounds(parts, machine)
    said = ", ".join(f"{name} {-(-size // MIB)}" for name, size in parts.items() if size)
    unit = re.sub("(?m)^# MiB: .*$", f"# MiB: {said}.", unit)
    unit = re.sub("(?m)^MemoryHigh=.*$", f"MemoryHigh={high}", unit)
    return re.sub("(?m)^MemoryMax=.*$", f"MemoryMax={top}", unit)
