"""What a cubin says of its kernels: registers, shared memory and stack, from the ELF sections that the driver reads."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from edge_dflash.errors import BackendError

_SYMBOL_TABLE = 2
_REGISTERS, _FRAME_SIZE, _MIN_STACK_SIZE = 0x2F, 0x11, 0x12  # attributes of .nv.info
_WORDS_FOLLOW = 4  # form of an attribute whose value lies behind it
_INFO, _SHARED = ".nv.info", ".nv.shared."


@dataclass
class KernelUse:
    """What one kernel needs of a multiprocessor, besides dynamic shared memory."""

    registers: int = 0  # of a thread
    stack_bytes: int = 0  # arrays and spilled registers in local memory, of a thread
    shared_bytes: int = 0  # static, of a block


def kernel_use(cubin: bytes) -> dict[str, KernelUse]:
    """Use of every kernel of a 64-bit cubin, by name. Raises BackendError for bytes that are no cubin."""
    try:
        return _kernel_use(cubin)
    except (struct.error, ValueError, IndexError, UnicodeDecodeError):
        raise BackendError("these bytes are no cubin: wanted a 64-bit ELF file with its sections whole") from None


def _kernel_use(cubin: bytes) -> dict[str, KernelUse]:
    sections = _sections(cubin)
    symbols = _symbols(cubin, sections)
    found: dict[str, KernelUse] = {}
    for name, _, at, size, _ in sections:
        stop = at + size
        while name == _INFO and at < stop:
            form, attribute, length = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form != _WORDS_FOLLOW:  # the value lies in the length field
                continue
            if attribute in (_REGISTERS, _FRAME_SIZE, _MIN_STACK_SIZE):
                symbol, value = struct.unpack_from("<II", cubin, at)
                use = found.setdefault(symbols[symbol], KernelUse())
                if attribute == _REGISTERS:
                    use.registers = value
                else:
                    use.stack_bytes = max(use.stack_bytes, value)
            at += length
    kernels = {name: use for name, use in found.items() if not name.startswith("$")}  # slow paths of divisions
    for name, _, _, size, _ in sections:
        if name.startswith(_SHARED) and name.removeprefix(_SHARED) in kernels:
            kernels[name.removeprefix(_SHARED)].shared_bytes = size
    return kernels


def _sections(elf: bytes) -> list[tuple[str, int, int, int, int]]:
    """(name, type, offset, size, link) of every section."""
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    raw = [struct.unpack_from("<IIQQQQII", elf, table + i * entry) for i in range(count)]
    text = raw[names][4]
    return [(_string(elf, text + r[0]), r[1], r[4], r[5], r[6]) for r in raw]


def _symbols(elf: bytes, sections: list[tuple[str, int, int, int, int]]) -> list[str]:
    for _, kind, offset, size, link in sections:
        if kind == _SYMBOL_TABLE:
            strings = sections[link][2]
            return [
                _string(elf, strings + struct.unpack_from("<I", elf, at)[0]) for at in range(offset, offset + size, 24)
            ]
    return []


def _string(elf: bytes, at: int) -> str:
    return elf[at : elf.index(b"\0", at)].decode()
