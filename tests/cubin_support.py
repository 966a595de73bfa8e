"""Cubins for tests, and what a cubin says of its kernels: registers and stack, from the ELF sections of the driver."""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

from edge_dflash.backends.native.compile import KERNELS, compile_cubin

_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE = 0x2F, 0x11, 0x12
_SYMTAB = 2


CACHE = Path(__file__).parents[1] / "build" / "cubins"  # git-ignored


def state_cubin(unit, arch):
    """The cubin of a unit that includes state.cuh alone; compiled once for each state of the two sources."""
    sources = (KERNELS / f"{unit}.cu").read_bytes() + (KERNELS / "state.cuh").read_bytes()
    path = CACHE / f"{unit}-{arch}-{hashlib.sha256(sources).hexdigest()[:16]}.cubin"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compile_cubin(unit, arch))
    return path.read_bytes()


@dataclass
class KernelUse:
    registers: int = 0
    stack_bytes: int = 0  # arrays and spilled registers in local memory


def kernel_use(cubin):
    """Use of every kernel of a 64-bit cubin, by name."""
    sections = _sections(cubin)
    symbols = _symbols(cubin, sections)
    found = {}
    for name, _, offset, size, _ in sections:
        if name != ".nv.info":
            continue
        at, stop = offset, offset + size
        while at < stop:
            form, attribute, length = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form != 4:  # the value lies in the length field
                continue
            if attribute in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
                symbol, value = struct.unpack_from("<II", cubin, at)
                use = found.setdefault(symbols[symbol], KernelUse())
                if attribute == _REGCOUNT:
                    use.registers = value
                else:
                    use.stack_bytes = max(use.stack_bytes, value)
            at += length
    return {name: use for name, use in found.items() if not name.startswith("$")}  # slow paths of divisions


def _sections(elf):
    """(name, type, offset, size, link) of every section."""
    assert elf[:5] == b"\x7fELF\x02"
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    raw = [struct.unpack_from("<IIQQQQII", elf, table + i * entry) for i in range(count)]
    text = raw[names][4]
    return [(_string(elf, text + r[0]), r[1], r[4], r[5], r[6]) for r in raw]


def _symbols(elf, sections):
    for _, kind, offset, size, link in sections:
        if kind == _SYMTAB:
            strings = sections[link][2]
            return [
                _string(elf, strings + struct.unpack_from("<I", elf, at)[0]) for at in range(offset, offset + size, 24)
            ]
    return []


def _string(elf, at):
    return elf[at : elf.index(b"\0", at)].decode()
