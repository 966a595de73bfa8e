"""A pair of checkpoints as one WeightStore: names mapped, storage recognised, everything checked at open."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from edge_dflash.checkpoint.declared import read_declared
from edge_dflash.checkpoint.files import TensorFiles
from edge_dflash.checkpoint.stored import SUFFIXES, ModuleReader
from edge_dflash.checkpoint.weights import Fp8Weight, Nvfp4Weight, Weight
from edge_dflash.errors import CheckpointError
from edge_dflash.graph.program import WeightSpec

_PREFIXES = ("model.language_model.", "model.", "")
_SKIPPED = ("model.visual.", "visual.", "mtp.", "model.mtp.")  # vision tower and multi-token-prediction head
_KV_SCALES = (("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"), ("self_attn.k_scale", "self_attn.v_scale"))


class PairCheckpoint:
    """Weights of a target and a drafter checkpoint by canonical name.

    See :class:`edge_dflash.checkpoint.weights.WeightStore`. Arrays are views of the mapped files.
    """

    def __init__(self, parts: Mapping[str, _Part], expected: Mapping[str, WeightSpec]) -> None:
        self._parts = parts
        self._expected = expected

    @classmethod
    def open(cls, target: Path, drafter: Path, expected: Mapping[str, WeightSpec]) -> PairCheckpoint:
        """Open both directories and compare their tensors with the weights that the pair's Programs need.

        Raises CheckpointError for missing, extra, misshaped or wrongly typed tensors, naming file, tensor, found and
        wanted. Tensor values are not read.
        """
        parts = {"target": _Part("target", target), "drafter": _Part("drafter", drafter)}
        for name, part in parts.items():
            part.check({n: spec for n, spec in expected.items() if n.startswith(f"{name}.")})
        return cls(parts, expected)

    def get(self, name: str) -> Weight:
        """Return a weight. Raises KeyError for an unknown name."""
        spec = self._expected[name]
        return self._parts[name.partition(".")[0]].read(name, spec)

    def kv_scale(self, state: str) -> tuple[float, float]:
        """FP8 scales (k, v) that the checkpoint carries for a KV state; (1.0, 1.0) when it has none."""
        return self.stored_kv_scale(state) or (1.0, 1.0)

    def stored_kv_scale(self, state: str) -> tuple[float, float] | None:
        """FP8 scales (k, v) of a KV state, or None when the checkpoint carries none for it."""
        return self._parts[state.partition(".")[0]].kv_scale(state)

    def release(self) -> None:
        """Drop the files' pages from memory and the page cache; the next access reads them again."""
        for part in self._parts.values():
            part.tensors.release()


class _Part:
    """One checkpoint directory."""

    def __init__(self, model: Literal["target", "drafter"], directory: Path) -> None:
        self._model = model
        self._directory = directory
        self.tensors = TensorFiles.open(directory)
        self._reader = ModuleReader(self.tensors)
        names = self.tensors.names()
        self._prefix = next(p for p in _PREFIXES if not p or any(n.startswith(p) for n in names if not _skipped(n)))

    def check(self, expected: Mapping[str, WeightSpec]) -> None:
        """Compare the tensors with what is expected, and their storage with the configuration."""
        declared = read_declared(self._directory)
        used: set[str] = set()
        missing: list[str] = []
        for name, spec in expected.items():
            tensors = self._tensors_of(name)
            if not tensors:
                missing.append(self._module(name) + ("" if _bare(name) else ".weight"))
                continue
            used.update(tensors)
            weight = self.read(name, spec)
            storage = _storage(weight)
            wanted = declared(self._module(name)) if spec.kind == "linear" and not self._is_tied(name) else None
            if wanted is not None and wanted != storage:
                raise CheckpointError(
                    f"{self._directory}: module {self._module(name)} is stored as {storage}, "
                    f"its quantization config says {wanted}; the files do not belong together"
                )
        if missing:
            raise CheckpointError(
                f"{self._directory} lacks {len(missing)} tensors of the {self._model}, the first is {missing[0]}; "
                "the checkpoint is incomplete or of another model"
            )
        scales = {self._prefix + f"layers.{i}." + n for i in _layers(expected) for pair in _KV_SCALES for n in pair}
        tied_head = {"lm_head.weight"} if "target.lm_head" in expected else set()
        extra = [n for n in self.tensors.names() if n not in used | scales | tied_head and not _skipped(n)]
        if extra:
            raise CheckpointError(
                f"{self.tensors.entry(extra[0]).file}: tensor {extra[0]} ({len(extra)} such) is not part of the "
                f"{self._model} that config.json describes; the checkpoint is of another model"
            )

    def read(self, name: str, spec: WeightSpec) -> Weight:
        """Read a weight that is present."""
        module = self._module(name)
        if spec.kind == "linear" and not self._is_tied(name):
            return self._reader.linear(module, spec.shape)
        return self._reader.wide(module if _bare(name) else f"{module}.weight", spec.shape)

    def kv_scale(self, state: str) -> tuple[float, float] | None:
        """FP8 scales (k, v) of ``<model>.layers.<i>.kv``."""
        layer = state.removeprefix(f"{self._model}.").removesuffix(".kv")
        for names in _KV_SCALES:
            k, v = (f"{self._prefix}{layer}.{name}" for name in names)
            if k in self.tensors and v in self.tensors:
                return self._reader.scalar(k), self._reader.scalar(v)
        return None

    def _module(self, name: str) -> str:
        """Path of a weight's module (or bare tensor) in this checkpoint."""
        rest = name.partition(".")[2]
        if rest == "lm_head":
            return f"{self._prefix}embed_tokens" if self._is_tied(name) else "lm_head"
        return self._prefix + rest

    def _is_tied(self, name: str) -> bool:
        """Whether this is an lm_head that reads the embedding, because it has no tensor of its own."""
        return name == "target.lm_head" and not any(f"lm_head.{suffix}" in self.tensors for suffix in SUFFIXES[:2])

    def _tensors_of(self, name: str) -> set[str]:
        module = self._module(name)
        if _bare(name):
            return {module} & set(self.tensors.names())
        present = {t for s in SUFFIXES if (t := f"{module}.{s}") in self.tensors}
        return present if present & {f"{module}.weight", f"{module}.weight_packed"} else set()


def _storage(weight: Weight) -> str:
    if isinstance(weight, Nvfp4Weight):
        return "nvfp4"
    return "fp8" if isinstance(weight, Fp8Weight) else "wide"


def _bare(name: str) -> bool:
    """Whether the tensor's name has no ``.weight``."""
    return name.endswith((".A_log", ".dt_bias"))


def _skipped(tensor: str) -> bool:
    return tensor.startswith(_SKIPPED)


def _layers(expected: Mapping[str, WeightSpec]) -> set[int]:
    return {int(name.split(".")[2]) for name in expected if ".layers." in name}
