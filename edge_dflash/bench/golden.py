"""Compares the reference with a golden file: arrays that an independent implementation wrote for the same checkpoint.

A golden file is a safetensors file with keys ``p{n}.{key}`` for prompts n = 0, 1, ...; any dimensions, block size and
number of prompts. What is compared is in :data:`TOLERANCE`'s groups. Keys that the file lacks are listed and skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edge_dflash.common.files import is_there
from edge_dflash.common.tables import finite
from edge_dflash.errors import CheckpointError, VerificationError
from edge_dflash.model import pair_programs
from edge_dflash.model.program import PairPrograms
from edge_dflash.model.registry import DRAFTERS
from edge_dflash.model.specs import PairSpec, PatchSpec, TargetSpec
from edge_dflash.pictures.picture import picture_of
from edge_dflash.pictures.pictured import Picture, Pictured, Placed
from edge_dflash.weights.checkpoint import PairCheckpoint, checkpoint_pair
from edge_dflash.weights.formats import Array, Nvfp4Weight, Weight, WeightStore
from edge_dflash.weights.safetensors import TensorFiles

if TYPE_CHECKING:
    from edge_dflash.backends.reference.tower import TorchTower

TOLERANCE = 1e-3  # absolute, of logits; other arrays: relative to the golden's largest value where that is above 1
INFORMATIVE = ("prefill_logits_bf16run",)  # another library in BF16: shows the scale of rounding, decides nothing
NVFP4 = ("nvfp4_w4a16_prefill_logits", "nvfp4_w4a16_greedy_tokens")  # of a checkpoint that stores NVFP4
PROMPT_KEY = re.compile(r"^p\d+\.")
INPUT = re.compile(r"prompt|threshold|images|.*\.(pixel_values|grid_thw)")  # keys of what is given to us
CYCLES = re.compile(r"(short_|cut_)?cycle_")  # by cycles, of which as many are compared as both have
SHORT = "short_"  # of keys of a run with smaller blocks
TOKENS = ("greedy_tokens", *(f"{kind}_tokens" for kind in DRAFTERS))  # keys of what was generated


@dataclass(frozen=True)
class ArrayDifference:
    """One array of the golden file against ours."""

    key: str
    difference: float  # largest absolute difference; number of wrong entries for integers; inf: shapes differ
    tolerance: float | None  # None: informative

    @property
    def ok(self) -> bool:
        """True within the tolerance."""
        return self.tolerance is None or self.difference <= self.tolerance


@dataclass(frozen=True)
class GoldenComparison:
    """What was compared and what was not."""

    results: tuple[ArrayDifference, ...]
    missing: tuple[str, ...]  # keys that the format has and the file has not
    skipped: tuple[str, ...]  # keys of the file for other weights: NVFP4 keys with a wide checkpoint, or the reverse
    unknown: tuple[str, ...]  # keys of the file that the format has not, or of a prompt that is not given

    @property
    def ok(self) -> bool:
        """True when at least one array decides and all that decide are within their tolerance."""
        return any(r.tolerance is not None for r in self.results) and all(r.ok for r in self.results)

    @property
    def failures(self) -> tuple[ArrayDifference, ...]:
        """Results out of tolerance."""
        return tuple(r for r in self.results if not r.ok)

    @property
    def tokens_equal(self) -> bool:
        """True when every token sequence is the golden's."""
        return all(r.ok for r in self.results if r.key.endswith("_tokens"))

    @property
    def largest_difference(self) -> float:
        """Largest difference of all arrays of numbers that decide; 0 without any."""
        return max((r.difference for r in self.results if r.tolerance), default=0.0)

    @property
    def logits_difference(self) -> float:
        """Largest difference of logits that decide; 0 without any."""
        return max((r.difference for r in self.results if _is_logits(r.key) and r.tolerance is not None), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys; a difference of null means different shapes."""
        return {
            "ok": self.ok,
            "differences": {r.key: finite(r.difference) for r in self.results},
            "largest_difference": finite(self.largest_difference),
            "logits_difference": finite(self.logits_difference),
            "tokens_equal": self.tokens_equal,
            "failures": [r.key for r in self.failures],
            "missing": list(self.missing),
            "skipped": list(self.skipped),
            "unknown": list(self.unknown),
        }

    def check(self) -> None:
        """Raise VerificationError naming the worst array unless all is within tolerance."""
        if not self.results:
            raise VerificationError("the golden file holds nothing that can be compared; wanted keys p0.prompt, ...")
        if self.failures:
            worst = max(self.failures, key=lambda r: r.difference)
            raise VerificationError(
                f"{len(self.failures)} of {len(self.results)} golden arrays differ; worst: {worst.key} by "
                f"{worst.difference:.3g}, accepted {worst.tolerance:.3g}; give the checkpoint the file was made from"
            )
        if not self.ok:
            raise VerificationError(
                "the golden file holds no array that decides (logits, states or tokens), only informative ones; "
                "give one with more of the keys of the format"
            )


def verify_golden(target: Path, drafter: Path | None, golden_file: Path) -> GoldenComparison:
    """Run the unquantized reference in float32 and compare it with a golden file.

    Raises CheckpointError for the checkpoints and VerificationError when the golden file cannot be read or is of
    another vocabulary.
    """
    spec = checkpoint_pair(target, drafter)
    programs = pair_programs(spec)
    store = PairCheckpoint.open(target, drafter, programs.weights)
    try:
        tensors = TensorFiles.open([golden_file])
        golden = {name: tensors.array(name)[1] for name in tensors.names()}
    except CheckpointError as error:
        raise VerificationError(f"{golden_file}: not a readable safetensors file ({error}); copy it again") from error
    vision = spec.target.vision
    return check_golden(spec, store, golden, programs, patch_arrays(golden, target, vision.patches) if vision else {})


def check_golden(
    spec: PairSpec,
    store: WeightStore,
    golden: Arrays,
    programs: PairPrograms | None = None,
    patches: Arrays | None = None,
) -> GoldenComparison:
    """Compare in memory; ``programs`` replaces the pair's own, ``patches`` are pictures that were cut again."""
    from edge_dflash.bench.observe import GoldenObserver  # torch, only here

    programs = programs or pair_programs(spec)
    observer = GoldenObserver(spec, _WeightOnly(store), programs)
    quantized = any(isinstance(store.get(n), Nvfp4Weight) for n, w in programs.weights.items() if w.kind == "linear")
    towers = tower_arrays(golden, observer.tower) if observer.tower else {}
    ours, missing = dict[str, Array](), list[str]()
    for name, given in _prompts(golden):
        if "prompt" not in given:
            missing.append(f"{name}.prompt")
            continue
        prompt, block = given["prompt"].reshape(-1).tolist(), _first_block(given)
        if not prompt or not all(0 <= token < spec.target.vocab_size for token in (*prompt, *(block or ()))):
            raise VerificationError(
                f"golden {name}: the prompt is empty or ids are outside the vocabulary of {spec.target.vocab_size}; "
                f"give the golden file of this checkpoint"
            )
        if quantized:  # activations stay wide, whatever the checkpoint calibrated
            tokens, logits = observer.tokens_and_logits(prompt, len(given.get("nvfp4_w4a16_greedy_tokens", ())))
            found = dict(zip(NVFP4, (logits, tokens), strict=True))
        else:
            threshold = float(given["threshold"].reshape(-1)[0]) if "threshold" in given else None
            pictured = said(golden, given, prompt, spec.target)
            found = observer.prompt(pictured, _new_tokens(given), block, threshold)
            found["prefill_logits_bf16run"] = found["prefill_logits"]
            if f"{SHORT}cycle_draft_tokens" in given:
                smaller = GoldenObserver(_smaller(spec, given), _WeightOnly(store), programs)
                again = smaller.prompt(pictured, _new_tokens(given), None)
                found |= {SHORT + key: array for key, array in again.items() if SHORT + key in given}
            found = _by_token(given, found)
        ours |= {f"{name}.{key}": array for key, array in found.items()}
    return _compared(golden, ours | towers | dict(patches or {}), missing, quantized=quantized)


def _compared(golden: Arrays, ours: Arrays, missing: Sequence[str], *, quantized: bool) -> GoldenComparison:
    """Compare the keys that both have; list the others."""
    others = [key for key in golden if key not in ours and not INPUT.fullmatch(PROMPT_KEY.sub("", key))]
    of_others = [key for key in others if (name := PROMPT_KEY.sub("", key)) in NVFP4 or (quantized and name != key)]
    return GoldenComparison(
        tuple(_compare(key, golden[key], found) for key, found in ours.items() if key in golden),
        (*missing, *(key for key in ours if key not in golden)),
        tuple(of_others),
        tuple(key for key in others if key not in of_others),
    )


def _smaller(spec: PairSpec, given: Mapping[str, Array]) -> PairSpec:
    """The pair with the blocks of the golden's short run."""
    rows = given[f"{SHORT}cycle_draft_tokens"].shape[-1] + spec.block_size - spec.drafts
    return spec if spec.drafter is None else replace(spec, drafter=replace(spec.drafter, block_size=rows))


def _by_token(given: Mapping[str, Array], ours: Mapping[str, Array]) -> dict[str, Array]:
    """``ours`` with a row's candidates in the golden's order: neighbours' logits may be as close as rounding is."""
    found = dict(ours)
    for prefix in ("cycle_", f"{SHORT}cycle_"):
        if (key := f"{prefix}candidates") in given and key in ours:
            cycles = min(len(given[key]), len(ours[key]))
            wanted, mine = given[key][:cycles], ours[key][:cycles]
            if wanted.shape == mine.shape:
                order = np.argsort(mine, -1)
                order = np.take_along_axis(order, np.argsort(np.argsort(wanted, -1), -1), -1)
                for name in (key, f"{prefix}scores"):
                    found[name] = np.take_along_axis(ours[name][:cycles], order, -1)
    return found


@dataclass(frozen=True)
class _WeightOnly:
    """A store without activation scales: NVFP4 is a way to store weights, activations are float32."""

    store: WeightStore

    def get(self, name: str) -> Weight:
        """Return the weight."""
        weight = self.store.get(name)
        return replace(weight, input_scale=None) if isinstance(weight, Nvfp4Weight) else weight

    def kv_scale(self, state: str) -> tuple[float, float]:
        """Return the FP8 scales of a KV state."""
        return self.store.kv_scale(state)


def _compare(name: str, wanted: Array, found: Array) -> ArrayDifference:
    key = PROMPT_KEY.sub("", name)
    if CYCLES.match(key):
        cycles = min(len(wanted), len(found))
        wanted, found = wanted[:cycles], found[:cycles]
    exact = np.issubdtype(wanted.dtype, np.integer)
    if wanted.shape != found.shape:
        return ArrayDifference(name, math.inf, None if key in INFORMATIVE else 0.0)
    if exact:
        return ArrayDifference(name, float(np.count_nonzero(wanted != found)), 0.0)
    difference = float(np.abs(wanted.astype(np.float64) - found).max(initial=0.0))
    if math.isnan(difference):
        difference = math.inf
    scale = 1.0 if _is_logits(key) else max(1.0, float(np.abs(wanted).max(initial=0.0)))
    return ArrayDifference(name, difference, None if key in INFORMATIVE else TOLERANCE * scale)


def _prompts(golden: Mapping[str, Array]) -> Iterator[tuple[str, dict[str, Array]]]:
    """Prompt names in order, each with its keys."""
    names = {key.split(".", 1)[0] for key in golden if PROMPT_KEY.match(key)}
    for name in sorted(names, key=lambda n: int(n[1:])):
        yield name, {key[len(name) + 1 :]: array for key, array in golden.items() if key.startswith(f"{name}.")}


def _new_tokens(given: Mapping[str, Array]) -> int:
    """How many tokens the golden generated: as many as are needed to compare all of its keys."""
    for key in (*TOKENS, "greedy_top2_margin"):
        if key in given:
            return len(given[key])
    if "teacher_forced_logits" in given:
        return len(given["teacher_forced_logits"]) - len(given["prompt"])
    if "cycle_accepted" in given:
        return 1 + int((given["cycle_accepted"] + 1).sum())
    return 0


def _first_block(given: Mapping[str, Array]) -> list[int] | None:
    """Tokens of the first verify block, when the golden has them and states after its rows, or rows of experts."""
    tokens, drafts = next((given[key] for key in TOKENS if key in given), None), given.get("cycle_draft_tokens")
    if tokens is None or drafts is None or not (len(tokens) and len(drafts)):
        return None
    if not any(re.search(r"\.after[1-9]|^moe\..*\.verify", key) for key in given):
        return None
    return [int(tokens[0]), *(int(token) for token in drafts[0])]


def _is_logits(key: str) -> bool:
    return "logits" in key.rsplit(".", 1)[-1]


ROLES = {"tower_embed": "embedded", "tower_hidden": "hidden", "tower_rows": "rows"}  # keys by a pass's outputs
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class GoldenPicture(Picture):
    """A picture by the tower's input."""

    patches: npt.NDArray[np.float32]

    @classmethod
    def of(cls, patches: npt.NDArray[np.float32], grid: tuple[int, int], spec: PatchSpec) -> GoldenPicture:
        """With the levels of the first frame."""
        frame = patches.reshape(len(patches), 3, spec.temporal, -1)[:, :, 0]
        mean, std = (np.array(numbers)[:, None] for numbers in (spec.mean, spec.std))
        levels = np.rint(255 * (frame * std + mean)).astype(np.uint8)
        return cls(levels.reshape(len(patches), -1), grid, spec, patches)

    def values(self) -> npt.NDArray[np.float32]:
        """The patches."""
        return self.patches


def picture_names(golden: Arrays) -> tuple[str, ...]:
    """Names of the golden's pictures and clips."""
    names = dict.fromkeys(key.partition(".")[0] for key in golden if key.endswith(".pixel_values"))
    return tuple(name for name in names if f"{name}.grid_thw" in golden)


def tower_arrays(golden: Arrays, tower: TorchTower) -> dict[str, npt.NDArray[Any]]:
    """What the tower makes of every picture and every frame of a clip, by the golden's keys.

    Raises VerificationError for patches that are not those of the grid.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    for name in picture_names(golden):
        patches, (frames, rows, columns) = golden[f"{name}.pixel_values"], golden[f"{name}.grid_thw"].tolist()
        if len(patches) != frames * rows * columns:
            raise VerificationError(
                f"golden {name}: {len(patches)} patches, its grid has {frames} x {rows} x {columns}; copy it again"
            )
        runs = [tower.run(frame, (rows, columns)) for frame in np.split(patches, frames)]
        found |= {f"{name}.{key}": np.concatenate([run[role].numpy() for run in runs]) for key, role in ROLES.items()}
    return found


def patch_arrays(golden: Arrays, directory: Path, spec: PatchSpec) -> dict[str, npt.NDArray[Any]]:
    """Patches and grid of the pictures whose files lie in ``directory`` as ``img{i}.png``, by the golden's keys.

    Raises ImageError for files that are no pictures.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    for name in picture_names(golden):
        if is_there(file := directory / f"{name}.png"):
            picture = picture_of(file, spec)
            found |= {f"{name}.pixel_values": picture.values(), f"{name}.grid_thw": np.array([1, *picture.grid])}
    return found


def said(golden: Arrays, given: Arrays, prompt: Sequence[int], target: TargetSpec) -> Pictured:
    """A golden's prompt with its pictures: one for each run of placeholders that its rows fill.

    Raises VerificationError where pictures and placeholders do not belong together.
    """
    if "images" not in given:
        return Pictured(tuple(prompt))
    if target.vision is None:
        raise VerificationError("a golden prompt has images, and the target has no vision tower; give its checkpoint")
    placed, at, token = list[Placed](), 0, target.vision.image_token_id
    for number in given["images"].reshape(-1).tolist():
        name = f"img{number}"
        if f"{name}.pixel_values" not in golden or f"{name}.grid_thw" not in golden or token not in prompt[at:]:
            raise VerificationError(f"the golden file lacks {name}, or a placeholder {token} for it; copy it again")
        _, rows, columns = golden[f"{name}.grid_thw"].tolist()
        patches = np.asarray(golden[f"{name}.pixel_values"], np.float32)
        placed.append(
            Placed(prompt.index(token, at), GoldenPicture.of(patches, (rows, columns), target.vision.patches))
        )
        at = placed[-1].end
    return Pictured(tuple(prompt), tuple(placed))
