"""Install, upgrade, roll back and remove: each may be given again and does the rest, or nothing.

Files of units are replaced, the administrator's (config.toml, drop-ins) are not. A release that does not become ready
is taken back by itself.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from edge_dflash.board.linux import read_memory
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.checks.footprint import memory_bytes, stored_bytes
from edge_dflash.common.files import directory
from edge_dflash.common.nested import refuse_nul
from edge_dflash.errors import ConfigError, EdgeDflashError
from edge_dflash.install import releases
from edge_dflash.install.host import ACTIVATED, CONFIG, ENABLED, FILES, SERVICE, TCP, Host, InstallPaths, host_of
from edge_dflash.model import pair_programs
from edge_dflash.pictures.decode import DEFAULT_LIMITS, in_flight
from edge_dflash.serve.config import MIB, ServeConfig, load_config

log = logging.getLogger("edge_dflash.install")
KEEP = 2  # releases: the one that is served and the one before
LOG = "journalctl -b -u edge-dflash tells why"
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # from a unit with ProtectHome and PrivateTmp


@dataclass(frozen=True)
class InstallOptions:
    """How to install. None keeps what is there, or leaves it off."""

    keep: int = KEEP
    tcp: bool | None = None
    activation: bool | None = None
    start: bool = True


@dataclass(frozen=True)
class Outcome:
    """What is there now."""

    release: str | None  # that is served
    previous: str | None  # where a rollback goes
    releases: tuple[str, ...]  # the newest last
    written: tuple[str, ...]  # files that were made or changed, with the root that they lie below
    removed: tuple[str, ...]  # files, likewise, and names of releases that went
    started: bool


def install(
    bundle: Path,
    root: Path,
    options: InstallOptions | None = None,
    *,
    program: Path | None = None,
    host: Host | None = None,
) -> Outcome:
    """Serve ``bundle`` by ``program`` (default: the one that runs) from the directory tree ``root``.

    Raises BundleError for a damaged bundle, EdgeDflashError when the program cannot be seen by the service, the disk is
    too small, or the new release does not become ready; the previous one serves again then.
    """
    refuse_nul({"bundle": bundle, "program": program})
    (layout, host), options = _opened(root, host), options or InstallOptions()
    if options.keep < 1:
        raise EdgeDflashError(f"--keep is {options.keep}; give at least 1")
    program = find_program(program)
    if host.live:
        check_visible(program)
    with releases.locked(layout):
        before = releases.current(layout)
        name, repaired = releases.add(layout, bundle, program)
        late = _begin(layout, host)
        written = [*repaired, *_write_units(layout, name, options)]
        if name != before:
            releases.record(layout, name)
            releases.switch(layout, name)
        host.prepare()
        changed = late or bool(written) or name != before
        started = options.start and _start(layout, host, restart=changed)
        if options.start and not started and host.live:
            _take_back(layout, host, name, before)
        if not changed:
            layout.unserved.unlink(missing_ok=True)
        return _outcome(layout, written, releases.prune(layout, options.keep), started)


def left_to_build(bundle: Path) -> str:
    """What is to be said of a bundle's TensorRT engines before it is installed; "": nothing. Raises BundleError."""
    manifest = read_manifest(bundle.resolve())
    if manifest.plans is None or not manifest.plans.deferred:
        return ""
    plans = f"{len(manifest.plans.deferred)} TensorRT plans of {bundle} are not built"
    if not manifest.runs_without_engines:
        return f"{plans}; the service builds them before its first start, which takes minutes to an hour"
    return (
        f"{plans}, and the service will not build them: its {manifest.backend} backend runs the bundle without; "
        f"to try both, give first: {shlex.join(['edge-dflash', 'build', '--finish', str(bundle)])}"
    )


def next_step(root: Path, program: Path | None) -> tuple[str, ...]:
    """What is to be said of an installation into a directory tree; nothing where it is the machine's own."""
    if host_of(root).live:
        return ()
    program, told = find_program(program), list[str]()
    if program.is_relative_to("/tmp") or not program.is_relative_to(root.absolute()):
        told.append(
            f"warning: {program} is to serve, and is not what the machine that gets {root} has; make an environment "
            "there, python3 -m venv /opt/edge-dflash/venv, and install there with its edge-dflash"
        )
    start = "systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload && systemctl start edge-dflash"
    return (*told, f"next: copy what lies in {root} to / of the machine, and there as root: {start}")


def rollback(root: Path, *, start: bool = True, host: Host | None = None) -> Outcome:
    """Serve the release before the current one.

    Raises EdgeDflashError when no release is older or it does not start, BundleError when it is visibly damaged.
    """
    layout, host = _opened(root, host)
    with releases.locked(layout):
        name = releases.previous(layout)
        if name is None:
            raise EdgeDflashError(f"{layout.base} has no release before the current one; install one")
        releases.check(layout, name)
        _begin(layout, host)
        releases.switch(layout, name)
        written = _bound_memory(layout, name, host)
        started = start and _start(layout, host, restart=True)
        if start and not started and host.live:
            raise EdgeDflashError(f"{name} is current now and did not become ready; {LOG}")
        return _outcome(layout, written, [], started)


def remove(root: Path, *, purge: bool = False, host: Host | None = None) -> Outcome:
    """Stop and remove the service with its releases; ``purge``: configuration, drop-ins and saved sessions too."""
    layout, host = _opened(root, host)
    with releases.locked(layout) if layout.releases.is_dir() else nullcontext():
        host.stop()
        files = [root / path for path in (ENABLED, ACTIVATED, TCP, *FILES)]
        for file in files:
            _fresh(file).unlink(missing_ok=True)  # of a change that was cut short
        files = [file for file in files if file.is_symlink() or file.is_file()]
        for path in (layout.current, layout.history):
            path.with_name(f".{path.name}").unlink(missing_ok=True)
        trees = [layout.current, layout.history, layout.unserved, layout.releases]  # what the lock hangs on is last
        if purge:
            trees += [(root / CONFIG).parent, (root / TCP).parent, layout.state]
        gone = [str(path) for path in (*files, *trees) if releases.discard(path)]
        for folder in ((root / TCP).parent, layout.runtime, layout.base):
            with suppress(OSError):
                folder.rmdir()  # unless something else lies there
        host.reload()
        return Outcome(None, None, (), (), tuple(gone), False)


def find_program(given: Path | None) -> Path:
    """The edge-dflash that is to serve. Raises EdgeDflashError when it is none."""
    program = Path(sys.executable).parent / "edge-dflash" if given is None else given.absolute()
    if not os.access(program, os.X_OK) or program.is_dir():
        raise EdgeDflashError(f"{program} is no program; give the edge-dflash of a virtual environment with --program")
    return program


def check_visible(program: Path) -> None:
    """Raise EdgeDflashError when the hardened service could not see its program."""
    for path in (program, program.resolve(), Path(sys.executable).resolve()):
        if hidden := next((folder for folder in _HIDDEN if path.is_relative_to(folder)), None):
            raise EdgeDflashError(
                f"{path} lies below {hidden}, which the service cannot see; make the virtual environment elsewhere, "
                "such as python3 -m venv /opt/edge-dflash/venv, and install with its edge-dflash"
            )


def _opened(root: Path, host: Host | None) -> tuple[InstallPaths, Host]:
    """What is to be changed. Raises EdgeDflashError for who may not."""
    refuse_nul({"root": root})
    host = host or host_of(root)
    if host.live and os.geteuid() != 0:
        raise EdgeDflashError("this changes the system; run it with sudo, or give --root DIRECTORY to try it")
    return InstallPaths(root), host


def _write_units(layout: InstallPaths, name: str, options: InstallOptions) -> list[str]:
    """Bring files and links to what the options say and a release needs; paths of those that changed."""
    root, deploy, changed = layout.root, directory("deploy"), list[str]()
    wanted = {path: (deploy / file).read_bytes() for path, file in FILES.items()}
    wanted[SERVICE] = _bounded(layout, name, wanted[SERVICE])
    if not (root / CONFIG).exists():
        wanted[CONFIG] = (deploy / "config.toml").read_bytes()
    if options.tcp or (options.tcp is None and (root / TCP).exists()):
        wanted[TCP] = (deploy / "tcp.conf").read_bytes()
    elif (root / TCP).exists():
        (root / TCP).unlink()
        changed.append(str(root / TCP))
    for path, content in wanted.items():
        if _write(root / path, content):
            changed.append(str(root / path))
    links = {
        ENABLED: True,
        ACTIVATED: (root / ACTIVATED).is_symlink() if options.activation is None else options.activation,
    }
    for path, on in links.items():
        link = root / path
        if on and not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path("/etc/systemd/system") / path.name)
            changed.append(str(root / path))
        elif not on and link.is_symlink():
            link.unlink()
            changed.append(str(root / path))
    return changed


def _bound_memory(layout: InstallPaths, name: str, host: Host) -> list[str]:
    """Bound the service's memory by what a release takes; the path of the unit if it changed."""
    path = layout.root / SERVICE
    written = path.is_file() and _write(path, _bounded(layout, name, path.read_bytes()))
    if written:
        host.reload()
    return [str(path)] if written else []


def _bounded(layout: InstallPaths, name: str, text: bytes) -> bytes:
    """The unit with the bounds of a release in the place of those that it has; see :func:`bounds`."""
    try:
        config = load_config(layout.root / CONFIG)
    except ConfigError:  # not there yet, or the service says so when it starts
        config = ServeConfig()
    memory = read_memory(layout.root)  # none in a directory tree for another machine
    parts = memory_parts(read_manifest(layout.releases / name / "bundle"), config)
    high, top = bounds(parts, None if memory is None else memory.total)
    said = ", ".join(f"{name} {-(-size // MIB)}" for name, size in parts.items() if size)
    unit = re.sub("(?m)^# MiB: .*$", f"# MiB: {said}.", text.decode())
    unit = re.sub("(?m)^MemoryHigh=.*$", f"MemoryHigh={high}", unit)
    return re.sub("(?m)^MemoryMax=.*$", f"MemoryMax={top}", unit).encode()


def _write(path: Path, content: bytes) -> bool:
    """Write a file whole; whether it was another before."""
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = _fresh(path)
    fresh.write_bytes(content)
    fresh.chmod(0o644)
    fresh.replace(path)
    return True


def _fresh(path: Path) -> Path:
    """Where a file lies until all of it is there."""
    return path.with_name(f".{path.name}.new")


def _begin(layout: InstallPaths, host: Host) -> bool:
    """Note that a change begins; whether an earlier one never reached the service: cut short, or not started."""
    late = layout.unserved.exists()
    if host.live:
        layout.unserved.touch(mode=0o644)
    return late


def _start(layout: InstallPaths, host: Host, *, restart: bool) -> bool:
    """Start the service, and note that it has the last change; whether it became ready."""
    ready = host.start(activated=(layout.root / ACTIVATED).is_symlink(), restart=restart)
    if ready:
        layout.unserved.unlink(missing_ok=True)
    return ready


def _take_back(layout: InstallPaths, host: Host, name: str, before: str | None) -> None:
    if before is None or before == name:
        raise EdgeDflashError(f"{name} is installed and did not become ready; {LOG}")
    releases.switch(layout, before)
    _bound_memory(layout, before, host)
    state = "serves again" if _start(layout, host, restart=True) else "does not become ready either"
    raise EdgeDflashError(f"{name} did not become ready; {before} {state}; {LOG}")


def _outcome(layout: InstallPaths, written: list[str], gone: list[str], started: bool) -> Outcome:
    served, before, known = releases.current(layout), releases.previous(layout), tuple(releases.history(layout))
    return Outcome(served, before, known, tuple(written), tuple(gone), started)


# Memory ---------------------------------------------------------------------------------------------------------------
#
# Bounds for a leak, or a request that nobody foresaw: the robot's other programs live in the same memory. Every part
# counts in full, as if the driver charged what is on the GPU to the service. On a Jetson it mostly does not: the driver
# takes such pages from the system itself, and a unit's bounds neither see nor hold them. Where they are installed on
# the machine itself, its memory bounds them, too: all that may be charged can be more than the board has.

PROGRAM = 3 << 30
"""Python, NumPy, the driver's libraries and context, and the processes of grammars and templates."""
OWNERS = 4  # with all the sessions that they may have open, each at the whole context
MARGIN = 0.25  # of all of it, between what is slowed down (MemoryHigh) and what is ended (MemoryMax)
RESERVE = 0.125  # of the machine's memory, for its other programs: a leak ends the service before it ends the machine
_NEEDED = ("the pair", "system prompts", "larger images", "program")  # by every service that works


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
