"""``edge-dflash build``: checkpoints to a bundle."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import Annotated

import typer

from edge_dflash.board.archs import BACKENDS
from edge_dflash.builder.finish import BuildResult, finish_command
from edge_dflash.builder.finish import finish as finish_bundle
from edge_dflash.cli.output import Json, emit_json, say, show, stages
from edge_dflash.cli.quality import quality_table
from edge_dflash.cli.usage import MissingOptionError, opt, switch
from edge_dflash.common.files import directory, is_file
from edge_dflash.common.tables import encode
from edge_dflash.demo.tasks import HELDOUT, TARGET
from edge_dflash.errors import RecipeError, RequestError
from edge_dflash.model.registry import NO_DRAFTER
from edge_dflash.weights.recipe import ROUNDINGS, Rounding


def read_size(text: str) -> int:
    """Bytes of a text such as 15500000000 or 15.5GB. Raises RequestError."""
    found = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?) ?(|k|M|G)B?", text, re.ASCII | re.IGNORECASE)
    if found is None:
        raise RequestError(f"--bytes-budget is {text[:40]!r}; give bytes, or a number with kB, MB or GB such as 15.5GB")
    return int(float(found[1]) * 1000 ** ("", "k", "m", "g").index(found[2].lower()))


Drafter = Annotated[
    Path | None, opt("DIR", "Directory of the drafter's checkpoint; none, or left out: decode plainly.")
]
Backend = Annotated[
    str | None,
    opt("NAMES", f"What runs it: {', '.join(BACKENDS)} or native,tensorrt; default: what suits the arch."),
]
Recipe = Annotated[
    Path | None,
    opt("NAME|FILE", "Recipe file or the name of one in engines/; default: NVFP4 weights, FP8 keys and values."),
]
Rounded = Annotated[
    Rounding | None, opt("HOW", f"How NVFP4 weights are rounded: {', '.join(ROUNDINGS)}; default: the recipe's.")
]
Chunk = Annotated[int | None, opt("N", "Most prompt tokens of one pass; default: 0.1 s, and 128 or more on a GPU.")]
Lanes = Annotated[int | None, opt("N", "Lanes of the bundle when it opens; default: the recipe's, or 1.", min=1, max=8)]
TextOnly = Annotated[bool, switch("--text-only", "Leave the target's vision tower out: smaller, and no images.")]
Quality = Annotated[bool, switch("--quality", "Measure what quantization costs, against the target's checkpoint.")]
QualityTarget = Annotated[
    float | None, opt("KLD", "Store parts of the target wider until the mean KLD of its weights is at most this.")
]
BytesBudget = Annotated[
    int | None,
    opt(
        "SIZE", "Store parts of the target wider while a cycle reads at most this: bytes, or 15.5GB.", parser=read_size
    ),
]
Finish = Annotated[Path | None, opt("BUNDLE", "Build the plans that this bundle lacks and time it, on its board.")]


def build(
    target: Annotated[Path | None, opt("DIR", "Directory of the target's Hugging Face checkpoint.")] = None,
    drafter: Drafter = None,
    output: Annotated[Path | None, opt("DIR", "Directory to make; the bundle appears there when complete.")] = None,
    arch: Annotated[str, opt("NAME", "What it runs on: cpu, a GPU such as sm110, or a board such as thor.")] = "cpu",
    backend: Backend = None,
    recipe: Recipe = None,
    rounding: Rounded = None,
    max_context: Annotated[int | None, opt("N", "Most tokens of a sequence; default: the recipe's.")] = None,
    prefill_chunk: Chunk = None,
    calibrate: Annotated[bool, typer.Option(help="Measure the scales of FP8 keys and values on calib/.")] = True,
    lanes: Lanes = None,
    text_only: TextOnly = False,
    quality: Quality = False,
    prompts: Annotated[Path | None, opt("FILE", "JSONL of prompts to measure on; default: some of calib/.")] = None,
    force: Annotated[bool, switch("--force", "Replace the bundle that is at --output.")] = False,
    quality_target: QualityTarget = None,
    bytes_budget: BytesBudget = None,
    finish: Finish = None,
    json: Json = False,
) -> None:
    """Build an engine bundle: quantized weights, calibrated scales, tokenizer, kernels, all hashed.

    --arch is cpu, sm87 (Orin), sm89 (Ada), sm90 (Hopper), sm110 (Thor), sm120 or sm121 (Spark); sm110a, 110 and 11.0
    are sm110 too, and so is a board of inspect --board: thor, orin, spark. A build needs no GPU. Without --backend a
    CPU gets the reference backend and a GPU native kernels; sm110 gets TensorRT beside them, and so do sm120 and sm121
    where TensorRT for RTX is installed (pip install 'edge-dflash[tensorrt]'). Both read the same weights.

    Only the board can build plans for sm110: edge-dflash build --finish BUNDLE does it there, times both
    backends at the same work and keeps the faster active. Until then the kernels run it. A bundle that lacks nothing is
    left as it is; one whose plans are of another TensorRT gets new ones.

    A target is built with its vision tower; --text-only leaves that out. Without a drafter the bundle decodes plainly.
    --quality-target measures what each part of a wide target costs in its format, stores those wider that save most KLD
    a byte, and writes the choice to OUTPUT.recipe.yaml for later builds. --bytes-budget spends bytes in the same order.
    A build that was stopped resumes when the same command is given again; a half-made bundle is never at --output.

    JSON keys: bundle (path), bytes, seconds, backends (aboard), active (the one that runs it), recipe, plans (TensorRT
    plans inside), deferred (plans left to the board), trial (cycle_ms and prefill_ms of both backends, after --finish),
    nothing_to_do (why --finish left it as it is), quality (docs/quality.md; null: not measured), mix (of a budget:
    recipe, bytes of a cycle, kld, tokens, units with their formats, curve; null: there was none), warnings.
    """
    given = {**locals(), "finish": None, "json": False}
    if finish is not None:
        if any(given[name] != one.default for name, one in signature(build).parameters.items()):
            raise RequestError("--finish BUNDLE goes alone: a bundle has its own models, recipe and sizes")
        with stages() as report:
            return _report(finish_bundle(finish, report), json)
    if target is None or output is None:
        raise MissingOptionError("output" if target else "target", instead="--finish BUNDLE")
    with stages():  # torch takes seconds to import
        from edge_dflash.builder import write
    found = find_recipe(recipe) if recipe is not None else None
    if (quality or quality_target or bytes_budget) and prompts is None and target.resolve() == TARGET:
        prompts = HELDOUT
    more = (found, max_context, prefill_chunk, calibrate, lanes, text_only, force, rounding, quality, quality_target)
    config = write.BuildConfig(target, given_drafter(drafter), output, arch, backend, *more, bytes_budget, prompts)
    with stages() as report:
        result = write.build(config, report, say)
    _report(result, json)


def given_drafter(drafter: Path | None) -> Path | None:
    """The directory of ``--drafter``; None for none."""
    return None if drafter == Path(NO_DRAFTER) else drafter


def _report(result: BuildResult, json: bool) -> None:
    """Print what was built."""
    for warning in result.warnings:
        say(f"warning: {warning}")
    if json:
        found = vars(result) | {"bundle": str(result.bundle), "nothing_to_do": result.nothing}
        del found["nothing"]
        emit_json(encode(found))
    elif result.nothing:
        print(f"nothing to do for {result.bundle}: {result.nothing}")
    else:
        print(f"built {result.bundle}: {result.bytes / 1e6:,.1f} MB in {result.seconds:.1f} s")
        if result.plans:
            print(f"{len(result.plans)} TensorRT plans")
        if result.deferred:
            command = finish_command(result.bundle)
            runs = f"; until then {result.active} runs it" if result.active != "tensorrt" else ""
            print(f"{len(result.deferred)} plans are left to the board; run there: {command}{runs}")
        if result.trial:
            print(f"{result.trial.text}: {result.active} runs it")
        if result.quality:
            show(quality_table(result.quality, short=True))


def find_recipe(given: Path) -> Path:
    """Return the recipe file ``given``, or the shipped recipe of that name. Raises RecipeError listing the names."""
    if is_file(given):
        return given
    shipped = {path.stem: path for path in sorted(directory("engines").glob("*.yaml"))}
    name = re.sub(r"(-sm\d+)a(?=-|$)", r"\1", str(given))  # sm110a is sm110
    if name in shipped:
        return shipped[name]
    raise RecipeError(f"no recipe file {given}, and none that ships is called so; shipped: {', '.join(shipped)}")
