"""Everything a build decides and checks before it writes a byte.

Reads configs, headers and the recipe; weights are only asked how they are stored. Which weight gets which format and
lies in which file, how much space that takes, and the fingerprint by which an interrupted build finds its own work.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path

from edge_dflash.backends.cuda.compile import compiler_version, kernels_digest
from edge_dflash.backends.cuda.tensorrt.flavours import TENSORRT_RTX
from edge_dflash.board.archs import ARCHS_OF, BACKENDS, Arch, ordered
from edge_dflash.board.profiles import largest_board, named_arch
from edge_dflash.builder.card import DrafterCard, read_card
from edge_dflash.builder.engines import decide_engines, expanded_weights
from edge_dflash.builder.journal import check_free, check_space
from edge_dflash.builder.scales import ScaleDecisions, decide_scales, rounded_weights
from edge_dflash.bundle.manifest import EngineFiles, FileEntry, Manifest, RoundingUse, SourceFile
from edge_dflash.bundle.parts import Part, bundle_parts, stack_bytes
from edge_dflash.checks.footprint import read_bytes
from edge_dflash.checks.inspect import default_chunk, prefill_ms
from edge_dflash.common.files import check_place, head_of, is_there
from edge_dflash.common.tables import encode
from edge_dflash.decode.backend import Precision
from edge_dflash.decode.shape import MOST_LANES
from edge_dflash.errors import BackendError, BuildError, BundleError, CheckpointError, RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.program import PairPrograms
from edge_dflash.model.registry import NO_DRAFTER
from edge_dflash.model.specs import PairSpec
from edge_dflash.model.vision import FILE, FLAT_FILE
from edge_dflash.quality.bundle import TaskSet
from edge_dflash.text.files import TOKENIZER_FILES, read_object, read_templates, tokenizer_files
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.version import __version__
from edge_dflash.weights.checkpoint import PairCheckpoint, checkpoint_pair
from edge_dflash.weights.formats import FORMATS, QUANTIZED, TIED, Nvfp4Weight, WeightFormat, WeightStore, read_as
from edge_dflash.weights.recipe import Recipe, Rounding, default_recipe, load_recipe

BOTH = ("native", "tensorrt")
CREATED_BY = f"edge-dflash {__version__}"


@dataclass(frozen=True)
class Choice:
    """The backends of a build."""

    arch: Arch
    backends: tuple[str, ...]  # in the order of BACKENDS
    why: str
    given: bool  # asked for by name: what stands in the way of one is an error

    @property
    def active(self) -> str:
        """The backend that runs the bundle until two were timed: native kernels run at once."""
        return self.backends[0]

    @property
    def line(self) -> str:
        """For people: what was chosen and why."""
        return f"building for {self.arch.name}, backend {','.join(self.backends)}: {self.why}"


def choose(arch: str, backend: str | None, recipe: Recipe) -> Choice:
    """Decide by ``backend`` ("native", "native,tensorrt"), or by the arch when it is None.

    Raises BackendError for unknown names and for pairs that are not built together.
    """
    found = named_arch(arch)
    if backend is not None:
        return Choice(found, _named(arch, found, backend), "as asked for", given=True)
    if not found.sm:
        return Choice(found, ("reference",), "a CPU runs the reference backend alone", given=False)
    first = read_as("nvfp4").tensorrt
    if first is None or found.sm < first:
        return Choice(found, ("native",), "our kernels read every format there", given=False)
    if recipe.activations == "nvfp4":
        why = f"recipe {recipe.name} has NVFP4 activations, which only TensorRT computes"
        return Choice(found, ("tensorrt",), why, given=False)
    if found.tensorrt == TENSORRT_RTX.module:
        why = "kernels that run at once, and plans, as TensorRT for RTX is installed here"
    else:
        why = "kernels that run at once, and the networks of plans, which only the board can compile"
    return Choice(found, BOTH, f"{why}; build --finish on the board keeps the faster", given=False)


def _named(arch: str, found: Arch, backend: str) -> tuple[str, ...]:
    """The backends of ``--backend``. Raises BackendError."""
    names = [name.strip() for name in backend.split(",")]
    if any(name not in BACKENDS for name in names):
        raise BackendError(f"--backend is {backend!r}, accepted are {', '.join(BACKENDS)} and {','.join(BOTH)}")
    if len(set(names)) > 1 and ordered(names) != BOTH:
        raise BackendError(f"--backend is {backend!r}; only native and tensorrt share a bundle: build the other apart")
    for name in names:
        if name not in found.backends:
            raise BackendError(
                f"--arch is {arch!r}, --backend {name} is built for {', '.join(ARCHS_OF[name])}; "
                "leave --backend out for what suits the arch"
            )
    return ordered(names)


def decide_native(
    arch: str, recipe: Recipe, pair: PairSpec, store: WeightStore, formats: Mapping[str, WeightFormat]
) -> tuple[dict[str, WeightFormat], tuple[str, ...]]:
    """Formats of a native bundle and warnings.

    Raises BuildError without a compiler and BackendError for what the kernels do not take.
    """
    compiler_version()
    from edge_dflash.backends.cuda.support import check_native, narrowed  # the bindings of CUDA, only here

    if recipe.activations == "nvfp4":
        raise BackendError(
            f"recipe {recipe.name} asks for activations in nvfp4, the native backend computes with bf16; "
            "set activations: bf16, the weights may stay nvfp4"
        )
    programs = pair_programs(pair)
    check_native(pair, formats, arch=arch, kv=recipe.kv_format)
    linears = [store.get(name) for name, spec in programs.weights.items() if spec.kind == "linear"]
    count = sum(isinstance(weight, Nvfp4Weight) and weight.input_scale is not None for weight in linears)
    dropped = (
        f"{count} linears of the checkpoint carry scales of NVFP4 activations, which are left out: "
        "the native backend computes with bf16 activations"
    )
    return narrowed(formats, programs, store), (dropped,) if count else ()


_CONFIG_FILES = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")
_IMAGE_FILES = (FLAT_FILE, FILE)


def unread_tower(target: Path, pair: PairSpec, store: PairCheckpoint, text_only: bool) -> tuple[str, ...]:
    """A warning about a tower whose files do not say how pictures become patches."""
    if pair.target.vision is not None or text_only or not store.has_tower:
        return ()
    return (
        f"{target} has the tensors of a vision tower, but no vision_config or no {FLAT_FILE}: the bundle takes no "
        "images; download the file, or build with --text-only",
    )


def copied_files(directory: Path) -> tuple[Path, ...]:
    """Files of a checkpoint, or of tokenizer/ of a bundle, that tokenizer/ of a bundle has."""
    generation = directory / "generation_config.json"
    return (*tokenizer_files(directory), *([generation] if is_there(generation) else ()))


def read_tokenizer(target: Path, pair: PairSpec) -> tuple[Tokenizer | None, tuple[str, ...]]:
    """Return the target's tokenizer, if it has one, and warnings."""
    file = target / TOKENIZER_FILES[0]
    if not is_there(file):
        return None, (f"{target} has no {file.name}: the bundle takes and returns token ids only",)
    try:
        tokenizer = Tokenizer.open(target)
    except BundleError as error:  # its remedies are those of a bundle
        what = str(error).rpartition("; ")[0] or str(error)
        raise CheckpointError(f"{what}; download the tokenizer's files again") from None
    found = (check_mask_token(tokenizer, file, pair), _no_chats(target, tokenizer))
    return tokenizer, tuple(warning for warning in found if warning)


def _no_chats(target: Path, tokenizer: Tokenizer) -> str | None:
    """A warning about chats that are all refused."""
    if tokenizer.flaw is not None:
        return f"{target}: {tokenizer.flaw}: chats are refused until it is corrected; texts and token ids are taken"
    if tokenizer.template is not None:
        return None
    path = target / "tokenizer_config.json"
    others = read_templates(target, read_object(path) if is_there(path) else {})
    named = f" by default (it has {', '.join(sorted(others))})" if others else ""
    return f"{target} has no chat template{named}: chats are refused, texts and token ids are taken as they are"


def check_mask_token(tokenizer: Tokenizer, where: Path, pair: PairSpec) -> str | None:
    """Check that the tokenizer and the drafter's mask token belong to the same vocabulary; return a warning or None.

    Published pairs put the mask token either on a named special token or on the first id after the tokenizer's last
    one, which is a padding row of the embedding (Qwen3: 151669 behind 0..151668). Both are accepted, the second with a
    warning. Any other id without a token means that the tokenizer is of another model or lost its added tokens.
    """
    mask, vocabulary, size = pair.mask_token_id, pair.target.vocab_size, tokenizer.size
    if size > vocabulary:
        raise CheckpointError(
            f"{where} has {size} tokens, the target's vocabulary only {vocabulary}; "
            "use the tokenizer.json of this target"
        )
    if mask is None or tokenizer.token(mask) is not None:
        return None
    if mask == size:
        return f"mask token id {mask} has no token in {where.name}: it is the first id after its last"
    raise CheckpointError(
        f"{where} has no token with the drafter's mask id {mask} (it has {size} tokens); use the "
        "tokenizer.json of this target, or move it away to build a bundle that takes token ids"
    )


def fingerprints(target: Path, drafter: Path | None, *, sees: bool) -> tuple[tuple[SourceFile, ...], dict[str, str]]:
    """Fingerprints of the checkpoint files: those for the manifest, and those with times for the journal.

    ``sees``: the tower is built, so that the files of its image processor count.
    """
    sources: list[SourceFile] = []
    stamps: dict[str, str] = {}
    for model, directory in [("target", target)] + ([("drafter", drafter)] if drafter else []):
        names = [name for name in (*_CONFIG_FILES, *(_IMAGE_FILES if sees else ())) if is_there(directory / name)]
        names += [path.relative_to(directory).as_posix() for path in copied_files(directory)]
        names += sorted(path.name for path in directory.glob("*.safetensors"))
        for name in names:
            size, time, digest = head_of(directory / name)
            sources.append(SourceFile("target" if model == "target" else "drafter", name, size, digest))
            stamps[f"{model}/{name}"] = f"{size} {time} {digest}"
    return tuple(sources), stamps


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
    rounding: Rounding | None = None  # to NVFP4; None: as the recipe says
    quality: bool = False  # measure the bundle against the target's checkpoint
    quality_target: float | None = None  # KLD of the weights, at most: parts of the target get wider formats
    bytes_budget: int | None = None  # of a cycle, at most: the same
    prompts: Path | None = None  # to measure on; None: calibration prompts that were left over
    resume: str | None = None  # what is to be done again after an interrupt; None: :attr:`command`

    @property
    def command(self) -> str:
        """The command line that runs this build, and resumes it."""
        words = ["edge-dflash", "build"]
        for one in fields(self)[:-1]:  # the last is no option
            flag, value = one.name.replace("_", "-"), getattr(self, one.name)
            value = NO_DRAFTER if value is None and one.name == "drafter" else value
            if isinstance(value, bool):
                words += [f"--{flag}" if value else f"--no-{flag}"] if value != one.default else []
            elif value is not None:
                words += [f"--{flag}", str(value)]
        return shlex.join(words)


@dataclass(frozen=True)
class Decisions:
    """A build that was checked and can start."""

    config: BuildConfig
    choice: Choice
    recipe: Recipe
    manifest: Manifest  # as the bundle's will be, but for its files and the scales that are measured
    programs: PairPrograms
    store: PairCheckpoint
    parts: Mapping[str, Part]  # weight file -> what lies in it
    size: int  # bytes of the weights to be written, about
    scales: ScaleDecisions
    tokenizer_files: tuple[Path, ...]  # empty without tokenizer.json
    fingerprint: Mapping[str, str]
    warnings: tuple[str, ...]
    card: DrafterCard | None  # of a drafter that has a card.json
    linked: Mapping[str, tuple[Path, FileEntry]]  # files that are another bundle's

    @property
    def pair(self) -> PairSpec:
        """Target and drafter."""
        return self.manifest.pair

    @property
    def lines(self) -> tuple[str, ...]:
        """What was chosen, for people."""
        rows, arch = self.manifest.prefill_chunk, self.choice.arch
        read = read_bytes(self.programs, self.manifest.weights)
        ms = prefill_ms(self.programs, read, rows, arch, largest_board(arch.sm))
        kept = self.scales.kept_bytes(self.programs.weights) / 1e6
        return (
            *([f"keeping {kept:,.1f} MB of inputs beside the output until the build ends"] if kept else []),
            self.choice.line if self.pair.drafter else f"{self.choice.line}; no drafter: plain decoding",
            f"building with recipe {self.recipe.name}: {self.recipe.description}",
            f"building for {self.manifest.max_context} tokens of context, prefill by {rows}: about {ms:.3g} ms a pass",
        )


def decide(config: BuildConfig) -> Decisions:
    """Check everything that can be checked before any work.

    Raises CheckpointError, RecipeError, BackendError or BuildError, naming what was found and what is wanted.
    """
    _check_budget(config)
    recipe = chosen_recipe(config)
    choice = choose(config.arch, config.backend, recipe)
    check_output(config)
    pair = checkpoint_pair(config.target, config.drafter)
    pair = recipe.masked(pair.text_only if config.text_only else pair)
    programs = pair_programs(pair)
    default = default_chunk(choice.arch, programs, choice.arch.most_rows, plans="tensorrt" in choice.backends)
    max_context, chunk = _sizes(config, recipe, pair, default)
    lanes = recipe.context.lanes if config.lanes is None else config.lanes
    tokenizer, warnings = read_tokenizer(config.target, pair)
    store = PairCheckpoint.open(config.target, config.drafter, programs.weights)
    choice, formats, engines, more = find_backends(choice, recipe, pair, store, chunk)
    sources, stamps = fingerprints(config.target, config.drafter, sees=pair.target.vision is not None)
    manifest = Manifest(
        created_by=CREATED_BY,
        arch=choice.arch.name,
        backend=choice.active,
        standby=choice.backends[1:],
        pair=pair,
        precision=Precision(activations="bfloat16", kv=recipe.kv_format),
        recipe=recipe.name,
        max_context=max_context,
        prefill_chunk=chunk,
        lanes=lanes,
        kv_scales={},
        tokenizer=tokenizer is not None,
        tools=_tools(choice.arch) | ({engines.flavour: engines.version} if engines and engines.version else {}),
        sources=sources,
        weights=formats,
        files={},
        plans=engines,
    )
    inputs = {**stamps, "config": json.dumps([choice.arch.name, choice.backends, max_context, chunk, lanes])}
    warnings = (*warnings, *unread_tower(config.target, pair, store, config.text_only), *more)
    files = copied_files(config.target) if tokenizer is not None else ()
    return settle(config, choice, recipe, manifest, store, tokenizer, files, inputs, warnings)


def chosen_recipe(config: BuildConfig) -> Recipe:
    """The recipe of a build, with what the config says in its place. Raises RecipeError."""
    recipe = load_recipe(config.recipe) if config.recipe is not None else default_recipe()
    return replace(recipe, rounding=config.rounding or recipe.rounding)


def settle(
    config: BuildConfig,
    choice: Choice,
    recipe: Recipe,
    manifest: Manifest,
    store: PairCheckpoint,
    tokenizer: Tokenizer | None,
    tokenizer_files: tuple[Path, ...],
    inputs: Mapping[str, str],
    warnings: tuple[str, ...],
    linked: Mapping[str, tuple[Path, FileEntry]] | None = None,
) -> Decisions:
    """What follows from the manifest of a build: scales, files, their space, and its fingerprint.

    ``inputs``: what a build that is gone on with must have in common with the one before, besides recipe, scales and
    tools. Raises BuildError.
    """
    if not 1 <= manifest.lanes <= MOST_LANES:
        raise BuildError(f"lanes is {manifest.lanes}, accepted are 1 to {MOST_LANES}")
    linked, formats, programs = linked or {}, manifest.weights, pair_programs(manifest.pair)
    allowed = config.calibrate
    scales, unmeasured = decide_scales(recipe, manifest.pair, programs, store, formats, tokenizer, allowed=allowed)
    by, rounding = _rounding(recipe, scales, formats, store)
    if by != recipe.rounding:
        warnings = (*warnings, "no linear of the target is rounded on calibration prompts: search, not compensation")
    manifest = replace(manifest, rounding=rounding)
    store.release()
    parts = bundle_parts(programs, formats, stacked=manifest.stacked)
    written = [part for path, part in parts.items() if path not in linked]
    size = sum(FORMATS[formats[n]].nbytes(programs.weights[n].shape) for part in written for n in part.names)
    size += sum(stack_bytes(stack) for part in written for stack in part.stacks)
    plans = size if manifest.plans is not None and not manifest.plans.deferred else 0
    kept_inputs = scales.kept_bytes(programs.weights)
    why = f" ({kept_inputs / 1e6:,.1f} MB of inputs until it is built: --rounding search needs none)"
    needed = size + plans + kept_inputs + _SLACK + (_KERNELS if choice.arch.sm and not linked else 0)
    check_space(config.output, needed, why=why if kept_inputs else "")
    fingerprint = {
        **inputs,
        "recipe": json.dumps(encode(recipe), sort_keys=True),
        "scales": hashlib.sha256(json.dumps(encode(scales)).encode()).hexdigest(),
        "tools": json.dumps(manifest.tools, sort_keys=True),
    }
    measured = config.quality, config.quality_target, config.bytes_budget
    if any(measured):
        prompts = repr((measured, config.prompts and TaskSet.read(config.prompts)))
        fingerprint["quality"] = hashlib.sha256(prompts.encode()).hexdigest()
    return Decisions(
        *(config, choice, recipe, manifest, programs, store, parts, size, scales, tokenizer_files, fingerprint),
        warnings=(*warnings, *unmeasured),
        card=read_card(config.drafter) if config.drafter is not None else None,
        linked=linked,
    )


def _rounding(
    recipe: Recipe, scales: ScaleDecisions, formats: Mapping[str, WeightFormat], store: PairCheckpoint
) -> tuple[Rounding, RoundingUse | None]:
    """How weights are rounded, and what the manifest says of it; None: by max, or none is and none was."""
    by: Rounding = "search" if recipe.rounding == "compensated" and not scales.compensated else recipe.rounding
    rounded, quantized = rounded_weights(formats, store), {form.name for form in QUANTIZED}
    kept = sum(form in quantized and store.get(name).format == form for name, form in formats.items())
    if by == "max" or not (rounded or kept):
        return by, None
    return by, RoundingUse(by, len(rounded), kept, scales.known.tokens if scales.moments else 0)


def find_backends(
    choice: Choice, recipe: Recipe, pair: PairSpec, store: PairCheckpoint, chunk: int
) -> tuple[Choice, dict[str, WeightFormat], EngineFiles | None, tuple[str, ...]]:
    """Backends that take the pair, the format of every weight, the engines, and warnings. Raises BackendError."""
    weights, engines = pair_programs(pair).weights, None
    formats = recipe.formats(weights, {name: store.get(name) for name in weights})
    if pair.target.tied and not FORMATS[formats["target.lm_head"]].quantized:
        formats["target.lm_head"] = TIED  # a wide head is not stored twice
    warnings: tuple[str, ...] = ()
    if "native" in choice.backends:
        formats, warnings = decide_native(choice.arch.name, recipe, pair, store, formats)
    if "tensorrt" in choice.backends:
        if pair.target.experts is not None and "native" not in choice.backends:
            raise BackendError("experts are the native kernels' beside plans; build it with --backend native,tensorrt")
        try:
            warnings = warnings if "native" in choice.backends else expanded_weights(recipe, pair, formats)
            formats, engines = decide_engines(choice.arch.name, recipe, pair, store, formats, chunk)
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


def _check_budget(config: BuildConfig) -> None:
    target, most = config.quality_target, config.bytes_budget
    if target is not None and most is not None:
        raise RequestError("--quality-target and --bytes-budget are two ways to choose one mix; give one of them")
    if target is not None and not 0 < target < math.inf:
        raise RequestError(f"--quality-target is {target}; give a KLD above 0, such as 0.01 (near lossless)")
    if most is not None and most < 1:
        raise RequestError(f"--bytes-budget is {most}; give bytes of a cycle, as inspect prints them")
    if config.prompts is not None and not config.quality and target is None and most is None:
        raise RequestError("--prompts are measured on with --quality, --quality-target or --bytes-budget; give one too")


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


def _tools(arch: Arch) -> dict[str, str]:
    """Versions of what takes part in a build."""
    tools = {"edge-dflash": __version__, "python": platform.python_version()}
    tools |= {name: version(name) for name in ("numpy", "torch")}
    return {**tools, "kernels": kernels_digest(), "nvrtc": compiler_version()} if arch.sm else tools
