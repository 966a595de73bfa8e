"""D009 to D013: memory, swap, disk, the service, and access to the GPU."""

from __future__ import annotations

from edge_dflash.checks.doctor_check import Check, fail, ok, warn
from edge_dflash.checks.doctor_facts import SERVICE, Facts

SLACK = 512 << 20  # bytes that driver, tokenizer and interpreter take beside the pair
SWAPPED = 256 << 20  # bytes in swap from which on it is worth a word
LEAST_DISK = 1 << 30


def memory(facts: Facts) -> Check:
    """Whether what the bundle needs is to be had: MemAvailable against its budget."""
    state, bundle = facts.board.memory, facts.bundle
    if state is None:
        return warn("D009", "/proc/meminfo cannot be read", "mount /proc")
    found = f"{state.available / 1e9:.1f} of {state.total / 1e9:.1f} GB available"
    if bundle is None or bundle.needs_bytes is None:
        return ok("D009", found)
    needs = bundle.needs_bytes + SLACK
    found += f", the bundle needs {needs / 1e9:.1f}"
    if needs <= state.available:
        return ok("D009", found)
    if _active(facts):
        return ok("D009", f"{found}; the running service holds what is missing")
    if facts.device is not None and not facts.device.integrated:
        return ok("D009", f"{found}; the GPU has memory of its own")
    if needs > state.total:
        return fail("D009", found, "build with a smaller --max-context or a recipe of fewer bits (edge-dflash inspect)")
    return fail("D009", found, "close other programs (the desktop: sudo systemctl isolate multi-user.target)")


def swap(facts: Facts) -> Check:
    """Whether memory ran short before."""
    state = facts.board.memory
    if state is None or not state.swap_total:
        return ok("D010", "no swap")
    found = f"{state.swap_used / 1e6:.0f} of {state.swap_total / 1e6:.0f} MB used"
    if state.swap_used <= SWAPPED:
        return ok("D010", found)
    return warn(
        "D010", found, "memory ran short: close programs, then restart the service; its host side may wait on swap"
    )


def disk(facts: Facts) -> Check:
    """Whether an upgrade and saved sessions have room."""
    if facts.disk_free is None:
        return ok("D011", "no place to look at")
    found = f"{facts.disk_free / 1e9:.1f} GB free"
    if facts.disk_free < LEAST_DISK:
        return fail("D011", found, "free some: sessions cannot be saved (apt clean, journalctl --vacuum-size=100M)")
    size = facts.bundle.manifest.size if facts.bundle and facts.bundle.manifest else 0
    if facts.disk_free < size + LEAST_DISK:
        wanted = f"a copy of the bundle takes {size / 1e9:.1f} GB"
        return warn("D011", f"{found}; {wanted}", "free some before the next install, or install with --keep 1")
    return ok("D011", found)


def service(facts: Facts) -> Check:
    """What systemd says of the unit."""
    if facts.service is None:
        return warn("D012", "systemd does not answer", "start the service yourself: edge-dflash serve --config FILE")
    state = facts.service.get("ActiveState", "unknown")
    if facts.service.get("LoadState") == "not-found":
        return warn("D012", "not installed", "sudo edge-dflash service install BUNDLE")
    log = f"journalctl -b -u {SERVICE} tells why"
    said = f": {text}" if (text := facts.service.get("StatusText")) else ""
    if state == "failed":
        result = facts.service.get("Result", "unknown")
        return fail("D012", f"failed ({result}){said}", f"{log}; then sudo systemctl reset-failed {SERVICE}")
    restarts = facts.service.get("NRestarts", "0")
    found = f"{state} ({facts.service.get('SubState', '')}){said}"
    if restarts not in ("0", ""):
        return warn("D012", f"{found}; restarted {restarts} times", log)
    if state == "inactive":
        return warn("D012", found, f"sudo systemctl enable --now {SERVICE}")
    return ok("D012", found)


def nodes(facts: Facts) -> Check:
    """Whether this user may open the GPU."""
    if not facts.nodes:
        if facts.profile is None:
            return ok("D013", "no nodes of a GPU")
        return fail(
            "D013", "no nodes of a GPU in /dev", "the driver is not loaded: sudo apt install --reinstall nvidia-jetpack"
        )
    if shut := [name for name, usable in facts.nodes.items() if not usable]:
        found = f"{', '.join(shut)} cannot be opened by this user"
        return warn("D013", found, "sudo usermod -aG video,render $USER and log in again; the service has its own user")
    return ok("D013", f"{len(facts.nodes)} nodes can be opened")


def _active(facts: Facts) -> bool:
    return facts.service is not None and facts.service.get("ActiveState") in ("active", "activating", "reloading")
