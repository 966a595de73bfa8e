"""Weights of a checkpoint in the formats that a recipe chose: checked, copied as they are, quantized, or repacked.

Works on the weights of one file of the bundle at a time; linears that a kernel reads together share one NVFP4 global
scale. In a native bundle they are repacked one stack at a time; never more than one is in memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch

from edge_dflash.bundle.parts import SCALE, Part, Tensor, data_name, whole, wide_first
from edge_dflash.errors import BuildError, CheckpointError
from edge_dflash.weights.formats import (
    BLOCK,
    Array,
    Fp8Weight,
    Nvfp4Weight,
    Weight,
    WeightFormat,
    WeightStore,
    WideWeight,
)
from edge_dflash.weights.layout import Repacked, Words, pack, row_blocks, shared_part
from edge_dflash.weights.quantize import ENCODERS, Rounder, absmax, dequantize, fused_group, quantize_nvfp4, wide_tensor
from edge_dflash.weights.safetensors import forget_pages
from edge_dflash.weights.stacks import ExpertStack, Stack

ROW_BLOCK = 8 << 20  # bytes of a wide matrix that one call reads
AHEAD = 4  # blocks of rows that are repacked while the one before them is written
Converter: TypeAlias = "partial[dict[str, Weight]]"  # convert, but for names and run
Choose: TypeAlias = Callable[[str], Rounder | None]  # by a weight's name; None: block scales of max / 6
Run: TypeAlias = Callable[[Callable[[slice], float], Iterable[slice]], Iterable[float]]


def by_max(name: str) -> None:
    """The block scales of every weight are those of max / 6."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: small models make threads wait for each other, and a sum's order follows them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def weight_tensors(
    part: Part,
    store: WeightStore,
    formats: Mapping[str, WeightFormat],
    input_scales: Mapping[str, float],
    pool: Executor,
    words: Words = "shared",
    *,
    again: bool = False,
    choose: Choose = by_max,
) -> list[Tensor]:
    """Tensors of one weight file; a stack is converted and repacked when its bytes are asked for, one at a time.

    Raises CheckpointError and BuildError as :func:`convert`.
    """
    weights = convert(store, part.names, formats, input_scales, pool.map, again=again, choose=choose)
    make = partial(convert, store, formats=formats, input_scales={}, again=again, choose=choose)
    single = sorted((t for name, weight in weights.items() for t in whole(name, weight)), key=wide_first)
    stacks = [tensor for stack in part.stacks for tensor in _stack_tensors(stack, make, pool, words)]
    split = sum(tensor.kind == "F32" for tensor in single)  # two-byte vectors come last: scales stay aligned
    return [*single[:split], *stacks, *single[split:]]


def convert(
    store: WeightStore,
    names: Sequence[str],
    formats: Mapping[str, WeightFormat],
    input_scales: Mapping[str, float],
    run: Run = map,
    *,
    again: bool = False,
    choose: Choose = by_max,
) -> dict[str, Weight]:
    """Weights ``names`` in their formats, in the order given; all members of a fused group must be among the names.

    ``input_scales`` are the W4A4 activation scales; other NVFP4 weights lose theirs, so that their inputs stay wide.
    ``run`` is :func:`map` or the ``map`` of an executor; its calls work on different rows. ``again``: FP8 weights may
    be rounded a second time, to NVFP4. ``choose``: what chooses a weight's block scales.
    Raises CheckpointError for NaN and infinity and BuildError for what cannot be quantized, naming the weight.
    """
    stored = {name: store.get(name) for name in names}
    largest = {name: check_finite(name, weight, run) for name, weight in stored.items()}
    for name, weight in stored.items():
        if again and isinstance(weight, Fp8Weight) and formats[name] == "nvfp4":
            largest[name] = _amax(weight, run)
    weights: dict[str, Weight] = {}
    for name, weight in stored.items():
        try:
            if weight.format != formats[name]:
                amax = _group_amax(name, stored, formats, largest)
                weight = _quantized(weight, formats[name], amax, choose(name), run, again=again)
        except BuildError as error:
            raise BuildError(f"{name}: {error}") from None
        if isinstance(weight, Nvfp4Weight):
            weight = replace(weight, input_scale=input_scales.get(name))
        weights[name] = weight
    return weights


def check_finite(name: str, weight: Weight, run: Run = map) -> float:
    """Return the largest magnitude of a wide weight (0.0 for others). Raises CheckpointError for NaN and infinity."""
    if isinstance(weight, WideWeight):
        matrix = weight.data.reshape(-1, weight.data.shape[-1])

        largest = _amax(WideWeight(matrix), run)
        if not math.isfinite(largest):
            raise _not_finite(name, "NaN or infinity")
        return largest
    if weight.damaged():
        raise _not_finite(name, "an FP8 NaN, or a scale that is negative or no number")
    return 0.0


def _amax(weight: WideWeight | Fp8Weight, run: Run) -> float:
    """Largest magnitude of a matrix; NaN or infinity when it holds one."""

    def block(rows: slice) -> float:
        found = absmax(_values(weight, rows))
        forget_pages(weight.data[rows])
        return found

    found = list(run(block, _row_blocks(weight.data)))
    return next((amax for amax in found if not math.isfinite(amax)), max(found, default=0.0))


def _values(weight: WideWeight | Fp8Weight, rows: slice) -> torch.Tensor:
    """Some rows, as BF16 or float32."""
    if isinstance(weight, WideWeight):
        return wide_tensor(WideWeight(weight.data[rows]))
    return dequantize(weight.rows(rows))


def _group_amax(
    name: str, stored: Mapping[str, Weight], formats: Mapping[str, WeightFormat], largest: Mapping[str, float]
) -> float:
    """max|W| over the linears of the fused group that are quantized here, those stored as NVFP4 left out."""
    members = [member for member in fused_group(name) if member in stored and formats[member] == "nvfp4"]
    return max((largest[m] for m in members if not isinstance(stored[m], Nvfp4Weight)), default=0.0)


def _quantized(
    weight: Weight, form: WeightFormat, amax: float, choose: Rounder | None, run: Run, *, again: bool
) -> Weight:
    if again and form == "nvfp4" and isinstance(weight, Fp8Weight):
        return _nvfp4(weight, amax, choose, run)
    if not isinstance(weight, WideWeight):
        raise BuildError(f"stored as {weight.format}, wanted {form}: a quantized weight is not converted")
    if form == "nvfp4":
        return _nvfp4(weight, amax, choose, run)
    if form not in ENCODERS:
        raise BuildError(f"stored as {weight.format}, which is not converted to {form}")
    return ENCODERS[form](wide_tensor(weight))


def _nvfp4(weight: WideWeight | Fp8Weight, amax: float, choose: Rounder | None, run: Run) -> Nvfp4Weight:
    """NVFP4 in blocks of rows: with a given amax a row's codes depend on that row only."""
    n, k = weight.shape
    packed, block_scale = np.empty((n, k // 2), np.uint8), np.empty((n, k // BLOCK), np.uint8)

    def block(rows: slice) -> float:
        part = quantize_nvfp4(_values(weight, rows), amax, choose)
        packed[rows], block_scale[rows] = part.packed, part.block_scale
        forget_pages(weight.data[rows])
        return part.global_scale

    global_scales = list(
        run(block, _row_blocks(weight.data, choose.rows if choose else 1))
    )  # all equal: they depend on amax only
    return Nvfp4Weight(packed, block_scale, global_scales[0])


def _row_blocks(matrix: Array, multiple: int = 1) -> Iterator[slice]:
    """Slices of consecutive rows of about ROW_BLOCK bytes, so that a mapped matrix is never in memory as a whole."""
    step = multiple * max(1, ROW_BLOCK // max(1, multiple * matrix.shape[-1] * matrix.itemsize))
    for first in range(0, matrix.shape[0], step):
        yield slice(first, first + step)


def _not_finite(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{name} holds {what}; the checkpoint is damaged, download it again")


def _ahead(pool: Executor, makers: Iterator[Callable[[], Repacked]]) -> Iterator[Repacked]:
    """What they make, in order; the pool is at work on the next ones all the time."""
    pending = deque(pool.submit(make) for make in islice(makers, AHEAD))
    while pending:
        made = pending.popleft().result()
        pending.extend(pool.submit(make) for make in islice(makers, 1))
        yield made


def _stack_weights(stack: Stack, make: Converter, pool: Executor) -> tuple[Weight, ...]:
    """A stack's weights in their formats, with the global scales that they share with weights of other stacks."""
    made: dict[str, Weight] = {}
    for name in stack.names:
        if name not in made:
            group = tuple(member for member in fused_group(name) if member in make.keywords["formats"])
            made |= {member: weight for member, weight in make(group, run=pool.map).items() if member in stack.names}
    return tuple(made[name] for name in stack.names)


def _stack_tensors(stack: Stack, make: Converter, pool: Executor, words: Words) -> tuple[Tensor, Tensor]:
    """Bytes and scales of a stack, to be written in this order: its scales are known when all bytes are made."""
    scales: list[Array] = []

    def data() -> Iterator[Array]:
        scales.clear()
        for packed in _ahead(pool, _packers(stack, make, pool, words)):
            scales.append(packed.scale)
            yield packed.data

    return (
        Tensor(f"{stack.key}.{data_name(stack, words)}", "U8", (stack.nbytes,), data),
        Tensor(f"{stack.key}.{SCALE}", "F32", (stack.rows,), lambda: (np.concatenate(scales),)),
    )


def _packers(stack: Stack, make: Converter, pool: Executor, words: Words) -> Iterator[Callable[[], Repacked]]:
    """What packs each block of rows; of experts each member, which is read and quantized when its turn comes."""
    if not isinstance(stack, ExpertStack):
        for block in row_blocks(_stack_weights(stack, make, pool), stack.layout):
            yield partial(pack, block, words)
        return

    def weights(names: tuple[str, ...]) -> tuple[Weight, ...]:
        """An expert's gate and up, which are a fused group, or its down."""
        return tuple(make(names).values())

    for expert in range(stack.experts):
        yield partial(lambda names: pack(weights(names), words), stack.expert(expert))
    if stack.parts:
        shared = weights(stack.expert(stack.experts))
        for part in range(stack.parts):
            yield partial(pack, shared_part(shared, stack.layout, part), words)
