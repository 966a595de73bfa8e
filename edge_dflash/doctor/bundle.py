"""D014 to D017: whether a bundle is whole and belongs to this machine and this version."""

from __future__ import annotations

from edge_dflash.backends.native.arch import arch_sm
from edge_dflash.backends.native.compile import ARCHS
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.doctor.check import Check, fail, ok
from edge_dflash.doctor.facts import BundleFacts, Facts


def files(bundle: BundleFacts) -> Check:
    """Whether the bundle can be read and its files are those of the manifest."""
    if bundle.error is not None:
        return fail("D014", bundle.error, "copy the bundle again, or build it again")
    assert bundle.manifest is not None
    how = "hashes compared" if bundle.hashed else "sizes compared; --hash compares contents"
    return ok("D014", f"{len(bundle.manifest.files)} files, {bundle.manifest.size / 1e9:.2f} GB, {how}")


def architecture(manifest: Manifest, facts: Facts) -> Check:
    """Whether what was built runs on this device."""
    built = f"built for {manifest.backend} on {manifest.arch}"
    if manifest.backend == "reference":
        return ok("D015", built)
    sm = arch_sm(manifest.arch)
    if facts.device is None:
        return fail(
            "D015", f"{built}; there is no GPU here", "build with --backend reference --arch cpu for this machine"
        )
    if sm != facts.device.sm:
        here = next((name for name in ARCHS if arch_sm(name) == facts.device.sm), None)
        remedy = f"--backend {manifest.backend} --arch {here}" if here else "--backend reference --arch cpu"
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
        f"install that version, or build again with --backend {manifest.backend} --arch {manifest.arch}",
    )


def plans(bundle: BundleFacts, manifest: Manifest, facts: Facts) -> Check:
    """Whether the plans are there, and were built by the very TensorRT that is here."""
    if (held := manifest.plans) is None:
        return ok("D017", "holds no plans")
    remedy = f"edge-dflash build --finish {bundle.path} on this board; the installed service does so when it starts"
    if held.deferred:
        return fail("D017", f"{len(held.deferred)} of {len(held.names)} plans are yet to be built", remedy)
    here = facts.tensorrt.get(held.flavour)
    if here is None:
        return fail("D017", f"{len(held.names)} plans of TensorRT {held.version}, none is here", "see D005")
    if held.version != here and not f"{held.version}.".startswith(f"{here}."):
        return fail("D017", f"{len(held.names)} plans of TensorRT {held.version}, here is {here}", remedy)
    return ok("D017", f"{len(held.names)} plans of TensorRT {held.version}")
