"""What the bits of the reference backend depend on besides model and input."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")


def arithmetic() -> str:
    """Library, processor, instruction set and threads in one line: where it is the same, results are equal bit for bit.

    Matrix products sum in another order with other vector widths or threads, and libraries pick kernels by maker.
    """
    processor = " ".join([platform.machine(), _maker(), torch.backends.cpu.get_cpu_capability()])
    return f"torch {torch.__version__}, {processor}, threads: {torch.get_num_threads()}"


def _maker() -> str:
    """Maker of the processor as Linux names it; empty when it does not."""
    try:
        lines = _CPU_INFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return ""
    found = [line.partition(":")[2].strip() for line in lines if line.startswith(("vendor_id", "CPU implementer"))]
    return found[0] if found else ""
