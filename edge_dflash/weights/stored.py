"""How modules of a checkpoint are stored: wide, FP8, NVFP4 and integers, by ModelOpt and compressed-tensors; experts.

The tensors decide: what would be misread of them is refused by name, type or shape.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from edge_dflash.errors import CheckpointError
from edge_dflash.weights.formats import BLOCK, Array, Fp8Weight, Nvfp4Weight, Weight, WideWeight, bf16_to_f32
from edge_dflash.weights.safetensors import DTYPES, Entry, TensorFiles

KV_SCALE = (1e-6, 1e3)  # outside, real keys and values would all be 0 or 448
_FORMS: Mapping[str, tuple[str, ...]] = {
    "compressed-tensors INT4": ("weight_packed", "weight_scale", "weight_shape"),
    "compressed-tensors NVFP4": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "ModelOpt NVFP4": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "FP8": ("weight", "weight_scale", "input_scale"),
}
"""What a linear module may be stored as: its tensors, each named by the module's path, a dot and one of these."""
_REFUSED = ("weight_zero_point", "weight_g_idx")  # of forms that are not read
SUFFIXES = tuple(dict.fromkeys([*(suffix for form in _FORMS.values() for suffix in form), *_REFUSED]))

PER_WORD = 8
_ZERO = 8  # code of 0
_AT_ONCE = 1 << 22  # made at a time


class Int4Weight(WideWeight):
    """A linear [out, in] of 4-bit integers, read as BF16 values. No kernel computes with it: to a recipe it is BF16.

    compressed-tensors' "pack-quantized" (W4A16): ``weight_packed`` int32 holds eight integers plus 8 each, the first in
    the lowest bits; ``weight_scale`` [out, groups] belongs to ``in / groups`` inputs that follow each other. ``data``
    is made when it is first asked for.
    """

    def __init__(self, packed: Array, scale: Array) -> None:
        """``packed`` int32 [out, in / 8]; ``scale`` float32 [out, groups]."""
        object.__setattr__(self, "packed", packed)
        object.__setattr__(self, "scale", scale)

    packed: Array
    scale: Array

    @property
    def format(self) -> str:
        """That of the values."""
        return "bf16"

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`~edge_dflash.weights.formats.Weight`."""
        return (self.packed.shape[0], self.packed.shape[1] * PER_WORD)

    @cached_property
    def data(self) -> Array:
        """BF16 bit patterns [out, in]: code times scale, rounded to nearest even as engines that compute in BF16 do."""
        rows, columns = self.shape
        values = np.empty((rows, columns), np.uint16)
        step = max(1, _AT_ONCE // max(columns, 1))
        for first in range(0, rows, step):
            part = slice(first, first + step)
            values[part] = _bf16_values(self.packed[part], self.scale[part])
        return values

    def rows(self, rows: slice) -> WideWeight:
        """Some rows."""
        return Int4Weight(self.packed[rows], self.scale[rows])


def _bf16_values(packed: Array, scale: Array) -> Array:
    pairs = np.ascontiguousarray(packed, "<i4").view(np.uint8)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(packed), -1)
    groups = codes.reshape(len(packed), scale.shape[1], -1).astype(np.float32) - _ZERO
    bits = (groups * scale[:, :, None]).reshape(codes.shape).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


class ModuleReader:
    """Reads modules of one checkpoint by the path that they have in its files."""

    def __init__(self, tensors: TensorFiles) -> None:
        self._tensors = tensors

    def wide(self, tensor: str, shape: tuple[int, ...], *, half: bool = False) -> WideWeight:
        """Unquantized tensor; ``half`` accepts F16 (small tensors only: it is widened to float32 in memory).

        Raises CheckpointError for another shape or dtype.
        """
        kind, data = self._array(tensor, shape)
        if half and kind == "F16":
            return WideWeight(data.astype(np.float32))
        if kind not in ("BF16", "F32"):
            raise self._error(tensor, f"dtype {kind}", f"BF16{', F32 or F16' if half else ' or F32'}")
        return WideWeight(data)

    def ids(self, tensor: str, marked: str, count: int, vocab: int) -> WideWeight:
        """Ids of a draft vocabulary: its token j is the target's j + ``tensor``[j]; ``marked`` [V] says which they are.

        Raises CheckpointError for ids outside the vocabulary, there twice, or not those that are marked.
        """
        kind, distance = self._array(tensor, (count,))
        if kind not in ("I64", "I32"):
            raise self._error(tensor, f"dtype {kind}", "I64 or I32")
        ids = distance.astype(np.int64) + np.arange(count)
        wanted = np.flatnonzero(self._array(marked, (vocab,))[1]) if marked in self._tensors else np.unique(ids)
        if not 0 <= ids.min() <= ids.max() < min(vocab, 1 << 24) or not np.array_equal(np.sort(ids), wanted):
            raise self._error(tensor, "of other tokens", f"{count} ids of the vocabulary, each once, as {marked} says")
        return WideWeight(ids.astype(np.float32))

    def linear(self, module: str, shape: tuple[int, ...]) -> Weight:
        """Linear weight [out, in] in whichever form it is stored. Raises CheckpointError for tensors of two forms."""
        form = self._form(module)
        suffixes = _FORMS.get(form, ("weight",))
        for suffix in SUFFIXES:
            if suffix not in suffixes and f"{module}.{suffix}" in self._tensors:
                raise self._error(f"{module}.{suffix}", "there", f"only {' and '.join(suffixes)} beside {form} weights")
        match form:
            case "compressed-tensors INT4":
                return self._int4(module, shape)
            case "compressed-tensors NVFP4":
                return self._nvfp4(module, shape, "weight_packed", "weight_global_scale", "input_global_scale")
            case "ModelOpt NVFP4":
                return self._nvfp4(module, shape, "weight", "weight_scale_2", "input_scale")
            case "FP8":
                return self._fp8(module, shape)
            case _:
                return self.wide(f"{module}.weight", shape)

    def patches(self, tensor: str, shape: tuple[int, ...]) -> WideWeight:
        """A convolution over patches that do not overlap, [out, channels, frames, rows, columns], as [out, in]."""
        kind, data = self._array(tensor, None)
        if kind not in ("BF16", "F32") or data.ndim != 5 or (data.shape[0], data[0].size) != shape:
            wanted = f"BF16 or F32 [{shape[0]}, channels, frames, rows, columns] of {shape[1]} values a row"
            raise self._error(tensor, f"{kind} {list(data.shape)}", wanted)
        return WideWeight(data.reshape(shape))

    def kv_scale(self, tensor: str) -> float:
        """FP8 scale of keys or values: their largest magnitude / 448."""
        return self.scalar(tensor, *KV_SCALE)

    def scalar(self, tensor: str, least: float = 1e-30, most: float = 1e30) -> float:
        """Number from ``least`` to ``most`` stored as F32 or BF16, [] or [1]."""
        kind, data = self._array(tensor, None)
        if kind not in ("F32", "BF16") or data.size != 1:
            raise self._error(tensor, f"{kind} {list(data.shape)}", "F32 [] or [1]")
        value = float(_float(kind, data).reshape(()))
        if not least <= value <= most:
            raise self._error(tensor, value, f"a positive number, from {least:g} to {most:g}")
        return value

    def _form(self, module: str) -> str:
        """Name of the form that the module's weight has: one of _FORMS, or the dtype of a wide one."""
        packed = f"{module}.weight_packed"
        if packed in self._tensors:
            return f"compressed-tensors {'INT4' if self._tensors.entry(packed).dtype == 'I32' else 'NVFP4'}"
        kind = self._tensors.entry(f"{module}.weight").dtype
        return {"U8": "ModelOpt NVFP4", "F8_E4M3": "FP8"}.get(kind, kind)

    def _nvfp4(self, module: str, shape: tuple[int, ...], packed: str, scale: str, input_scale: str) -> Nvfp4Weight:
        rows, columns = shape
        if columns % BLOCK:
            raise self._error(f"{module}.{packed}", f"{columns} inputs", f"a multiple of {BLOCK} for NVFP4")
        codes = self._array_of(f"{module}.{packed}", "U8", (rows, columns // 2))
        blocks = self._array_of(f"{module}.weight_scale", "F8_E4M3", (rows, columns // BLOCK))
        reciprocal = scale == "weight_global_scale"  # compressed-tensors stores 2688 / amax, ModelOpt amax / 2688
        value = self._multiplier(f"{module}.{scale}", reciprocal=reciprocal)
        activations = None
        if f"{module}.{input_scale}" in self._tensors:
            stored = self.scalar(f"{module}.{input_scale}")
            activations = _reciprocal(stored) if reciprocal else stored
        return Nvfp4Weight(codes, blocks, value, activations)

    def _int4(self, module: str, shape: tuple[int, ...]) -> Int4Weight:
        rows, columns = shape
        if columns % PER_WORD:
            raise self._error(f"{module}.weight_packed", f"{columns} inputs", f"a multiple of {PER_WORD} for INT4")
        _, packed = self._array(f"{module}.weight_packed", (rows, columns // PER_WORD))
        name = f"{module}.weight_shape"
        if name in self._tensors and (found := self._array(name, (2,))[1].tolist()) != [rows, columns]:
            raise self._error(name, found, [rows, columns])
        name = f"{module}.weight_scale"
        kind, scale = self._array(name, None)
        groups = scale.shape[1] if scale.ndim == 2 and scale.shape[0] == rows else 0
        if kind not in ("BF16", "F16", "F32") or groups == 0 or columns % groups:
            raise self._error(name, f"{kind} {list(scale.shape)}", f"BF16, F16 or F32 [{rows}, groups of inputs]")
        return Int4Weight(packed, self._positive(name, kind, scale))

    def _multiplier(self, tensor: str, *, reciprocal: bool) -> float:
        """Global scale as a multiplier; real weights have max|W| < 2688, so it is below 1."""
        value = self.scalar(tensor)
        multiplier = _reciprocal(value) if reciprocal else value
        if multiplier >= 1.0 and value != 1.0:  # exactly 1 is what a tensor of zeros gets
            wanted = "the reciprocal, above 1 (compressed-tensors)" if reciprocal else "a multiplier below 1 (ModelOpt)"
            raise self._error(tensor, value, wanted)
        return multiplier

    def _fp8(self, module: str, shape: tuple[int, ...]) -> Fp8Weight:
        _, codes = self._array(f"{module}.weight", shape)
        name = f"{module}.weight_scale"
        kind, scale = self._array(name, None)
        if kind not in ("F32", "BF16") or scale.shape not in ((), (1,), (shape[0],), (shape[0], 1)):
            raise self._error(name, f"{kind} {list(scale.shape)}", f"F32 [], [1], [{shape[0]}] or [{shape[0]}, 1]")
        activations = f"{module}.input_scale"
        input_scale = self.scalar(activations) if activations in self._tensors else None
        return Fp8Weight(codes, self._positive(name, kind, scale).reshape(-1), input_scale)

    def _positive(self, tensor: str, kind: str, scale: Array) -> Array:
        """Scales as float32."""
        values = _float(kind, scale)
        if not ((values > 0) & np.isfinite(values)).all():
            raise self._error(tensor, "not positive everywhere", "positive numbers")
        return values

    def _array(self, tensor: str, shape: tuple[int, ...] | None) -> tuple[str, Array]:
        if tensor not in self._tensors:
            raise self._error(tensor, "missing", "a tensor of this name beside its module's others")
        kind, data = self._tensors.array(tensor)
        if shape is not None and data.shape != shape:
            raise self._error(tensor, f"shape {list(data.shape)}", list(shape))
        return kind, data

    def _array_of(self, tensor: str, wanted: str, shape: tuple[int, ...]) -> Array:
        kind, data = self._array(tensor, shape)
        if kind != wanted:
            raise self._error(tensor, f"dtype {kind}", wanted)
        return data

    def _error(self, tensor: str, found: object, wanted: object) -> CheckpointError:
        file: Path | str = self._tensors.entry(tensor).file if tensor in self._tensors else "checkpoint"
        return CheckpointError(f"{file}: tensor {tensor} is {found}, wanted {wanted}")


def _float(kind: str, data: Array) -> Array:
    return bf16_to_f32(data) if kind == "BF16" else data.astype(np.float32)


def _reciprocal(value: float) -> float:
    return float(np.float32(1.0) / np.float32(value))


_FUSED: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_SUFFIX = "|".join(sorted(SUFFIXES, key=len, reverse=True))
_STACKED = re.compile(rf"(.+\.experts)\.({'|'.join(_FUSED)})(?:[._]({_SUFFIX}))?")
_TURNED = re.compile(rf"(.+\.experts)\.(gate_proj|up_proj|down_proj)\.(0|[1-9][0-9]*)\.({_SUFFIX})")


def by_expert(tensors: TensorFiles, count: int, skipped: tuple[str, ...] = ()) -> TensorFiles:
    """Spell the experts canonically, ``count`` in a layer. Names that begin with ``skipped`` are left alone.

    Canonical is ``experts.17.gate_proj.weight`` with the scales next to it. Two other spellings become that, with no
    byte read: the index after the projection (``experts.gate_proj.17.weight``), and all experts in one tensor, [E, ...]
    without ``.weight`` and with its scales next to it (``experts.gate_up_proj``,
    ``experts.gate_up_proj_weight_scale``), whose gate rows come before its up rows.

    Raises CheckpointError for a tensor that is not of ``count`` experts, and for an expert that is there twice.
    """
    entries: dict[str, Entry] = {}

    def add(name: str, entry: Entry, source: str) -> None:
        if name in entries:
            raise CheckpointError(f"{entry.file}: tensor {source} holds {name}, which is there too; remove one")
        entries[name] = entry

    for source in tensors.names():
        entry = tensors.entry(source)
        if ".experts." not in source or source.startswith(skipped):
            add(source, entry, source)
        elif turned := _TURNED.fullmatch(source):
            block, kind, index, suffix = turned.groups()
            add(f"{block}.{index}.{kind}.{suffix}", entry, source)
        elif stacked := _STACKED.fullmatch(source):
            block, fused, suffix = stacked.groups()
            kinds = _FUSED[fused]
            for number, part in enumerate(_split(source, entry, count, kinds, number=bool(suffix))):
                module = f"{block}.{number // len(kinds)}.{kinds[number % len(kinds)]}"
                add(f"{module}.{suffix or 'weight'}", part, source)
        else:
            add(source, entry, source)
    return TensorFiles(entries)


def _split(name: str, entry: Entry, count: int, kinds: Collection[str], *, number: bool) -> Iterator[Entry]:
    """Parts of a tensor of all experts: expert by expert, and within each as ``kinds`` says.

    The kinds have equal shares of the second dimension. Where it may be a ``number``, one is of all of them, and one an
    expert of all its kinds.
    """
    shape, parts = entry.shape, len(kinds)
    size, item = prod(shape), np.dtype(DTYPES[entry.dtype]).itemsize
    inner: tuple[int, ...] = ()
    if number and size == 1 and shape[:1] in ((), (1,)):
        steps = 0, 0
    elif number and size == count and shape[:1] == (count,):
        steps = item, 0
    elif len(shape) > 1 + (not number) and shape[0] == count and shape[1] % parts == 0 and size:
        share = size // count // parts
        steps, inner = (share * parts * item, share * item), (shape[1] // parts, *shape[2:]) if share > 1 else ()
    else:
        wanted = f"[{count} experts, {'gate and up rows' if parts > 1 else 'rows'}, ...], or a number for each or all"
        raise CheckpointError(f"{entry.file}: tensor {name} is {list(shape)}, wanted {wanted}")
    for expert in range(count):
        for part in range(parts):
            offset = entry.offset + expert * steps[0] + part * steps[1]
            yield Entry(entry.file, entry.dtype, inner, offset)
