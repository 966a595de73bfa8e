"""What the CUDA driver answers to a call, as errors of ours."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cu

from edge_dflash.errors import BackendError, DeviceLostError

_LASTING = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *("ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "INVALID_PC"),
        *("MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "LAUNCH_FAILED", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE"),
        *("CONTAINED", "CONTEXT_IS_DESTROYED", "DEVICE_UNAVAILABLE", "EXTERNAL_DEVICE", "UNKNOWN"),
    )
)
"""Statuses after which a context is of no use any more."""


def check(result: tuple[Any, ...], doing: str) -> Any:
    """Value of a driver call; raises BackendError with the driver's words when it failed."""
    status, *values = result
    if status != cu.CUresult.CUDA_SUCCESS:
        said = (cu.cuGetErrorName(status), cu.cuGetErrorString(status))
        words = " ".join(text.decode() for _, text in said if text)
        lost = getattr(status, "name", "") in _LASTING
        raise (DeviceLostError if lost else BackendError)(f"{doing} failed: {words or status}")
    return values[0] if len(values) == 1 else tuple(values)
