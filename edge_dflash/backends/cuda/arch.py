"""Which device a native bundle runs on: the SM of its arch, the SM of this machine, and whether they are the same."""

from __future__ import annotations

from dataclasses import dataclass

from edge_dflash.board.archs import arch_of_sm, find_arch
from edge_dflash.errors import BackendError

_REFERENCE = "build it with --backend reference --arch cpu to run it on a CPU"


def device_sm(ordinal: int = 0) -> int:
    """SM of a device, 90 for Hopper; makes no context. Raises BackendError without bindings, driver or device."""
    return device_facts(ordinal).sm


@dataclass(frozen=True)
class DeviceFacts:
    """What the driver says of a device before anything is loaded."""

    name: str
    sm: int  # 90 for Hopper
    cuda: tuple[int, int]  # newest CUDA that the driver serves
    integrated: bool  # shares main memory with the CPU


def device_facts(ordinal: int = 0) -> DeviceFacts:
    """Facts of a device; makes no context. Raises BackendError without bindings, driver or device."""
    try:
        from cuda.bindings import driver as cu
    except ModuleNotFoundError as error:
        raise BackendError(
            f"the native backend needs {error.name}; install it with: pip install 'edge-dflash[cuda]'"
        ) from None
    try:
        status, *_ = cu.cuInit(0)
    except Exception as error:  # the bindings raise types of their own when there is no driver library
        raise BackendError(f"no NVIDIA driver was found ({type(error).__name__}); install the driver") from None
    if status != cu.CUresult.CUDA_SUCCESS:
        raise BackendError(f"the NVIDIA driver found no usable device ({status.name}); check nvidia-smi")
    attributes = cu.CUdevice_attribute
    parts = (
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        attributes.CU_DEVICE_ATTRIBUTE_INTEGRATED,
    )
    status, device = cu.cuDeviceGet(ordinal)
    if status != cu.CUresult.CUDA_SUCCESS:
        raise BackendError(f"CUDA device {ordinal} cannot be opened ({status.name}); check nvidia-smi")
    major, minor, integrated = (int(cu.cuDeviceGetAttribute(part, device)[1]) for part in parts)
    version = int(cu.cuDriverGetVersion()[1])  # 13020 for 13.2
    name = str(cu.cuDeviceGetName(128, device)[1].split(b"\0")[0].decode())
    return DeviceFacts(name, 10 * major + minor, (version // 1000, version % 1000 // 10), bool(integrated))


def shares_memory(ordinal: int = 0) -> bool:
    """Whether a device works in the CPU's memory, as those of Jetsons do; False without a device."""
    try:
        return device_facts(ordinal).integrated
    except BackendError:
        return False


def check_arch(arch: str, sm: int, where: str, backend: str = "native") -> None:
    """Raise BackendError unless kernels for ``arch`` run on a device of ``sm``: those of other SMs do not load."""
    built, here = find_arch(arch), arch_of_sm(sm)
    if built.sm == sm:
        return
    remedy = f"build it again with --backend {backend} --arch {here.name}" if here else _REFERENCE
    raise BackendError(f"{where} was built for {arch}, which runs on SM {built.sm}; this device is SM {sm}: {remedy}")
