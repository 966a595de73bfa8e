"""D001 to D008: the board, its software, its GPU, and how fast it may run just now."""

from __future__ import annotations

from edge_dflash.backends.tensorrt.api import FLAVOURS, TENSORRT
from edge_dflash.board.archs import ARCHS_OF, arch_of_sm
from edge_dflash.board.profiles import JetPackVersion, PowerMode
from edge_dflash.checks.doctor_check import Check, fail, ok, warn
from edge_dflash.checks.doctor_facts import Facts

FIRST_CUDA = (13, 0)  # that the native backend's bindings speak
NO_JETSON = "not a Jetson"


def board(facts: Facts) -> Check:
    """Whether there is a profile of this board."""
    model, profile = facts.board.model, facts.profile
    if profile is not None:
        return ok("D001", f"{model}: {profile.name}")
    if model is None:
        return warn(
            "D001", "no device tree: this is no Jetson", "nothing on a workstation; on a Jetson flash Jetson Linux"
        )
    return warn("D001", f"{model}: no profile", "add one to jetson/, as its README says; only estimates depend on it")


def jetson_linux(facts: Facts) -> Check:
    """Whether the release is one of those that the board's profile knows."""
    if (release := facts.board.release) is None:
        if facts.profile is None or not facts.profile.jetpacks:
            return ok("D002", NO_JETSON)
        return warn("D002", "/etc/nv_tegra_release cannot be read", "sudo apt install nvidia-l4t-core")
    known = facts.profile.jetpacks if facts.profile else ()
    if (jetpack := _jetpack(facts)) is not None:
        return ok("D002", f"Jetson Linux {release}, JetPack {jetpack.jetpack}")
    names = ", ".join(f"{v.jetson_linux} (JetPack {v.jetpack})" for v in known) or "none for this board"
    return warn("D002", f"Jetson Linux {release} is not in the profile", f"flash one that is known: {names}")


def driver(facts: Facts) -> Check:
    """Whether CUDA's driver answers and is new enough."""
    backend = _backend(facts)
    if facts.device is None:
        judge = fail if backend in ("native", "tensorrt") else warn
        what, _, remedy = facts.device_error.partition("; ")
        return judge("D003", what, remedy or "install the NVIDIA driver; the reference backend runs without")
    version = ".".join(map(str, facts.device.cuda))
    if facts.device.cuda < FIRST_CUDA:
        judge = fail if backend in ("native", "tensorrt") else warn
        return judge("D003", f"the driver serves CUDA {version}", "flash JetPack 7, whose driver serves CUDA 13")
    return ok("D003", f"the driver serves CUDA {version}")


def gpu(facts: Facts) -> Check:
    """Whether there are kernels for the GPU."""
    if (device := facts.device) is None:
        return warn("D004", "no GPU", "see D003; a bundle of the reference backend needs none")
    where = "shares main memory" if device.integrated else "has memory of its own"
    found = f"{device.name}, SM {device.sm}, {where}"
    if arch_of_sm(device.sm) is None:
        return warn("D004", found, f"build for the CPU; there are kernels for {', '.join(ARCHS_OF['native'])}")
    if facts.profile is not None and facts.profile.sm != device.sm:
        return warn(
            "D004", found, f"the profile {facts.profile.name} says SM {facts.profile.sm}: correct it in jetson/"
        )
    return ok("D004", found)


def tensorrt(facts: Facts) -> Check:
    """Whether TensorRT is there where it is needed, and is the one of the JetPack."""
    manifest = facts.bundle.manifest if facts.bundle else None
    plans = manifest.plans if manifest else None
    module = plans.flavour if plans else TENSORRT.module
    version, jetpack = facts.tensorrt.get(module), _jetpack(facts)
    if version is None:
        if manifest and plans:
            flavour = next(flavour for flavour in FLAVOURS if flavour.module == module)
            judge = warn if manifest.runs_without_plans else fail
            return judge("D005", f"no {flavour.product}", flavour.install)
        return ok("D005", "none; only bundles of the tensorrt backend need it")
    if module == TENSORRT.module and jetpack is not None and not _same_release(version, jetpack.tensorrt):
        return warn(
            "D005",
            f"{version}; JetPack {jetpack.jetpack} ships {jetpack.tensorrt}",
            "use JetPack's own: remove the pip package, make the venv with --system-site-packages",
        )
    return ok("D005", version)


def power_mode(facts: Facts) -> Check:
    """Whether the board is in its fastest mode. It is reported, never set."""
    modes = facts.profile.power_modes if facts.profile else ()
    if facts.board.power_mode is None:
        if not modes:
            return ok("D006", "the board has no power modes that are known")
        return warn("D006", "nvpmodel has set no mode yet", "sudo nvpmodel -q tells it; sudo nvpmodel -m ID sets one")
    mode = facts.board.power_mode
    found = mode.name or f"mode {mode.id}"
    fastest = _fastest(modes)
    if fastest is None or fastest.id is None or mode.id == fastest.id:
        return ok("D006", found)
    remedy = f"if cooling and supply allow: sudo nvpmodel -m {fastest.id} ({fastest.name}); it may ask for a reboot"
    return warn("D006", f"{found}, not {fastest.name}", remedy)


def clocks(facts: Facts) -> Check:
    """Whether the clocks of GPU and memory may go as high as the hardware can."""
    seen = [clock for clock in (facts.board.clock("gpu"), facts.board.clock("memory")) if clock is not None]
    if not seen:
        return ok("D007", "clocks cannot be read here")
    texts = [
        f"{c.part} {(c.hz or 0) / 1e6:.0f} MHz"
        + (f" of {c.limit_hz / 1e6:.0f}" if c.limit_hz else "")
        + (", held" if c.locked else "")
        for c in seen
    ]
    if capped := [clock for clock in seen if clock.capped]:
        most = ", ".join(f"{clock.part} {(clock.most_hz or 0) / 1e6:.0f} MHz" for clock in capped)
        return warn("D007", "; ".join(texts), f"the hardware can do {most}: see D006; sudo jetson_clocks holds clocks")
    return ok("D007", "; ".join(texts))


def heat(facts: Facts) -> Check:
    """Whether something is slowed down for its heat or was for its current."""
    state = facts.board
    hot = "" if state.hottest is None else f"{state.hottest:.0f} degrees"
    watts = "" if state.watts is None else f"{state.watts:.1f} W"
    figures = ", ".join(text for text in (hot, watts) if text)
    if slowed := [name for name, on in state.throttling.items() if on]:
        return warn(
            "D008", f"throttled: {', '.join(slowed)}; {figures}", "cool the board, or choose a lower power mode"
        )
    if events := {name: count for name, count in state.over_current.items() if count}:
        counted = ", ".join(f"{name} {count}" for name, count in events.items())
        return warn(
            "D008",
            f"over-current or under-voltage since boot: {counted}; {figures}",
            "use the supply that the board asks for, or a lower power mode",
        )
    return ok("D008", figures or "temperatures cannot be read here")


def _backend(facts: Facts) -> str | None:
    """What runs the bundle."""
    return facts.bundle.manifest.backend if facts.bundle and facts.bundle.manifest else None


def _jetpack(facts: Facts) -> JetPackVersion | None:
    """The JetPack of the running release: 38.2.1 is of JetPack 7.0 as 38.2 is."""
    release = facts.board.release
    if release is None or facts.profile is None:
        return None
    return next((v for v in facts.profile.jetpacks if f"{release}.".startswith(f"{v.jetson_linux}.")), None)


def _same_release(found: str, wanted: str) -> bool:
    return f"{found}.".startswith(f"{wanted}.")


def _fastest(modes: tuple[PowerMode, ...]) -> PowerMode | None:
    rated = [mode for mode in modes if mode.watts is not None]
    return max(rated, key=lambda mode: mode.watts or 0, default=None)
