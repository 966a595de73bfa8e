"""Everything a build decides and checks before it writes a byte.

Reads configs, headers and the recipe; weights are only asked how they are stored. Which weight gets which format and
lies in which file, how much space that takes, and the fingerprint by which an interrupted build finds its own work.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from edge_dflash.backends.cuda.compile import compiler_version, kernels_digest
from edge_dflash.board.profiles import largest_board
from edge_dflash.builder.card import DrafterCard, read_card
from edge_dflash.builder.choose import Choice, choose, decide_lanes, decide_native
from edge_dflash.builder.engines import decide_engines, expanded_weights
from edge_dflash.builder.inputs import copied_files, fingerprints, read_checkpoints, read_tokenizer, unread_tower
from edge_dflash.builder.journal import check_free
from edge_dflash.builder.scales import ScaleDecisions, decide_scales
from edge_dflash.bundle.manifest import EngineFiles, FileEntry, SourceFile
from edge_dflash.bundle.parts import Part, building_path, bundle_parts, stack_bytes
from edge_dflash.checks.footprint import read_bytes
from edge_dflash.checks.inspect import default_chunk, prefill_ms
from edge_dflash.common.files import check_place
from edge_dflash.common.tables import encode
from edge_dflash.errors import BackendError, BuildError, RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.program import PairPrograms
from edge_dflash.model.registry import NO_DRAFTER
from edge_dflash.model.specs import PairSpec
from edge_dflash.version import __version__
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.formats import FORMATS, TIED, WeightFormat
from edge_dflash.weights.recipe import Recipe, default_recipe, load_recipe

_SLACK = 1 << 20  # bytes for headers, manifest and file system blocks
_KERNELS = 16 << 20  # bytes of the cubins of a native bundle, at most


@dataclass(frozen=True)
class BuildConfig:
    """What to build. Sizes that are None come from the recipe and are lowered to what the model allows."""

    target: Path  # a checkpoint; or a bundle, whose target is taken as it is
    drafter: Path | None  # None: the bundle decodes plainly
    output: Path
    arch: str = "cpu"  # in any of its spellings
    backend: str | None = None  # "native", "native,tensorrt"; None: what suits the arch
    recipe: Path | None = None  # None: the default recipe
    max_context: int | None = None  # rows of every KV state
    prefill_chunk: int | None = None  # most rows of one prefill pass
    calibrate: bool = True  # False: KV scales of the checkpoint, or 1.0
    lanes: int | None = None  # sequences that are decoded at once
    text_only: bool = False  # leave the target's vision tower out
    force: bool = False  # replace a bundle that is already at ``output``
    resume: str | None = None  # what is to be done again after an interrupt; None: :attr:`command`

    @property
    def command(self) -> str:
        """The command line that runs this build, and resumes it."""
        words = ["edge-dflash", "build", "--target", str(self.target), "--drafter", str(self.drafter or NO_DRAFTER)]
        words += ["--arch", self.arch]
        for flag, value in (
            ("--backend", self.backend),
            ("--recipe", self.recipe),
            ("--max-context", self.max_context),
            ("--prefill-chunk", self.prefill_chunk),
            ("--lanes", self.lanes),
        ):
            words += [flag, str(value)] if value is not None else []
        words += [] if self.calibrate else ["--no-calibrate"]
        words += ["--text-only"] if self.text_only else []
        words += ["--output", str(self.output)] + (["--force"] if self.force else [])
        return shlex.join(words)


@dataclass(frozen=True)
class Decisions:
    """A build that was checked and can start."""

    config: BuildConfig
    choice: Choice
    recipe: Recipe
    pair: PairSpec
    programs: PairPrograms
    store: PairCheckpoint
    formats: Mapping[str, WeightFormat]
    parts: Mapping[str, Part]  # weight file -> what lies in it
    size: int  # bytes of all weights in the bundle, about
    max_context: int  # tokens
    prefill_chunk: int  # rows
    lanes: int
    scales: ScaleDecisions
    tokenizer_files: tuple[Path, ...]  # empty without tokenizer.json
    sources: tuple[SourceFile, ...]
    tools: Mapping[str, str]
    engines: EngineFiles | None  # of the tensorrt backend
    fingerprint: Mapping[str, str]
    warnings: tuple[str, ...]
    card: DrafterCard | None  # of a drafter that has a card.json
    linked: Mapping[str, tuple[Path, FileEntry]] = field(default_factory=dict)  # files that are another bundle's

    @property
    def lines(self) -> tuple[str, ...]:
        """What was chosen, for people."""
        rows, arch = self.prefill_chunk, self.choice.arch
        read = read_bytes(self.programs, self.formats)
        ms = prefill_ms(self.programs, read, rows, arch, largest_board(arch.sm))
        return (
            self.choice.line if self.pair.drafter else f"{self.choice.line}; no drafter: plain decoding",
            f"building with recipe {self.recipe.name}: {self.recipe.description}",
            f"building for {self.max_context} tokens of context, prefill by {rows}: about {ms:.3g} ms a pass",
        )


def decide(config: BuildConfig) -> Decisions:
    """Check everything that can be checked before any work.

    Raises CheckpointError, RecipeError, BackendError or BuildError, naming what was found and what is wanted.
    """
    recipe = load_recipe(config.recipe) if config.recipe is not None else default_recipe()
    choice = choose(config.arch, config.backend, recipe)
    check_output(config)
    pair = recipe.masked(read_checkpoints(config.target, config.drafter, text_only=config.text_only))
    programs = pair_programs(pair)
    default = default_chunk(choice.arch, programs, choice.arch.most_rows, plans="tensorrt" in choice.backends)
    max_context, chunk = _sizes(config, recipe, pair, default)
    lanes = decide_lanes(config.lanes, recipe)
    tokenizer, warnings = read_tokenizer(config.target, pair)
    store = PairCheckpoint.open(config.target, config.drafter, programs.weights)
    choice, formats, engines, more = _backends(choice, recipe, pair, store, chunk)
    scales, unmeasured = decide_scales(recipe, pair, programs, store, formats, tokenizer, allowed=config.calibrate)
    store.release()
    parts = bundle_parts(programs, formats, stacked="native" in choice.backends)
    size = sum(FORMATS[formats[n]].nbytes(programs.weights[n].shape) for part in parts.values() for n in part.names)
    size += sum(stack_bytes(stack) for part in parts.values() for stack in part.stacks)
    here = size if engines is not None and not engines.deferred else 0
    check_space(config.output, size + here + (_KERNELS if choice.arch.sm else 0))
    tools = _tools(choice.active) | ({engines.flavour: engines.version} if engines and engines.version else {})
    sources, stamps = fingerprints(config.target, config.drafter, sees=pair.target.vision is not None)
    fingerprint = {
        **stamps,
        "config": json.dumps([choice.arch.name, choice.backends, max_context, chunk, lanes]),
        **choices(recipe, scales, tools),
    }
    return Decisions(
        config=config,
        choice=choice,
        recipe=recipe,
        pair=pair,
        programs=programs,
        store=store,
        formats=formats,
        parts=parts,
        size=size,
        max_context=max_context,
        prefill_chunk=chunk,
        lanes=lanes,
        scales=scales,
        tokenizer_files=copied_files(config.target) if tokenizer is not None else (),
        sources=sources,
        tools=tools,
        engines=engines,
        fingerprint=fingerprint,
        warnings=(*warnings, *unread_tower(config.target, pair, store, config.text_only), *more, *unmeasured),
        card=read_card(config.drafter) if config.drafter is not None else None,
    )


def choices(recipe: Recipe, scales: ScaleDecisions, tools: Mapping[str, str]) -> dict[str, str]:
    """What a build that is gone on with must have in common with the one before, besides its inputs."""
    return {
        "recipe": json.dumps(encode(recipe), sort_keys=True),
        "scales": hashlib.sha256(json.dumps(encode(scales)).encode()).hexdigest(),
        "tools": json.dumps(tools, sort_keys=True),
    }


def _backends(
    choice: Choice, recipe: Recipe, pair: PairSpec, store: PairCheckpoint, chunk: int
) -> tuple[Choice, dict[str, WeightFormat], EngineFiles | None, tuple[str, ...]]:
    """Backends that take the pair, the format of every weight, the engines, and warnings."""
    formats, engines = _formats(recipe, pair, store), None
    warnings: tuple[str, ...] = ()
    if "native" in choice.backends:
        formats, warnings = decide_native(choice.arch.name, recipe, pair, store.stored, formats)
    if "tensorrt" in choice.backends:
        if pair.target.experts is not None and "native" not in choice.backends:
            raise BackendError("experts are the native kernels' beside plans; build it with --backend native,tensorrt")
        try:
            warnings = warnings if "native" in choice.backends else expanded_weights(recipe, pair, formats)
            formats, engines = decide_engines(choice.arch.name, recipe, pair, store.stored, formats, chunk)
        except BackendError as error:
            if choice.given or choice.active == "tensorrt":
                raise
            choice = replace(choice, backends=("native",), why=f"no plans, as {error}")
    return choice, formats, engines, warnings


def check_output(config: BuildConfig) -> None:
    """Raise BuildError where no bundle may be put."""
    output = config.output
    if not output.name:
        raise BuildError(f"--output {str(output)!r} names no directory to make; give a path that ends in a name")
    for source in (config.target, config.drafter):
        if source is not None and output.resolve() == source.resolve():
            raise BuildError(f"--output {output} is a checkpoint of this build; choose another directory")
    check_free(output, force=config.force)
    try:
        check_place(output, "--output")
    except RequestError as error:
        raise BuildError(str(error)) from None


def _sizes(config: BuildConfig, recipe: Recipe, pair: PairSpec, chunk: int) -> tuple[int, int]:
    """Context and prefill chunk: what is asked for must fit; what recipe or arch suggest is lowered to fit."""
    limit, block = pair.target.max_position_embeddings, pair.rows
    context = config.max_context if config.max_context is not None else min(recipe.context.max_context, limit)
    if not block < context <= limit:
        raise BuildError(
            f"max_context is {context}, accepted are {block + 1} (block size + 1) to {limit} (the target's)"
        )
    if config.prefill_chunk is None:
        return context, min(recipe.context.prefill_chunk or chunk, context)
    if not 1 <= config.prefill_chunk <= context:
        raise BuildError(f"prefill_chunk is {config.prefill_chunk}, accepted are 1 to {context} (max_context)")
    return context, config.prefill_chunk


def _formats(recipe: Recipe, pair: PairSpec, store: PairCheckpoint) -> dict[str, WeightFormat]:
    """The format of every weight in the bundle; a wide lm_head of a tied target is not stored twice."""
    weights = pair_programs(pair).weights
    formats = dict(recipe.formats(weights, {name: store.stored.get(name) for name in weights}))
    if pair.target.tied and not FORMATS[formats["target.lm_head"]].quantized:
        formats["target.lm_head"] = TIED
    return formats


def _tools(backend: str) -> dict[str, str]:
    """Versions of what takes part in a build."""
    tools = {"edge-dflash": __version__, "python": platform.python_version()}
    tools |= {name: version(name) for name in ("numpy", "torch")}
    return {**tools, "kernels": kernels_digest(), "nvrtc": compiler_version()} if backend != "reference" else tools


def check_space(output: Path, size: int) -> None:
    """Compare the bundle's size with the free space of the disk it goes to, less what an earlier run left there."""
    staging = building_path(output) / "bundle"
    done = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file()) if staging.is_dir() else 0
    place = next(parent for parent in output.absolute().parents if parent.exists())
    state = os.statvfs(place)
    free, needed = state.f_bavail * state.f_frsize, max(0, size + _SLACK - done)
    if free < needed:
        raise BuildError(
            f"the bundle needs {needed / 1e6:,.1f} MB more in {place}, which has {free / 1e6:,.1f} MB free; "
            "free some space or choose another --output"
        )
