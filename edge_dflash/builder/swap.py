"""A bundle with the target of another one and another drafter: the target's files are taken as they are.

So a drafter is replaced where the target's checkpoint is not at hand, and the target stays the same byte for byte.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edge_dflash.backends.cuda.compile import kernels_digest
from edge_dflash.board.profiles import named_arch
from edge_dflash.builder.decide import (
    CREATED_BY,
    BuildConfig,
    Decisions,
    check_mask_token,
    check_output,
    choose,
    chosen_recipe,
    copied_files,
    decide_native,
    fingerprints,
    settle,
)
from edge_dflash.bundle.manifest import MANIFEST, Manifest, SourceFile, fingerprint
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.files import is_there
from edge_dflash.errors import BuildError
from edge_dflash.model import pair_programs
from edge_dflash.model.program import PairPrograms
from edge_dflash.model.registry import match_pair, read_drafter_spec
from edge_dflash.model.specs import PairSpec
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.formats import FORMATS, Weight, WeightFormat
from edge_dflash.weights.recipe import Recipe, default_recipe


def is_bundle(path: Path) -> bool:
    """Whether a directory is a bundle, not a checkpoint."""
    return is_there(path / MANIFEST)


class SwappedStore(PairCheckpoint):
    """The target's weights of a bundle, and those of a drafter's checkpoint."""

    def __init__(self, bundle: Bundle, drafter: Path | None, programs: PairPrograms) -> None:
        """Raise CheckpointError for a drafter whose tensors are not those that the pair needs."""
        own = {name: spec for name, spec in programs.weights.items() if name.startswith("drafter.")}
        super().__init__({} if drafter is None else PairCheckpoint.of_drafter(drafter, own), own)
        self._bundle = bundle

    def get(self, name: str) -> Weight:
        """Return a weight. Raises KeyError for an unknown name."""
        return self._bundle.get(name) if name.startswith("target.") else super().get(name)

    @property
    def has_tower(self) -> bool:
        """Whether there is a vision tower that nobody reads: what a bundle has, is read."""
        return False

    def stored_kv_scale(self, state: str) -> tuple[float, float] | None:
        """The bundle's for the target, the checkpoint's for the drafter."""
        if state.startswith("target."):
            return self._bundle.kv_scale(state)
        return super().stored_kv_scale(state)


def decide_swap(config: BuildConfig) -> Decisions:
    """Everything that a build of ``config``, whose target is a bundle, decides.

    Sizes, arch, recipe and tokenizer are the bundle's. Raises CheckpointError for a drafter of another target,
    BuildError for what cannot be changed without the target's checkpoint, BundleError for a damaged bundle.
    """
    check_output(config)
    bundle = Bundle.open(config.target)
    manifest, target = bundle.manifest, bundle.pair.target
    refuse(config, manifest)
    drafter = read_drafter_spec(config.drafter, target.num_layers) if config.drafter else None
    pair = match_pair(target, drafter) if drafter else PairSpec(target, None)
    backends = ",".join(name for name in manifest.backends if name != "tensorrt")
    choice = replace(choose(manifest.arch, backends, default_recipe()), why="the target is that of a bundle")
    recipe = _recipe(config, manifest)
    pair = recipe.masked(pair)
    programs = pair_programs(pair)
    store = SwappedStore(bundle, config.drafter, programs)
    formats = _formats(recipe, manifest, programs, store)
    out = "the bundle's TensorRT plans are left out: they hold the drafter; build from the checkpoints for new ones"
    warnings: tuple[str, ...] = (out,) if "tensorrt" in manifest.backends else ()
    if "native" in choice.backends:
        formats, _ = decide_native(manifest.arch, recipe, pair, store, formats)
        formats = {name: manifest.weights.get(name, form) for name, form in formats.items()}
    tokenizer = Tokenizer.open(bundle.path / "tokenizer") if manifest.tokenizer else None
    if tokenizer is not None and (warning := check_mask_token(tokenizer, bundle.path / "tokenizer", pair)):
        warnings += (warning,)
    plans = manifest.plans.flavour if manifest.plans else ""
    sources, stamps = _sources(config, manifest)
    new = replace(
        manifest,
        created_by=CREATED_BY,
        backend=choice.active,
        standby=(),
        pair=pair,
        recipe=recipe.name,
        lanes=manifest.lanes if config.lanes is None else config.lanes,
        tools={name: version for name, version in manifest.tools.items() if name != plans},
        sources=sources,
        weights=formats,
        plans=None,
        no_self_test=None,
        trial=None,
        rounding=None,
    )
    inputs = {**stamps, "bundle": fingerprint(manifest), "lanes": str(new.lanes)}
    same = ("weights/target-", "kernels/")  # they do not depend on the drafter
    linked = {name: (bundle.path / name, entry) for name, entry in manifest.files.items() if name.startswith(same)}
    files = copied_files(bundle.path / "tokenizer")
    return settle(config, choice, recipe, new, store, tokenizer, files, inputs, warnings, linked)


def _sources(config: BuildConfig, manifest: Manifest) -> tuple[tuple[SourceFile, ...], dict[str, str]]:
    """Fingerprints of the target's files, as the bundle has them, and of the drafter's; the latter with times."""
    found, stamps = fingerprints(config.drafter, None, sees=False) if config.drafter else ((), {})
    target = (one for one in manifest.sources if one.model == "target")
    return (*target, *(replace(one, model="drafter") for one in found)), stamps


def refuse(config: BuildConfig, manifest: Manifest) -> None:
    """Raise BuildError for options that are the bundle's own."""
    given = {
        "--arch": (named_arch(config.arch).name, ("cpu", manifest.arch)),
        "--backend": (config.backend, (None, *manifest.backends)),
        "--max-context": (config.max_context, (None, manifest.max_context)),
        "--prefill-chunk": (config.prefill_chunk, (None, manifest.prefill_chunk)),
        "--text-only": (config.text_only, (False,)),
        "--quality-target": (config.quality_target, (None,)),
        "--bytes-budget": (config.bytes_budget, (None,)),
        "--prompts": (config.prompts, (None,)),
    }
    for option, (value, accepted) in given.items():
        if value not in accepted:
            raise BuildError(
                f"{option} is {value} and --target is a bundle, whose target cannot be changed; leave it out, or build "
                "from the target's checkpoint"
            )
    if set(manifest.backends) == {"tensorrt"}:
        raise BuildError(
            "--target is a bundle that only TensorRT runs, and its plans hold both models; build from the checkpoints"
        )
    if "native" in manifest.backends and manifest.tools.get("kernels") != kernels_digest():
        raise BuildError("--target is a bundle with kernels of another version; build from the target's checkpoint")


def _recipe(config: BuildConfig, manifest: Manifest) -> Recipe:
    """How the drafter is stored; keys and values as the target's."""
    recipe = chosen_recipe(config)
    name = recipe.name if config.recipe else manifest.recipe
    return replace(recipe, name=name, kv="fp8" if manifest.precision.kv == "fp8" else "bf16", activations="bf16")


def _formats(
    recipe: Recipe, manifest: Manifest, programs: PairPrograms, store: SwappedStore
) -> dict[str, WeightFormat]:
    """The bundle's for the target; for the drafter as the bundle's own has them where names and storage allow it."""
    own = {name: spec for name, spec in programs.weights.items() if name.startswith("drafter.")}
    wanted = recipe.formats(own, {name: store.get(name) for name in own})
    found = dict[str, WeightFormat]()
    for name in programs.weights:
        if name not in own:
            found[name] = manifest.weights[name]
            continue
        old, stored = manifest.weights.get(name), store.get(name).format
        found[name] = old if old is not None and not FORMATS[stored].quantized else wanted[name]
    return found
