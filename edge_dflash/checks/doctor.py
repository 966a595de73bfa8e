"""What the doctor looks at, gathered once, and its checks: D001 to D013 of the machine, D014 to D017 of a bundle.

Judging the facts needs no machine. docs/troubleshooting.md has a section for each code.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from edge_dflash.backends.cuda.compile import kernels_digest
from edge_dflash.backends.cuda.support import DeviceFacts, device_facts
from edge_dflash.backends.cuda.tensorrt.flavours import FLAVOURS, TENSORRT, TENSORRT_RTX
from edge_dflash.board.archs import ARCHS_OF, arch_of_sm, find_arch
from edge_dflash.board.linux import drop_page_cache
from edge_dflash.board.profiles import BoardProfile, JetPackVersion, load_board, match_board
from edge_dflash.board.state import BoardState, read_board_state
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.bundle.reader import Bundle, check_files, read_manifest
from edge_dflash.checks.inspect import inspect_manifest
from edge_dflash.errors import BackendError, EdgeDflashError

SERVICE = "edge-dflash.service"
INSTALLED = Path("opt/edge-dflash/current/bundle")
_NODES = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm", "nvmap", "nvhost-ctrl-gpu", "nvgpu/*/ctrl")
_DISTRIBUTIONS = {TENSORRT.module: ("tensorrt", "tensorrt-cu13"), TENSORRT_RTX.module: ("tensorrt-rtx",)}
_LIBRARIES = ("usr/lib/aarch64-linux-gnu", "usr/lib/x86_64-linux-gnu")
_PROPERTIES = ("LoadState", "ActiveState", "SubState", "Result", "NRestarts", "StatusText")

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """What a check found. The fields are its JSON form; ``remedy`` is empty only where there is nothing to do."""

    status: Status
    found: str
    remedy: str = ""
    code: str = ""
    name: str = ""  # what the code is about


ok = partial(Check, "ok")  # nothing to do
warn = partial(Check, "warn")  # it works, or may; worse than it could
fail = partial(Check, "fail")  # the bundle cannot be served, or the service does not run as it should


@dataclass(frozen=True)
class BundleFacts:
    """A bundle that was given, or the installed one."""

    path: Path
    manifest: Manifest | None  # None: see error
    error: str | None  # of the manifest or the files
    needs_bytes: int | None  # weights, states and scratch of the loaded pair
    hashed: bool  # the files were compared with their hashes


@dataclass(frozen=True)
class Facts:
    """What was found. None and empty: not found here."""

    board: BoardState = field(default_factory=BoardState)
    profile: BoardProfile | None = None
    device: DeviceFacts | None = None
    device_error: str = ""  # why there is no device
    tensorrt: Mapping[str, str] = field(default_factory=dict)  # version by flavour: tensorrt, tensorrt_rtx
    kernels: str = ""  # digest of the kernels of this version
    torch: bool = False  # whether it is installed
    disk_free: int | None = None  # bytes where bundles and sessions are kept
    service: Mapping[str, str] | None = None  # properties of systemd; None: no systemd
    nodes: Mapping[str, bool] = field(default_factory=dict)  # device nodes of the GPU: may this user open them?
    bundle: BundleFacts | None = None

    @property
    def manifest(self) -> Manifest | None:
        """The bundle's, if it can be read."""
        return self.bundle.manifest if self.bundle else None

    @property
    def on_cpu(self) -> bool:
        """Whether there is a bundle, and it needs no GPU."""
        return self.manifest is not None and not self.manifest.on_device

    @property
    def jetpack(self) -> JetPackVersion | None:
        """The JetPack of the running release: 38.2.1 is of JetPack 7.0 as 38.2 is."""
        if (release := self.board.release) is None or self.profile is None:
            return None
        return next((v for v in self.profile.jetpacks if is_release(release, v.jetson_linux)), None)


def is_release(found: str, wanted: str) -> bool:
    """Whether version ``found`` is ``wanted`` or one of its patches: 10.13.3.9 is of 10.13.3."""
    return f"{found}.".startswith(f"{wanted}.")


def gather(bundle: Path | None = None, *, hashes: bool = False, root: Path = Path("/")) -> Facts:
    """Look at the machine. Raises nothing for what is missing.

    ``bundle`` None takes the installed one. ``hashes`` reads all of its files.
    """
    board = read_board_state(root)
    profile = match_board(board.model, board.memory.total if board.memory else None) if board.model else None
    try:
        device, error = device_facts(), ""
    except BackendError as reason:
        device, error = None, str(reason)
    if bundle is None and (root / INSTALLED).is_dir():
        bundle = root / INSTALLED
    seen = None if bundle is None else look_at(bundle, profile, hashes=hashes)
    software = tensorrt_versions(root), kernels_digest(), importlib.util.find_spec("torch") is not None
    folders = [root / name for name in ("opt/edge-dflash/releases", "opt", "") if (root / name).is_dir()]
    free = shutil.disk_usage(folders[0]).free if folders else None
    found = sorted(path for pattern in _NODES for path in (root / "dev").glob(pattern))
    nodes = {f"/{path.relative_to(root)}": os.access(path, os.R_OK | os.W_OK) for path in found}
    return Facts(board, profile, device, error, *software, free, _service(), nodes, seen)


def look_at(path: Path, profile: BoardProfile | None, *, hashes: bool) -> BundleFacts:
    """Read a bundle's manifest and compare its files; the first that is wrong ends it."""
    manifest = needs = None
    try:
        manifest = read_manifest(path)
        needs = inspect_manifest(manifest, board=profile or load_board("agx-thor")).total_bytes
        check_files(path, manifest)
        if hashes:
            Bundle.open(path)
            drop_page_cache(path)
    except (EdgeDflashError, OSError) as error:
        return BundleFacts(path, manifest, str(error), needs, False)
    return BundleFacts(path, manifest, None, needs, hashes)


def tensorrt_versions(root: Path) -> dict[str, str]:
    """Versions of what Python would import, by module, or of JetPack's library; nothing is loaded."""
    found: dict[str, str] = {}
    for module, names in _DISTRIBUTIONS.items():
        for name in names:
            with suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(module, importlib.metadata.version(name))
    libraries = [path.name for folder in _LIBRARIES for path in (root / folder).glob("libnvinfer.so.*")]
    parts = [m.groups() for name in libraries if (m := re.fullmatch(r"libnvinfer\.so\.(\d+)\.(\d+)\.(\d+)", name))]
    if parts:
        found.setdefault(TENSORRT.module, ".".join(map(str, max(tuple(map(int, version)) for version in parts))))
    return found


def parse_properties(text: str) -> dict[str, str]:
    """``Key=value`` lines of ``systemctl show``."""
    return {key: value for key, equals, value in (line.partition("=") for line in text.splitlines()) if equals}


def _service() -> dict[str, str] | None:
    command = ["systemctl", "show", SERVICE, f"--property={','.join(_PROPERTIES)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_properties(done.stdout)


def healthy(checks: Sequence[Check]) -> bool:
    """Whether none failed."""
    return all(check.status != "fail" for check in checks)


def report(checks: Sequence[Check], facts: Facts) -> dict[str, Any]:
    """The one object of ``--json``."""
    return {
        "ok": healthy(checks),
        "counts": {status: sum(check.status == status for check in checks) for status in get_args(Status)},
        "checks": [asdict(check) for check in checks],
        "bundle": None if facts.bundle is None else str(facts.bundle.path),
        "profile": None if facts.profile is None else facts.profile.name,
        "board": facts.board.to_json(),
    }


FIRST_CUDA = (13, 0)  # that the native backend's bindings speak
SLACK = 512 << 20  # bytes that driver, tokenizer and interpreter take beside the pair
SWAPPED = 256 << 20  # bytes in swap from which on it is worth a word
LEAST_DISK = 1 << 30  # bytes


_Judge = Callable[[Facts], Check | None]
_CHECKS: dict[str, _Judge] = {}
CODES: dict[str, str] = {}  # what each is about


def _check(code: str, name: str) -> Callable[[_Judge], _Judge]:
    """Give a function its code, which keeps its meaning for ever; new ones go to the end."""

    def add(judge: _Judge) -> _Judge:
        _CHECKS[code], CODES[code] = judge, name
        return judge

    return add


@_check("D001", "board")
def board(facts: Facts) -> Check:
    """Whether there is a profile of this board."""
    model, profile = facts.board.model, facts.profile
    if profile is not None:
        return ok(f"{model}: {profile.name}")
    if model is None:
        return warn("no device tree: this is no Jetson", "nothing on a workstation; on a Jetson flash Jetson Linux")
    return warn(f"{model}: no profile", "add one to jetson/, as its README says; only estimates depend on it")


@_check("D002", "Jetson Linux")
def jetson_linux(facts: Facts) -> Check:
    """Whether the board's profile lists the release."""
    release, known = facts.board.release, facts.profile.jetpacks if facts.profile else ()
    if release is None and not known:
        return ok("not a Jetson")
    if release is None:
        return warn("/etc/nv_tegra_release cannot be read", "sudo apt install nvidia-l4t-core")
    if facts.jetpack is not None:
        return ok(f"Jetson Linux {release}, JetPack {facts.jetpack.jetpack}")
    names = ", ".join(f"{v.jetson_linux} (JetPack {v.jetpack})" for v in known) or "none for this board"
    return warn(f"Jetson Linux {release} is not in the profile", f"flash one that is known: {names}")


@_check("D003", "CUDA driver")
def driver(facts: Facts) -> Check:
    """Whether CUDA's driver answers and is new enough."""
    if facts.on_cpu:
        return ok("the bundle needs none")
    judge = fail if facts.manifest else warn
    if facts.device is None:
        what, _, remedy = facts.device_error.partition("; ")
        return judge(what, remedy or "install the NVIDIA driver; the reference backend runs without")
    version = ".".join(map(str, facts.device.cuda))
    if facts.device.cuda < FIRST_CUDA:
        return judge(f"the driver serves CUDA {version}", "flash JetPack 7, whose driver serves CUDA 13")
    return ok(f"the driver serves CUDA {version}")


@_check("D004", "GPU")
def gpu(facts: Facts) -> Check:
    """Whether there are kernels for the GPU."""
    if (device := facts.device) is None:
        remedy = "see D003; a bundle of the reference backend needs none"
        return ok("none; the bundle needs none") if facts.on_cpu else warn("no GPU", remedy)
    where = "shares main memory" if device.integrated else "has memory of its own"
    found = f"{device.name}, SM {device.sm}, {where}"
    if arch_of_sm(device.sm) is None:
        return warn(found, f"build for the CPU; there are kernels for {', '.join(ARCHS_OF['native'])}")
    if facts.profile is not None and facts.profile.sm != device.sm:
        return warn(found, f"the profile {facts.profile.name} says SM {facts.profile.sm}: correct it in jetson/")
    return ok(found)


@_check("D005", "TensorRT")
def tensorrt(facts: Facts) -> Check:
    """Whether TensorRT is there where it is needed, and is the one of the JetPack."""
    manifest, jetpack = facts.manifest, facts.jetpack
    module = manifest.plans.flavour if manifest and manifest.plans else TENSORRT.module
    version = facts.tensorrt.get(module)
    if version is None and manifest and manifest.plans:
        flavour = next(flavour for flavour in FLAVOURS if flavour.module == module)
        judge = warn if manifest.runs_without_engines else fail
        return judge(f"no {flavour.product}", flavour.install)
    if version is None:
        return ok("none; only bundles of the tensorrt backend need it")
    if module == TENSORRT.module and jetpack is not None and not is_release(version, jetpack.tensorrt):
        remedy = "use JetPack's own: remove the pip package, make the venv with --system-site-packages"
        return warn(f"{version}; JetPack {jetpack.jetpack} ships {jetpack.tensorrt}", remedy)
    return ok(version)


@_check("D006", "power mode")
def power_mode(facts: Facts) -> Check:
    """Whether the board is in its fastest mode. It is reported, never set."""
    mode, modes = facts.board.power_mode, facts.profile.power_modes if facts.profile else ()
    if mode is None and not modes:
        return ok("the board has no power modes that are known")
    if mode is None:
        return warn("nvpmodel has set no mode yet", "sudo nvpmodel -q tells it; sudo nvpmodel -m ID sets one")
    found = mode.name or f"mode {mode.id}"
    fastest = max((m for m in modes if m.watts is not None), key=lambda m: m.watts or 0, default=None)
    if fastest is None or fastest.id is None or mode.id == fastest.id:
        return ok(found)
    remedy = f"if cooling and supply allow: sudo nvpmodel -m {fastest.id} ({fastest.name}); it may ask for a reboot"
    return warn(f"{found}, not {fastest.name}", remedy)


@_check("D007", "clocks")
def clocks(facts: Facts) -> Check:
    """Whether the clocks of GPU and memory may go as high as the hardware can."""
    seen = [clock for clock in (facts.board.clock("gpu"), facts.board.clock("memory")) if clock is not None]
    if not seen:
        return ok("clocks cannot be read here")
    texts = [
        f"{c.part} {(c.hz or 0) / 1e6:.0f} MHz"
        + (f" of {c.limit_hz / 1e6:.0f}" if c.limit_hz else "")
        + (", held" if c.locked else "")
        for c in seen
    ]
    if capped := [clock for clock in seen if clock.capped]:
        most = ", ".join(f"{clock.part} {(clock.most_hz or 0) / 1e6:.0f} MHz" for clock in capped)
        return warn("; ".join(texts), f"the hardware can do {most}: see D006; sudo jetson_clocks holds clocks")
    return ok("; ".join(texts))


@_check("D008", "heat and power")
def heat(facts: Facts) -> Check:
    """Whether something is slowed down for its heat or was for its current."""
    state = facts.board
    hot = "" if state.hottest is None else f"{state.hottest:.0f} degrees"
    watts = "" if state.watts is None else f"{state.watts:.1f} W"
    figures = ", ".join(text for text in (hot, watts) if text)
    if slowed := [name for name, on in state.throttling.items() if on]:
        return warn(f"throttled: {', '.join(slowed)}; {figures}", "cool the board, or choose a lower power mode")
    if events := {name: count for name, count in state.over_current.items() if count}:
        counted = ", ".join(f"{name} {count}" for name, count in events.items())
        found = f"over-current or under-voltage since boot: {counted}; {figures}"
        return warn(found, "use the supply that the board asks for, or a lower power mode")
    return ok(figures or "temperatures cannot be read here")


@_check("D009", "memory")
def memory(facts: Facts) -> Check:
    """Whether what the bundle needs is to be had: MemAvailable against its budget."""
    state, bundle = facts.board.memory, facts.bundle
    if state is None:
        return warn("/proc/meminfo cannot be read", "mount /proc")
    found = f"{state.available / 1e9:.1f} of {state.total / 1e9:.1f} GB available"
    if bundle is None or bundle.needs_bytes is None:
        return ok(found)
    needs = bundle.needs_bytes + SLACK
    found += f", the bundle needs {needs / 1e9:.1f}"
    if needs <= state.available:
        return ok(found)
    if facts.service is not None and facts.service.get("ActiveState") in ("active", "activating", "reloading"):
        return ok(f"{found}; the running service holds what is missing")
    if facts.device is not None and not facts.device.integrated:
        return ok(f"{found}; the GPU has memory of its own")
    if needs > state.total:
        return fail(found, "build with a smaller --max-context or a recipe of fewer bits (edge-dflash inspect)")
    return fail(found, "close other programs (the desktop: sudo systemctl isolate multi-user.target)")


@_check("D010", "swap")
def swap(facts: Facts) -> Check:
    """Whether memory ran short before."""
    state = facts.board.memory
    if state is None or not state.swap_total:
        return ok("no swap")
    found = f"{state.swap_used / 1e6:.0f} of {state.swap_total / 1e6:.0f} MB used"
    if state.swap_used <= SWAPPED:
        return ok(found)
    return warn(found, "memory ran short: close programs, then restart the service; its host side may wait on swap")


@_check("D011", "disk")
def disk(facts: Facts) -> Check:
    """Whether an upgrade and saved sessions have room."""
    if facts.disk_free is None:
        return ok("no place to look at")
    found = f"{facts.disk_free / 1e9:.1f} GB free"
    if facts.disk_free < LEAST_DISK:
        return fail(found, "free some: sessions cannot be saved (apt clean, journalctl --vacuum-size=100M)")
    size = facts.manifest.size if facts.manifest else 0
    if facts.disk_free < size + LEAST_DISK:
        wanted = f"a copy of the bundle takes {size / 1e9:.1f} GB"
        return warn(f"{found}; {wanted}", "free some before the next install, or install with --keep 1")
    return ok(found)


@_check("D012", "service")
def service(facts: Facts) -> Check:
    """What systemd says of the unit."""
    if facts.service is None:
        return warn("systemd does not answer", "start the service yourself: edge-dflash serve --config FILE")
    state = facts.service.get("ActiveState", "unknown")
    if facts.service.get("LoadState") == "not-found":
        return warn("not installed", "sudo edge-dflash service install BUNDLE")
    log = f"journalctl -b -u {SERVICE} tells why"
    said = f": {text}" if (text := facts.service.get("StatusText")) else ""
    if state == "failed":
        result = facts.service.get("Result", "unknown")
        return fail(f"failed ({result}){said}", f"{log}; then sudo systemctl reset-failed {SERVICE}")
    restarts = facts.service.get("NRestarts", "0")
    found = f"{state} ({facts.service.get('SubState', '')}){said}"
    if restarts not in ("0", ""):
        return warn(f"{found}; restarted {restarts} times", log)
    if state == "inactive":
        return warn(found, f"sudo systemctl enable --now {SERVICE}")
    return ok(found)


@_check("D013", "device nodes")
def nodes(facts: Facts) -> Check:
    """Whether this user may open the GPU."""
    if not facts.nodes:
        if facts.profile is None:
            return ok("no nodes of a GPU")
        remedy = "the driver is not loaded: sudo apt install --reinstall nvidia-jetpack"
        return fail("no nodes of a GPU in /dev", remedy)
    if shut := [name for name, usable in facts.nodes.items() if not usable]:
        found = f"{', '.join(shut)} cannot be opened by this user"
        return warn(found, "sudo usermod -aG video,render $USER and log in again; the service has its own user")
    return ok(f"{len(facts.nodes)} nodes can be opened")


@_check("D014", "bundle files")
def files(facts: Facts) -> Check | None:
    """Whether the bundle can be read and its files are those of the manifest."""
    if (bundle := facts.bundle) is None:
        return None
    if bundle.error is not None or bundle.manifest is None:
        return fail(str(bundle.error), "copy the bundle again, or build it again")
    how = "hashes compared" if bundle.hashed else "sizes compared; --hash compares contents"
    return ok(f"{len(bundle.manifest.files)} files, {bundle.manifest.size / 1e9:.2f} GB, {how}")


@_check("D015", "bundle architecture")
def architecture(facts: Facts) -> Check | None:
    """Whether what was built runs on this device."""
    if (manifest := facts.manifest) is None:
        return None
    built = f"built for {' and '.join(manifest.backends)} on {manifest.arch}"
    if facts.on_cpu:
        remedy = "pip install 'edge-dflash[build]'"
        return ok(built) if facts.torch else fail(f"{built}; there is no torch here", remedy)
    sm = find_arch(manifest.arch).sm
    if facts.device is None:
        return fail(f"{built}; there is no GPU here", "build with --backend reference --arch cpu for this machine")
    if sm != facts.device.sm:
        here = arch_of_sm(facts.device.sm)
        remedy = f"--backend {manifest.backend} --arch {here.name}" if here else "--backend reference --arch cpu"
        return fail(f"{built}; this is SM {facts.device.sm}", f"build again with {remedy}")
    return ok(built)


@_check("D016", "bundle kernels")
def kernels(facts: Facts) -> Check | None:
    """Whether the compiled kernels are those that this version launches."""
    if (manifest := facts.manifest) is None:
        return None
    held = manifest.tools.get("kernels")
    if held is None or held == facts.kernels:
        return ok(held or "holds no kernels")
    found = f"holds kernels {held} of {manifest.created_by}, this version launches {facts.kernels}"
    return fail(found, f"install that version, or build again with {manifest.options}")


@_check("D017", "bundle TensorRT")
def engines(facts: Facts) -> Check | None:
    """Whether the engines are there, and were built by the very TensorRT that is here; which backend runs, and why."""
    if facts.bundle is None or (manifest := facts.manifest) is None:
        return None
    if (held := manifest.plans) is None:
        return ok("holds no plans")
    remedy = f"edge-dflash build --finish {facts.bundle.path} on this board"
    if manifest.runs_without_engines:
        judge, runs = warn, f"; {manifest.backend} runs"
    else:
        judge, runs = fail, ""
        remedy += "; the installed service does so when it starts"
    if held.deferred:
        return judge(f"{len(held.deferred)} of {len(held.names)} plans are yet to be built{runs}", remedy)
    count = f"{len(held.names)} plans of TensorRT {held.version}"
    here = facts.tensorrt.get(held.flavour)
    if here is None:
        return judge(f"{count}, none is here{runs}", "see D005")
    if held.version is None or not is_release(held.version, here):
        return judge(f"{count}, here is {here}{runs}", remedy)
    if manifest.standby and manifest.trial is None:
        return warn(f"{count}; the backends were not timed{runs}", remedy)
    return ok(count if manifest.trial is None else f"{count}; {manifest.trial.text}: {manifest.backend} runs")


def examine(facts: Facts) -> tuple[Check, ...]:
    """One check for each code; those of a bundle only for one that can be read."""
    found = ((code, judge(facts)) for code, judge in _CHECKS.items())
    return tuple(replace(one, code=code, name=CODES[code]) for code, one in found if one is not None)
