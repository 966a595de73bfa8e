"""Mixed precision by budget: units measured on weights that are converted on the way, the mix, and its recipe.

Each unit is measured alone in the recipe's format and in FP8; in BF16 it is the source.
:mod:`edge_dflash.builder.budget` chooses. OUTPUT.recipe.yaml holds the choice, a recipe like any other. Measurements
are files of the unfinished build: one that was killed makes none twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod

import torch

from edge_dflash.backends import SMALL_MODEL
from edge_dflash.backends.reference.dense import arithmetic
from edge_dflash.board.profiles import largest_board
from edge_dflash.builder.budget import MEASUREMENTS, Curve, FormatMix, Option, Point, Widening, steps
from edge_dflash.builder.convert import Choose, convert, one_thread
from edge_dflash.builder.decide import Decisions, decide, find_backends
from edge_dflash.builder.journal import WorkDir
from edge_dflash.bundle.parts import JOURNAL, building_path, read_journal
from edge_dflash.checks import footprint
from edge_dflash.checks.inspect import DEFAULT_CONTEXT
from edge_dflash.common.files import LARGE, is_there, read_bytes, write_whole
from edge_dflash.common.progress import Progress
from edge_dflash.errors import BuildError
from edge_dflash.quality.bundle import TaskSet, most_tokens, seconds, working
from edge_dflash.quality.compare import figures
from edge_dflash.quality.measure import ALL, UNITS, Run, Stores, all_variants
from edge_dflash.quality.stream import Passes, Variant
from edge_dflash.quality.texts import Text, fingerprint, make_texts
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.formats import FORMATS, TIED, Weight, WeightFormat
from edge_dflash.weights.quantize import fused_group
from edge_dflash.weights.recipe import WIDE_MODULES, Override, Recipe, dump_recipe

_ROUND = 1e-7  # seconds of a core for each value of a weight
_WIDER: tuple[WeightFormat, ...] = ("fp8", "bf16")  # the second one is the source
_SHOWN = 16  # points of a curve
MEASURED = ".kld"  # ends the names of files of an unfinished build
_LINEARS = {  # of a unit of each kind, below its layer
    "attention": ("self_attn.*_proj",),
    "gated_delta": ("linear_attn.*_proj", "linear_attn.in_proj_[!ab]*"),
    "mlp": ("mlp.*_proj",),
    "experts": ("mlp.*_proj",),
}
Formats = Mapping[str, WeightFormat]


class Converted:
    """A WeightStore of a build's weights in some formats, made by its own code when asked for; keeps a fused group."""

    def __init__(self, decided: Decisions, formats: Formats, choose: Choose, pool: Executor) -> None:
        self._store, self._formats = decided.store, formats
        again = decided.recipe.requantize == "fp8"
        self._make = partial(convert, formats=formats, input_scales={}, run=pool.map, again=again, choose=choose)
        self._kept: dict[str, Weight] = {}
        self.kv_scale = decided.store.kv_scale

    def get(self, name: str) -> Weight:
        """Return the weight. Raises CheckpointError and BuildError as :func:`~edge_dflash.builder.convert.convert`."""
        stored = self._store.get(name)
        if self._formats[name] in (TIED, stored.format):
            return stored
        if name not in self._kept:
            self._kept = {}
            group = [member for member in fused_group(name) if member in self._formats]
            with one_thread(), torch.device("cpu"):
                self._kept = self._make(self._store, group)
        return self._kept[name]


class Mixing:
    """Measures and chooses the mix of a build's budget.

    ``chooser`` gives what chooses block scales, for which it may run the calibration.
    """

    def __init__(self, decided: Decisions, chooser: Callable[[], Choose], progress: Progress) -> None:
        """Check everything before any work.

        Raises BuildError for a budget below the least, and for a recipe of other inputs that is in the way,
        BackendError where the backend takes no wider units, and RequestError for bad prompts.
        """
        self._decided, self._chooser, self._progress = decided, chooser, progress
        output = decided.config.output
        self._recipe = output.with_name(f"{output.name}.recipe.yaml")
        begun = read_journal(building_path(output) / JOURNAL)[0] or {}
        self._check_free(own=begun.get("fingerprint") == decided.fingerprint)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._passes, self._base = Passes.of(decided.pair), decided.manifest.weights
        specs, store = decided.programs.weights, decided.store
        linears = {n for n, spec in specs.items() if spec.kind == "linear" and spec.module not in WIDE_MODULES}
        units = {unit: frozenset(names & linears) for unit, names in self._passes.units.items()}
        self._units = {unit: names for unit, names in units.items() if names}
        quantized = {name for name in linears if FORMATS[store.get(name).format].quantized}
        self._free = [unit for unit, names in self._units.items() if names.isdisjoint(quantized)]
        texts = _texts(decided, most_tokens(self._passes, "float32", self._device))
        self._ids, self._texts = [text.ids for text in texts], fingerprint(texts)
        variants = all_variants(self._passes, "float32", sum(map(len, self._ids)))
        self._whole = {ALL: variants[ALL]}
        self._alone = {unit: variants[f"{UNITS}{unit}"] for unit in self._units}
        config, made = decided.config, decided.manifest
        if config.bytes_budget is not None:
            Curve((), self._cycle({}), 0.0, 0.0).within(config.bytes_budget)
        for form in _WIDER:
            recipe = _widened(decided.recipe, dict.fromkeys(self._free, form))
            find_backends(decided.choice, recipe, made.pair, store, made.prefill_chunk)

    def mixed(self, work: WorkDir, say: Callable[[str], None]) -> tuple[Decisions, FormatMix]:
        """The build with its mix. Raises BuildError for a budget that no mix keeps, or a recipe that was changed."""
        say(self.forecast())
        config, small = self._decided.config, self._decided.pair.target.hidden_size <= SMALL_MODEL
        with one_thread() if small else nullcontext():
            mix = self._chosen(work)
        text = dump_recipe(_recipe(self._decided, mix, self._texts)).encode()
        self._check_free(own=is_there(self._recipe) and read_bytes(self._recipe, LARGE) == text)
        write_whole(self._recipe, text)
        mix = replace(mix, recipe=str(self._recipe))
        for line in _table(mix):
            say(line)
        return replace(decide(replace(config, recipe=self._recipe)), config=config), mix

    def _check_free(self, *, own: bool) -> None:
        if is_there(path := self._recipe) and not own and not self._decided.config.force:
            raise BuildError(
                f"{path} is there, and not what this build makes: its inputs were others, or it was changed; build "
                f"with --recipe {path} alone, move it away, or replace it with --force"
            )

    def forecast(self) -> str:
        """What is about to be done, in a line."""
        whole, units = (seconds(self._passes, some, self._device) for some in (self._whole, self._whole | self._alone))
        values = sum(prod(self._decided.programs.weights[n].shape) for names in self._units.values() for n in names)
        rounded = (2 + MEASUREMENTS) * values * _ROUND / (os.cpu_count() or 1)
        minutes = max(1.0, (2 * units + MEASUREMENTS * whole + rounded) / 60)
        rows, kept = next(iter(self._alone.values())).rows, len(self._units) - len(self._free)
        return (
            f"measuring {len(self._units)} units in two formats on {rows} tokens, mixes on {self._whole[ALL].rows}: "
            f"about {minutes:.0f} min at most"
            + (f"; {kept} units stay quantized as they are" if kept else "")
            + ("; errors are compensated in the bundle alone" if self._decided.recipe.rounding == "compensated" else "")
        )

    def _measured(self, work: WorkDir, formats: Formats, variants: Mapping[str, Variant]) -> dict[str, float]:
        """Mean KLD of each variant that differs from the source; measured once, also by a build that was killed."""
        what = self._decided.fingerprint, sorted(formats.items()), sorted(variants), self._device, arithmetic()
        key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()

        def measured() -> Iterator[bytes]:
            store, folder = self._decided.store, work.root / "mix"
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool, working(folder, key):
                other = Converted(self._decided, formats, self._chooser(), pool)
                stores = Stores(store, other, release=store.release)
                run = Run(self._passes, stores, self._ids, variants, device=self._device, folder=folder)
                found = {name: figures(one).kld.mean for name, one in run.compared(self._progress).items()}
            yield json.dumps(found).encode()

        work.add(name := f"{key}{MEASURED}", measured())
        klds: dict[str, float] = json.loads((work.staging / name).read_bytes())
        return klds

    def _formats(self, units: Formats) -> Formats:
        """Of all weights, where some units have other formats than the recipe's."""
        return {**self._base, **{name: form for unit, form in units.items() for name in self._units[unit]}}

    def _cycle(self, units: Formats) -> int:
        """Bytes of a cycle, as ``inspect`` counts them."""
        manifest, programs = self._decided.manifest, self._decided.programs
        context = min(DEFAULT_CONTEXT, manifest.max_context - manifest.pair.rows)
        read = footprint.read_bytes(programs, self._formats(units))
        return sum(vars(footprint.cycle_bytes(programs, read, manifest.pair, context, manifest.precision.kv)).values())

    def _curve(self, work: WorkDir) -> Curve:
        """Measure every unit in both formats."""
        base = self._measured(work, self._base, self._whole | self._alone)
        size, fp8 = self._cycle({}), dict.fromkeys(self._free, "fp8")
        found = self._measured(work, self._formats(fp8), {unit: self._alone[unit] for unit in self._free})
        options = {}
        for unit in self._free:
            klds = (found.get(unit, 0.0), 0.0)
            wider = [Option(self._cycle({unit: form}), kld, form) for form, kld in zip(_WIDER, klds, strict=True)]
            options[unit] = [Option(size, base.get(unit, 0.0), ""), *(one for one in wider if one.bytes > size)]
        return Curve(steps(options), size, base[ALL], sum(base.get(unit, 0.0) for unit in self._units))

    def _chosen(self, work: WorkDir) -> FormatMix:
        """Measure, choose, and measure what was chosen."""
        config, curve = self._decided.config, self._curve(work)

        def measured(taken: Sequence[Widening]) -> float:
            return self._measured(work, self._formats(_forms(taken)), self._whole)[ALL]

        found = {0: curve.kld}
        if config.bytes_budget is not None:
            taken = curve.within(config.bytes_budget)
            kld = measured(taken) if taken else curve.kld
        elif config.quality_target is not None:
            found = curve.reach(config.quality_target, lambda count: measured(curve.steps[:count]))
            count = min(count for count, kld in found.items() if kld <= config.quality_target)
            taken, kld = curve.steps[:count], found[count]
        units, last = _forms(taken), len(curve.steps)
        shown = sorted({*found, *(round(last * at / (_SHOWN - 1)) for at in range(_SHOWN))})
        board, points = largest_board(self._decided.choice.arch.sm), list[Point]()
        for before, count in zip([0, *shown], shown, strict=False):
            size, predicted = self._cycle(_forms(curve.steps[:count])), curve.predicted(curve.steps[:count])
            ms = board.milliseconds(size) if board else None
            points.append(Point(size, ms, predicted, found.get(count), _forms(curve.steps[before:count])))
        return FormatMix("", self._cycle(units), kld, self._whole[ALL].rows, units, tuple(points))


def _forms(taken: Sequence[Widening]) -> dict[str, WeightFormat]:
    return {step.unit: step.form for step in taken}


def _texts(decided: Decisions, most: int) -> list[Text]:
    """The prompts that are given, or calibration prompts that scales are not measured on."""
    config, known, vocabulary = decided.config, decided.scales.known, decided.pair.target.vocab_size
    tokenizer = Tokenizer.open(config.target) if decided.manifest.tokenizer else None
    held_out = TaskSet.behind(known.tokens, known.prompts, tokenizer, vocabulary)
    given = TaskSet.read(config.prompts) if config.prompts else held_out
    return make_texts(given.tasks, tokenizer, vocabulary, most, None)


def _widened(recipe: Recipe, units: Formats) -> Recipe:
    """The recipe with a format for all linears of some units."""
    overrides = list(recipe.overrides)
    for unit, form in units.items():
        layer, _, kind = unit.rpartition(".")
        names = (f"{layer}.{linears}" for linears in _LINEARS[kind]) if layer else (unit,)
        overrides += [Override(f"target.{name}", form) for name in names]
    return replace(recipe, overrides=tuple(overrides))


def _recipe(decided: Decisions, mix: FormatMix, texts: str) -> Recipe:
    """That of the mix."""
    config, base = decided.config, decided.recipe
    budget = f"a KLD of {config.quality_target:g}" if config.quality_target else f"{config.bytes_budget} bytes a cycle"
    text = (
        f"{base.name} with {len(mix.units)} units wider, for {budget}: KLD {mix.kld:.3g} of the weights alone on "
        f"{mix.tokens} tokens, whose SHA-256 is {texts}; {mix.bytes} bytes a cycle"
    )
    return replace(_widened(base, mix.units), name=f"{base.name}-mixed", description=text)


def _table(mix: FormatMix) -> list[str]:
    """The curve, for people."""
    lines = [f"{'bytes a cycle':>15} {'ms':>7} {'predicted':>10} {'measured':>9}  wider than above"]
    for point in mix.curve:
        ms = "" if point.ms is None else f"{point.ms:.4g}"
        measured = "" if point.measured is None else f"{point.measured:.5f}"
        units = [f"{unit} {form}" for unit, form in point.units.items()]
        more = ", ".join(units[:2]) + (f" and {len(units) - 2} more" if len(units) > 2 else "")
        lines.append(f"{point.bytes:>15,} {ms:>7} {point.predicted:>10.5f} {measured:>9}  {more}".rstrip())
    chosen = f"{mix.bytes:,} bytes a cycle, KLD {mix.kld:.5f} on {mix.tokens:,} tokens, {len(mix.units)} units wider"
    return [*lines, f"chosen: {chosen}; later builds repeat it with --recipe {mix.recipe}"]
