"""Whether a device runs a bundle and the native kernels take a pair: asked before a byte is written or loaded.

Attention, gated delta and linears are asked in their own terms, op by op; what no kernel would act on is refused by
:mod:`edge_dflash.backends.cuda.honoured`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edge_dflash.backends.cuda.honoured import check_honoured, check_programs
from edge_dflash.backends.cuda.kernels.attend import AttendShape
from edge_dflash.backends.cuda.kernels.delta import DeltaShape
from edge_dflash.backends.cuda.kernels.experts import ExpertsShape
from edge_dflash.backends.cuda.kernels.splits import block_shared, choose_splits
from edge_dflash.backends.cuda.kernels.tower import check_tower
from edge_dflash.backends.cuda.kernels.walk import WalkShape
from edge_dflash.board.archs import arch_of_sm, find_arch
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Attend, Embed, Experts, GatedDelta, GroupedConv, KvAppend, Linear, Op, Walk
from edge_dflash.model.program import PairPrograms, Program
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import BLOCK, FORMATS, WeightFormat, WeightStore, WideWeight
from edge_dflash.weights.layout import Layout
from edge_dflash.weights.safetensors import forget_pages
from edge_dflash.weights.stacks import pair_stacks

REMEDY = "build it with --backend reference --arch cpu"
_BLOCK_BYTES = 8 << 20  # of float32 values that are looked at together


def check_native(
    pair: PairSpec,
    formats: Mapping[str, WeightFormat],
    *,
    arch: str | None = None,
    kv: Literal["fp8", "bfloat16"] = "fp8",
) -> None:
    """Raise BackendError, naming op or weight, what was found and what is taken, unless native kernels run the pair.

    ``formats`` names every weight. ``arch`` adds the limits of one architecture (shared memory of a block).
    """
    programs, rows = pair_programs(pair), pair.drafts + 1
    if pair.target.vision is not None:
        try:
            check_tower(pair.target.vision)
            check_honoured(pair.target.vision)
        except BackendError as error:
            raise BackendError(f"{error}; leave it out with --text-only, or {REMEDY}") from None
    try:
        check_programs(programs)
    except BackendError as error:
        raise BackendError(f"{error}; {REMEDY}") from None
    for program in (programs.verify, programs.propose, programs.prefill, *((programs.see,) if programs.see else ())):
        for op in program.ops:
            try:
                _check_op(op, program, formats, rows, kv)
            except BackendError as error:
                raise BackendError(f"{op.output}: {error}; {REMEDY}") from None
    for stack in pair_stacks(programs, formats).values():
        if arch is not None:
            _check_shared(stack.names[0], stack.layout, rows, arch)


def narrowed(
    formats: Mapping[str, WeightFormat], programs: PairPrograms, store: WeightStore
) -> dict[str, WeightFormat]:
    """Formats of a native bundle: float32 linears, embedding and matrices of a walk become BF16, which must hold them.

    Raises BackendError naming the weight.
    """
    found = dict(formats)
    for name, spec in programs.weights.items():
        if spec.kind in ("linear", "embedding", "walk") and found[name] == "f32":
            weight = store.get(name)
            if not isinstance(weight, WideWeight) or not _fits_bf16(weight):
                raise BackendError(
                    f"{name} holds float32 values that BF16 cannot hold, the native kernels take BF16; "
                    "convert the checkpoint to bfloat16, or " + REMEDY
                )
            found[name] = "bf16"
    return found


def _check_op(
    op: Op, program: Program, formats: Mapping[str, WeightFormat], rows: int, kv: Literal["fp8", "bfloat16"]
) -> None:
    match op:
        case Linear():
            inputs = program.weights[op.weight].shape[1]
            if inputs % BLOCK:
                raise BackendError(f"a linear has {inputs} inputs; the native kernels take multiples of {BLOCK}")
        case Embed():
            if formats[op.weight] not in FORMATS or FORMATS[formats[op.weight]].quantized:
                raise BackendError(f"the embedding is {formats[op.weight]}; the native kernels gather BF16 rows")
        case Attend():
            AttendShape(op.heads, op.kv_heads, op.head_dim, op.rope.dims, op.eps, 0, rows, kv=kv)
        case KvAppend():
            AttendShape(op.kv_heads, op.kv_heads, op.head_dim, op.rope.dims, op.eps, 0, rows, kv=kv)
        case GatedDelta():
            DeltaShape(op.key_heads, op.value_heads, op.key_dim, op.value_dim, op.conv_kernel, op.eps, rows)
        case GroupedConv():
            if (columns := program.columns[op.inputs[0]]) % 2:
                raise BackendError(f"a convolution has {columns} columns; the native kernels take even numbers")
        case Experts():
            _check_experts(op, program, formats)
        case Walk():
            WalkShape(op, rows - 1, program.columns[op.inputs[0]], program.columns[op.inputs[1]])


def _check_experts(op: Experts, program: Program, formats: Mapping[str, WeightFormat]) -> None:
    inner, hidden = program.weights[op.gates[0]].shape
    wide = program.weights[op.shared.gate].shape[0] if op.shared else 0
    if wide % inner:
        raise BackendError(f"the shared expert has {wide} rows; the native kernels take a multiple of {inner}")
    ExpertsShape(hidden, len(op.gates), op.top_k, inner, wide // inner, op.renormalised, "bf16", "bf16")
    for name in (op.router, *((op.shared.judge,) if op.shared else ())):
        if FORMATS[formats[name]].quantized:
            raise BackendError(f"{name} is {formats[name]}; the native kernels read routers in BF16")


def _check_shared(name: str, layout: Layout, rows: int, arch: str) -> None:
    sm = find_arch(arch).sm
    needed, most = choose_splits(layout, rows, sm, 1).shared_bytes, block_shared(sm)
    if needed > most:
        raise BackendError(
            f"{name}: {layout.format} linears with blocks of {rows} rows need {needed} bytes of shared memory, {arch} "
            f"has {most}; use another format there, a drafter with blocks of at most 16, or {REMEDY}"
        )


def _fits_bf16(weight: WideWeight) -> bool:
    """Whether the low 16 bits of all values are zero."""
    flat = weight.data.reshape(-1)
    for start in range(0, flat.size, _BLOCK_BYTES // 4):
        block = flat[start : start + _BLOCK_BYTES // 4]
        if (np.ascontiguousarray(block, np.float32).view(np.uint32) & 0xFFFF).any():
            return False
        forget_pages(block)
    return True


_REFERENCE = "build it with --backend reference --arch cpu to run it on a CPU"


@dataclass(frozen=True)
class DeviceFacts:
    """What the driver says of a device before anything is loaded."""

    name: str
    sm: int  # 90 for Hopper
    cuda: tuple[int, int]  # newest CUDA that the driver serves
    integrated: bool  # shares main memory with the CPU


def device_facts() -> DeviceFacts:
    """Facts of the device; makes no context. Raises BackendError without bindings, driver or device."""
    from edge_dflash.backends.cuda.driver import describe, open_device  # needs CUDA's bindings

    return DeviceFacts(*describe(open_device()))


def device_sm() -> int:
    """SM of the device. Raises BackendError as :func:`device_facts` does."""
    return device_facts().sm


def shares_memory() -> bool:
    """Whether the device works in the CPU's memory, as those of Jetsons do; False without a device."""
    try:
        return device_facts().integrated
    except BackendError:
        return False


def check_arch(arch: str, sm: int, where: str, backend: str = "native") -> None:
    """Raise BackendError unless kernels for ``arch`` run on a device of ``sm``: those of other SMs do not load."""
    built, here = find_arch(arch), arch_of_sm(sm)
    if built.sm == sm:
        return
    remedy = f"build it again with --backend {backend} --arch {here.name}" if here else _REFERENCE
    raise BackendError(f"{where} was built for {arch}, which runs on SM {built.sm}; this device is SM {sm}: {remedy}")
