"""D014 to D017: whether a bundle is whole and belongs to this machine and this version."""

from __future__ import annotations

from edge_dflash.board.archs import arch_of_sm, find_arch
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.checks.doctor_check import Check, fail, ok, warn
from edge_dflash.checks.doctor_facts import BundleFacts, Facts


def files(bundle: BundleFacts) -> Check:
    """Whether the bundle can be read and its files are those of the manifest."""
    if bundle.error is not None:
        return fail("D014", bundle.error, "copy the bundle again, or build it again")
    assert bundle.manifest is not None
    how = "hashes compared" if bundle.hashed else "sizes compared; --hash compares contents"
    return ok("D014", f"{len(bundle.manifest.files)} files, {bundle.manifest.size / 1e9:.2f} GB, {how}")


def architecture(manifest: Manifest, facts: Facts) -> Check:
    """Whether what was built runs on this device."""
    built = f"built for {' and '.join(manifest.backends)} on {manifest.arch}"
    if manifest.backend == "reference":
        return ok("D015", built)
    sm = find_arch(manifest.arch).sm
    if facts.device is None:
        return fail(
            "D015", f"{built}; there is no GPU here", "build with --backend reference --arch cpu for this machine"
        )
    if sm != facts.device.sm:
        here = arch_of_sm(facts.device.sm)
        remedy = f"--backend {manifest.backend} --arch {here.name}" if here else "--backend reference --arch cpu"
        return fail("D015", f"{built}; this is SM {facts.device.sm}", f"build again with {remedy}")
    return ok("D015", built)


def kernels(manifest: Manifest, facts: Facts) -> Check:
    """Whether the compiled kernels are those that this version launches."""
    if (held := manifest.tools.get("kernels")) is None:
        return ok("D016", "holds no kernels")
    if held == facts.kernels:
        return ok("D016", held)
    return fail(
        "D016",
        f"holds kernels {held} of {manifest.created_by}, this version launches {facts.kernels}",
        f"install that version, or build again with {manifest.options}",
    )


def plans(bundle: BundleFacts, manifest: Manifest, facts: Facts) -> Check:
    """Whether the plans are there, and were built by the very TensorRT that is here; which backend runs, and why."""
    if (held := manifest.plans) is None:
        return ok("D017", "holds no plans")
    remedy = f"edge-dflash build --finish {bundle.path} on this board"
    if manifest.runs_without_plans:
        judge, runs = warn, f"; {manifest.backend} runs"
    else:
        judge, runs = fail, ""
        remedy += "; the installed service does so when it starts"
    if held.deferred:
        return judge("D017", f"{len(held.deferred)} of {len(held.names)} plans are yet to be built{runs}", remedy)
    count = f"{len(held.names)} plans of TensorRT {held.version}"
    here = facts.tensorrt.get(held.flavour)
    if here is None:
        return judge("D017", f"{count}, none is here{runs}", "see D005")
    if held.version != here and not f"{held.version}.".startswith(f"{here}."):
        return judge("D017", f"{count}, here is {here}{runs}", remedy)
    if manifest.standby and manifest.trial is None:
        return warn("D017", f"{count}; the backends were not timed{runs}", remedy)
    return ok("D017", count if manifest.trial is None else f"{count}; {manifest.trial.text}: {manifest.backend} runs")
