"""What PTX says of kernels, and of the left operands of warpgroup products. Needs NVRTC, and no GPU."""

import re
from collections import defaultdict
from functools import cache

from cubin_support import ptx

_DEFINED = re.compile(r"^\s*(?:@!?%p\d+ )?([a-z][\w.:]*)\s+(\{[^}]*\}|%r\d+(?:\|%\w+)?),", re.M)
_PRODUCT = re.compile(r"wgmma\.mma_async[^{]*\{[^}]*\}, \{([^}]*)\}")


@cache
def kernels_ptx(unit, arch="sm90a"):
    """PTX of every kernel of a unit, by name."""
    return {body.split("(")[0].strip(): body for body in ptx(unit, arch).split(".entry ")[1:]}


def left_operands(ptx):
    """For each register of a left operand of each product: the instructions that define it."""
    definitions = defaultdict(list)
    for operation, registers in _DEFINED.findall(ptx):
        for register in re.findall(r"%r\d+", registers):
            definitions[register].append(operation)
    return [tuple(definitions[r]) for product in _PRODUCT.findall(ptx) for r in product.split(",")]


def word_loads(ptx):
    """The instructions that load a 32-bit integer from where a parameter points, or from a slot's words behind it."""
    pointers = set(re.findall(r"ld\.param\.u64\s+(%rd\d+), \[\w+\];", ptx))
    pointers |= {to for to, of in re.findall(r"cvta\.to\.global\.u64\s+(%rd\d+), (%rd\d+);", ptx) if of in pointers}
    slots = {"%ctaid.y", "%ctaid.z"}  # and multiples
    for to, of in re.findall(r"(?:mov\.u32|shl\.b32|selp\.b32|and\.b64|mul\.wide\.[su]32)\s+(%rd?\d+), ([%\w.]+)", ptx):
        slots |= {to} if of in slots else set()
    for more in (slots, {"4", "8", "12", "16"}):
        sums = re.findall(r"add\.s64\s+(%rd\d+), (%rd\d+), (%rd\d+|\d+);", ptx)
        pointers |= {to for to, of, offset in sums if of in pointers and offset in more}
    loads = re.findall(r"(ld\.global[\w.]*[sub]32)\s+%r\d+, \[(%rd\d+)\];", ptx)
    return [operation for operation, pointer in loads if pointer in pointers]
