"""Published pairs with no download: their dimensions, random weights made on the device, a tokenizer made in code.

Weights take seconds for a model of any size. They keep activations of about RMS 1 from layer to layer, so that
benchmarks run on plausible numbers: a linear gives its input's RMS, a residual branch a quarter of it; norms are
neutral.

The tokenizer is byte-level BPE as published models have it: every byte, JSON punctuation, runs of letters with and
without a space before them, one end-of-text token. The words are random letters; how many tokens there are and how long
they are is what the cost of a grammar's masks depends on.
"""

from __future__ import annotations

import ctypes
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from edge_dflash.common.tables import decode
from edge_dflash.errors import BackendError, RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Attend, KvAppend, RmsNorm
from edge_dflash.model.specs import PairSpec
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.formats import FORMATS, WeightFormat, WideWeight
from edge_dflash.weights.layout import UNIT_ROWS, WINDOW, Format, Layout, repack
from edge_dflash.weights.recipe import Recipe, default_recipe
from edge_dflash.weights.stacks import ExpertStack, Stack

if TYPE_CHECKING:  # importing them needs CUDA's bindings
    from edge_dflash.backends.cuda.driver import Gpu, Kernel
    from edge_dflash.backends.cuda.kernels.linear import LinearWeights
    from edge_dflash.backends.cuda.memory import DevicePointer

KV_SCALE = 0.03  # keys and values of about RMS 1 reach 448 x 0.03 = 13
_FP8_EXPONENT = 6  # fields 6..9: 2^-1 to 2^2
# RMS of bench_weights' values. NVFP4: E2M1 codes and block scales, both uniform; FP8, BF16: four exponents from 2^0.
_NVFP4_RMS = math.sqrt(8.5625) * math.sqrt(0.625 * 2.1484375)
_FP8_RMS = math.sqrt(21.25 * 2.1484375)
_BF16_RMS = math.sqrt(21.25 * 7 / 3)
_NVFP4_SCALE = 2.0**19  # of a row's sum, see weights/layout.py
_BRANCHES = ("o_proj", "out_proj", "down_proj")  # their outputs are added to the residual stream
FILE = Path(__file__).parent / "pairs.json"  # PairSpec by name, by published config.json files; a target may be a name
END_OF_TEXT = "<|endoftext|>"
LEAST = 2048  # ids
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_LENGTHS = (6, 12, 15, 16, 14, 11, 9, 7, 4, 3, 2, 1)  # weights of words of 3, 4, ... letters, a space counted
_SPACE = "\u0120"  # how byte-level BPE spells a space
_PUNCTUATION = '{" ": ":" "," "} "}, "},{" ":[{" "}] "}]} ", "] }, }] [{ ["'
# As in Qwen's tokenizers: a run of letters takes one character before it, digits stand alone.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


def pair_names() -> tuple[str, ...]:
    """Names of the pairs."""
    return tuple(json.loads(FILE.read_text()))


def synthetic_pair(name: str) -> PairSpec:
    """Dimensions of a published pair. Raises RequestError listing the names."""
    found = json.loads(FILE.read_text())
    if name not in found:
        raise RequestError(f"no synthetic pair is called {name!r}; there are {', '.join(found)}")
    pair = found[name]
    target = found[pair["target"]]["target"] if isinstance(pair["target"], str) else pair["target"]
    return decode(PairSpec, {**pair, "target": target}, f"{FILE.name}: {name}")


def kind_recipe(kind: Format) -> Recipe:
    """The default recipe with every linear in ``kind``; the drafter's fc is FP8 when the others are NVFP4."""
    default = default_recipe()
    if kind == "nvfp4":
        return default
    return Recipe(
        f"all {kind}", target=dict.fromkeys(default.target, kind), drafter=dict.fromkeys(default.drafter, kind)
    )


@dataclass(frozen=True)
class Making:
    """How the words of a matrix are made: exponent field of bench_weights, and the factor of each row's sum."""

    exponent: int
    row_scale: float

    @classmethod
    def of(cls, format: Format, rms: float) -> Making:
        """Values of about ``rms``: exact for NVFP4 and FP8, within a factor of 1.5 for BF16, which has no scale."""
        match format:
            case "nvfp4":
                return cls(0, rms / _NVFP4_RMS * _NVFP4_SCALE)
            case "fp8":
                return cls(_FP8_EXPONENT, rms / (_FP8_RMS * 2.0 ** (_FP8_EXPONENT - 7)))
            case "bf16":
                return cls(127 + round(math.log2(rms / _BF16_RMS)), 1.0)


def stack_rms(stack: Stack) -> float:
    """RMS of a stack's weights: the output of a linear has its input's RMS, a residual branch a quarter of it."""
    gain = 0.25 if stack.names[0].rsplit(".", 1)[-1] in _BRANCHES else 1.0
    return gain / math.sqrt(stack.layout.k)


class RandomWeights:
    """:class:`~edge_dflash.backends.cuda.weights.NativeWeights` of a pair, the same bytes every time.

    ``cubin`` gives the cubin of a compilation unit for the device.
    """

    def __init__(self, pair: PairSpec, kind: Format, cubin: Callable[[str], bytes]) -> None:
        programs = pair_programs(pair)
        self._weights, self._cubin = programs.weights, cubin
        self._formats: dict[str, WeightFormat] = {**kind_recipe(kind).formats(programs.weights)}
        self._plus_one: set[str] = set()
        for op in (*programs.verify.ops, *programs.propose.ops):
            if isinstance(op, RmsNorm | Attend | KvAppend) and op.plus_one:
                self._plus_one |= set(op.weights)
        self._loaded: tuple[Gpu, Kernel] | None = None

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        """Format of every weight."""
        return self._formats

    def stack(self, gpu: Gpu, stack: Stack) -> LinearWeights:
        """Allocate and fill a stack."""
        from edge_dflash.backends.cuda.kernels.linear import LinearWeights

        layout = stack.layout
        if not _full(layout):
            return _small_stack(gpu, stack)
        making = Making.of(layout.format, stack_rms(stack))
        data = self._random(gpu, stack.nbytes, stack.key, layout.format, making.exponent)
        scale = gpu.upload(np.full(stack.rows, making.row_scale, np.float32))
        return LinearWeights(layout, data, scale)

    def embedding(self, gpu: Gpu, name: str) -> DevicePointer:
        """Allocate and fill a BF16 matrix: an embedding of RMS 1, a router whose logits have it."""
        spec = self._weights[name]
        rms = 1.0 / math.sqrt(spec.shape[1]) if spec.kind == "linear" else 1.0
        return self._random(gpu, 2 * math.prod(spec.shape), name, "bf16", Making.of("bf16", rms).exponent)

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """Neutral norms; a plausible convolution, and decays between about 0.5 and 1 a token."""
        shape = self._weights[name].shape
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if name.endswith("conv1d"):
            return (rng.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)
        if name.endswith("A_log"):
            return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
        if name.endswith("dt_bias"):
            return rng.uniform(-6, -2, shape).astype(np.float32)
        return np.full(shape, 0.0 if name in self._plus_one else 1.0, np.float32)

    def kv_scale(self, state: str) -> tuple[float, float]:
        """Scales that hold keys and values of RMS 1."""
        return KV_SCALE, KV_SCALE

    def _random(self, gpu: Gpu, nbytes: int, name: str, format: Format, exponent: int) -> DevicePointer:
        if nbytes % 4:
            raise BackendError(f"{name} has {nbytes} bytes; random weights are made in words of 4")
        if self._loaded is None or self._loaded[0] is not gpu:
            self._loaded = gpu, gpu.load(self._cubin("bench")).kernel("bench_weights")
        pointer = gpu.allocate(nbytes)
        words, seed = ctypes.c_longlong(nbytes // 4), ctypes.c_uint32(zlib.crc32(name.encode()))
        kernel = self._loaded[1]
        gpu.launch(kernel, (8 * gpu.sm_count, 1, 1), 256, (pointer, words, seed, FORMATS[format].bits, exponent))
        return pointer


def _full(layout: Layout) -> bool:
    """Whether every row and column of every piece is a weight, so that no padding has to be zero."""
    rows = UNIT_ROWS // 2 if layout.swiglu else UNIT_ROWS
    return not any(n % rows for n in layout.columns) and layout.k % WINDOW[layout.format] == 0


def _small_stack(gpu: Gpu, stack: Stack) -> LinearWeights:
    """A padded stack (the gates of gated delta layers), made on the host."""
    from edge_dflash.backends.cuda.kernels.linear import LinearWeights

    layout = stack.layout
    if isinstance(stack, ExpertStack) or layout.format != "bf16" or layout.nbytes > 64 << 20:
        raise BackendError(f"{stack.key} is {layout}; random weights of this size need whole units and windows")
    rng = np.random.default_rng(zlib.crc32(stack.key.encode()))
    values = [rng.standard_normal((n, layout.k), np.float32) * np.float32(stack_rms(stack)) for n in layout.columns]
    repacked = repack([WideWeight((v.view(np.uint32) >> 16).astype(np.uint16)) for v in values], swiglu=layout.swiglu)
    return LinearWeights(layout, gpu.upload(repacked.data), gpu.upload(repacked.scale))


def synthetic_tokenizer(size: int, words: Iterable[str] = ()) -> Tokenizer:
    """A tokenizer of exactly ``size`` ids, the last of which ends a text; the same every time, in seconds.

    ``words`` are ASCII texts that get a token each, where the split leaves them whole. Raises RequestError below
    ``LEAST`` ids.
    """
    if size < LEAST:
        raise RequestError(f"a synthetic tokenizer of {size} ids is too small; give at least {LEAST}")
    vocabulary, merges = _merged((*_PUNCTUATION.split(), *words), size - 1)
    tokenizer = HfTokenizer(models.BPE(vocab=vocabulary, merges=merges))
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return Tokenizer(tokenizer, None, size - 1)


def _merged(texts: Iterable[str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """``size`` tokens and the merges that make them: bytes, ``texts`` (merged first), letter pairs, random words."""
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []

    def add(left: str, right: str) -> bool:
        if left + right in vocabulary:
            return False
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
        return True

    for text in texts:
        for end in range(1, len(text)):
            add(text[:end], text[end])
    spaced = [_SPACE + letter for letter in _LETTERS]
    pairs = [a + b for a in _LETTERS for b in _LETTERS]
    for token in (*spaced, *pairs):
        add(token[:-1], token[-1])
    starts, ends = {2: pairs + spaced}, {1: list(_LETTERS), 2: pairs}  # what words begin and end with, by length
    random, lengths = Random(size), range(3, 3 + len(_LENGTHS))
    while len(vocabulary) < size:
        (length,) = random.choices(lengths, _LENGTHS)
        cut = random.randint(2, length - 1)
        if cut not in starts or length - cut not in ends:
            continue
        left, right = random.choice(starts[cut]), random.choice(ends[length - cut])
        if add(left, right):
            starts.setdefault(length, []).append(left + right)
            if not left.startswith(_SPACE):
                ends.setdefault(length, []).append(left + right)
    return vocabulary, merges
