"""manifest.json: what a bundle says about itself. No file of the bundle but this one is touched here.

The text is canonical (sorted keys, one layout) and carries a checksum of itself, so one changed byte anywhere in it is
refused. Nothing in it depends on when or where the bundle was built.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edge_dflash.board.archs import ARCHS_OF, BACKENDS, find_arch, ordered
from edge_dflash.common.files import parse_json
from edge_dflash.common.tables import UNWRITTEN, decode, encode, no_constant, unique_keys
from edge_dflash.decode.backend import Precision
from edge_dflash.decode.shape import MOST_LANES
from edge_dflash.errors import BackendError, BundleError
from edge_dflash.model.program import KvState
from edge_dflash.model.registry import DRAFTERS, TARGETS, pair_programs
from edge_dflash.model.specs import MAX_BLOCK, MAX_LAYERS, PairSpec
from edge_dflash.weights.formats import TIED, WeightFormat
from edge_dflash.weights.recipe import Rounding

SCHEMA = 6  # the newest; a bundle is written as the oldest that says it, so that older versions read what they can
MANIFEST = "manifest.json"
QUALITY = "quality.json"  # figures that may be measured at any time: they make no other bundle
ENGINES = "plans/"  # folder of TensorRT engines

_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
_OF_PAIR = ("block_size", "mask_token_id", "target_layer_ids")  # written again, for those who read no specs
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle."""

    sha256: str  # lower-case hex
    size: int  # bytes


@dataclass(frozen=True)
class SourceFile:
    """Fingerprint of one checkpoint file that the bundle was made from."""

    model: Literal["target", "drafter"]
    file: str  # name inside the checkpoint directory
    size: int  # bytes
    sha256: str  # of its first MiB: a config whole, a shard its header


@dataclass(frozen=True)
class EngineFiles:
    """The TensorRT engines of a bundle. An engine runs with the very version of TensorRT that built it."""

    flavour: Literal["tensorrt", "tensorrt_rtx"]  # what to import
    version: str | None  # exact version, such as 10.13.3.9; None while engines are deferred
    names: tuple[str, ...]  # paths of all engines, there or deferred
    deferred: tuple[str, ...]  # those that the device has to build: edge-dflash build --finish


@dataclass(frozen=True)
class Trial:
    """Both backends at the same work on one device: what ``build --finish`` measured, and by which it chose."""

    device: str
    prompt_tokens: int
    cycles: int  # after the prompt
    cycle_ms: Mapping[str, float]  # median, by backend
    prefill_ms: Mapping[str, float]  # of the prompt
    failed: Mapping[str, str]  # backends that could not run, and why

    @property
    def text(self) -> str:
        """The figures in one line."""
        figures = [f"{name} {ms:.3g} ms a cycle" for name, ms in sorted(self.cycle_ms.items())]
        return ", ".join([*figures, *(f"{name} failed" for name in sorted(self.failed))])


@dataclass(frozen=True)
class RoundingUse:
    """How the weights of a bundle that are rounded to NVFP4 got their block scales."""

    by: Rounding
    rounded: int  # weights of which this was said
    kept: int  # weights that are quantized as the checkpoint has them
    tokens: int  # that what weighs errors was measured on; 0: every input counts the same


@dataclass(frozen=True)
class Manifest:
    """All that a bundle says about itself, except the schema version and the checksum, which frame it."""

    created_by: str  # "edge-dflash 0.1.0"
    arch: str
    backend: str  # the one that runs it
    pair: PairSpec
    precision: Precision  # weights are listed one by one below
    recipe: str  # name of the recipe
    max_context: int  # rows of every KV state
    prefill_chunk: int  # most rows of one prefill pass
    kv_scales: Mapping[str, tuple[float, float]]  # (k, v) of each KV state; a state not listed has (1.0, 1.0)
    tokenizer: bool  # False: the bundle takes and returns token ids only
    tools: Mapping[str, str]  # versions of what took part in the build
    sources: tuple[SourceFile, ...]
    weights: Mapping[str, WeightFormat]
    files: Mapping[str, FileEntry]  # every file of the bundle but manifest.json, by relative path
    plans: EngineFiles | None = field(default=None, metadata=UNWRITTEN)  # of the tensorrt backend
    no_self_test: str | None = field(default=None, metadata=UNWRITTEN)  # why selftest.json is not among the files
    standby: tuple[str, ...] = field(default=(), metadata=UNWRITTEN)  # other backends; they read the same weights
    trial: Trial | None = field(default=None, metadata=UNWRITTEN)  # of two backends
    lanes: int = field(default=1, metadata=UNWRITTEN)  # sequences at once, where nobody says how many
    rounding: RoundingUse | None = field(default=None, metadata=UNWRITTEN)  # None: max / 6, or nothing is quantized

    @property
    def backends(self) -> tuple[str, ...]:
        """All backends of the bundle."""
        return ordered((self.backend, *self.standby))

    @property
    def options(self) -> str:
        """How to build it again."""
        return f"--backend {','.join(self.backends)} --arch {self.arch}"

    @property
    def runs_without_engines(self) -> bool:
        """Whether it can be served before its engines are there, or with engines of another TensorRT."""
        return self.plans is None or (bool(self.standby) and self.backend != "tensorrt")

    @property
    def on_device(self) -> bool:
        """Whether its backends run on a GPU."""
        return bool(find_arch(self.arch).sm)

    @property
    def stacked(self) -> bool:
        """Whether linears lie in the order of the native kernels."""
        return "native" in self.backends

    @property
    def weight_summary(self) -> dict[str, int]:
        """Number of weights in each format."""
        formats = list(self.weights.values())
        return {name: formats.count(name) for name in sorted(set(formats))}

    @property
    def size(self) -> int:
        """Bytes of all files but manifest.json."""
        return sum(entry.size for entry in self.files.values())


def dump_manifest(manifest: Manifest) -> bytes:
    """The one text that :func:`parse_manifest` accepts for this manifest."""
    exact = decode(Manifest, encode(manifest), MANIFEST)  # an int in a float's place becomes the float it stands for
    said = {name: encode(getattr(exact.pair, name)) for name in _OF_PAIR}
    body: dict[str, Any] = {"schema": _schema(exact), **encode(exact), **said}
    body["checksum"] = hashlib.sha256(_text(body)).hexdigest()
    return _text(body)


def _schema(manifest: Manifest) -> int:
    """6: rounding; 5: a vision tower; 4: several lanes; 3: no drafter, or no plain DFlash; 2: two backends."""
    if manifest.rounding:
        return 6
    if manifest.pair.target.vision or manifest.lanes > 1:
        return 5 if manifest.pair.target.vision else 4
    drafter = manifest.pair.drafter
    return 3 if drafter is None or drafter.kind != "dflash" else 2 if manifest.standby else 1


def fingerprint(manifest: Manifest) -> str:
    """What binds states to a bundle: the checksum of its manifest, and so the hashes of all files but QUALITY."""
    files = {name: entry for name, entry in manifest.files.items() if name != QUALITY}
    return str(json.loads(dump_manifest(replace(manifest, files=files)))["checksum"])


def parse_manifest(text: bytes, where: str = MANIFEST) -> Manifest:
    """Read and check a manifest against itself. Raises BundleError naming the field, found and wanted."""
    body = read_document(text, where, 1, SCHEMA)
    said = {name: body.pop(name, None) for name in ("schema", "checksum", *_OF_PAIR)}
    manifest = decode(Manifest, body, where)
    for name in _OF_PAIR:
        if said[name] != (wanted := encode(getattr(manifest.pair, name))):
            raise BundleError(f"{where}: {name} is {said[name]}, wanted {wanted} as in pair; build the bundle again")
    check_manifest(manifest, where)
    if dump_manifest(manifest) != text:
        raise BundleError(f"{where}: checksum differs from the content; the file was changed after the build")
    return manifest


def read_document(text: bytes, where: str, oldest: int, newest: int) -> dict[str, Any]:
    """The JSON object of a file of a bundle, its ``schema`` from ``oldest`` to ``newest``. Raises BundleError."""
    try:
        body = parse_json(text, object_pairs_hook=unique_keys, parse_constant=no_constant)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BundleError(f"{where} is damaged ({error}); build the bundle again or copy it again") from None
    if not isinstance(body, dict):
        raise BundleError(f"{where} holds {type(body).__name__}, wanted an object; build the bundle again")
    schema = body.get("schema")
    if type(schema) is not int or not oldest <= schema <= newest:
        remedy = "update edge-dflash" if type(schema) is int and schema > newest else "build the bundle again"
        reads = f"{oldest} to {newest}" if oldest < newest else newest
        raise BundleError(f"{where}: schema is {schema!r}, this version reads {reads}; {remedy}")
    return body


def check_manifest(manifest: Manifest, where: str = MANIFEST) -> None:
    """Compare the fields with each other and with the models' own shape. Raises BundleError by field."""
    pair, target = manifest.pair, manifest.pair.target
    for name, kind, accepted in (
        ("target.architecture", target.architecture, TARGETS),
        *([("drafter.kind", pair.drafter.kind, DRAFTERS)] if pair.drafter else []),
    ):
        if kind not in accepted:
            raise BundleError(f"{where}.pair.{name}: found {kind!r}, wanted one of {', '.join(map(repr, accepted))}")
    _check_backends(manifest, where)
    for name, found, low, high in (
        ("block_size", pair.block_size, 2 if pair.drafter else 1, MAX_BLOCK),
        ("max_context", manifest.max_context, pair.rows + 1, target.max_position_embeddings),
        ("prefill_chunk", manifest.prefill_chunk, 1, manifest.max_context),
        ("lanes", manifest.lanes, 1, MOST_LANES),
    ):
        if not low <= found <= high:
            raise BundleError(f"{where}: {name} is {found}, wanted {low} to {high}")
    programs = _programs(manifest.pair, where)
    kv_states = [name for name, state in programs.states.items() if isinstance(state, KvState)]
    for state, scales in manifest.kv_scales.items():
        _member(where, f"kv_scales.{state}", state, kv_states)
        if not all(scale > 0 and math.isfinite(scale) for scale in scales):
            raise BundleError(f"{where}: kv_scales.{state} is {scales}, wanted two positive numbers")
    _check_weights(manifest, programs.weights.keys(), where)
    if (use := manifest.rounding) is not None and min(use.rounded, use.kept, use.tokens) < 0:
        raise BundleError(f"{where}: rounding is of {use.rounded} and {use.kept} weights by {use.tokens} tokens")
    _check_engines(manifest, where)
    for name, entry in manifest.files.items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise BundleError(f"{where}: files names {name!r}, wanted a relative path of plain names inside the bundle")
        if not _SHA256.fullmatch(entry.sha256) or entry.size < 0:
            raise BundleError(f"{where}: files.{name} has no valid sha256 and size")


def _check_backends(manifest: Manifest, where: str) -> None:
    try:
        arch = find_arch(manifest.arch).name
    except BackendError as error:
        raise BundleError(f"{where}: {error}") from None
    for backend in (manifest.backend, *manifest.standby):
        _member(where, "backend", backend, BACKENDS)
        _member(where, f"arch of a {backend} bundle", arch, ARCHS_OF[backend])
    if (manifest.standby and set(manifest.backends) != {"native", "tensorrt"}) or len(manifest.standby) > 1:
        standby = ", ".join(manifest.standby)
        raise BundleError(f"{where}: standby is {standby} beside {manifest.backend}; build it again")
    if manifest.trial is not None and not (manifest.standby and manifest.backend in manifest.trial.cycle_ms):
        raise BundleError(f"{where}: trial has no figure of {manifest.backend} among two backends; build it again")


def _check_weights(manifest: Manifest, wanted: Any, where: str) -> None:
    if missing := sorted(wanted - manifest.weights.keys()):
        raise BundleError(f"{where}: weights lacks {missing[0]} ({len(missing)} missing), which the models need")
    if extra := sorted(manifest.weights.keys() - wanted):
        raise BundleError(f"{where}: weights names {extra[0]}, which the models do not have")
    for name, form in manifest.weights.items():
        if form == TIED and (name != "target.lm_head" or not manifest.pair.target.tied):
            raise BundleError(f"{where}: weights.{name} is 'tied'; only the lm_head of a tied target can be")


def _check_engines(manifest: Manifest, where: str) -> None:
    """Engines are those of the tensorrt backend, and each is a file or deferred."""
    engines = manifest.plans
    if (engines is None) == ("tensorrt" in manifest.backends):
        found = "missing" if engines is None else "given"
        raise BundleError(f"{where}: plans is {found} for backend {manifest.backend!r}; build the bundle again")
    if engines and engines.deferred and manifest.standby and manifest.backend == "tensorrt":
        raise BundleError(f"{where}: backend is 'tensorrt', whose plans are deferred; build the bundle again")
    here = {name for name in manifest.files if name.startswith(ENGINES)}
    names, deferred = (set(engines.names), set(engines.deferred)) if engines else (set(), set())
    if odd := sorted((here | deferred) ^ names or here & deferred):
        raise BundleError(f"{where}: plans.names and the files disagree on {odd[0]}; build the bundle again")
    if engines and (engines.version is None) != bool(deferred):
        raise BundleError(f"{where}: plans.version is {engines.version!r} with {len(deferred)} plans deferred; rebuild")


def _programs(pair: PairSpec, where: str) -> Any:
    """The passes of the pair; a spec that no model can be made of is the manifest's fault."""
    drafter = pair.drafter.num_layers if pair.drafter else 0
    if (most := max(pair.target.num_layers, drafter, len(pair.target_layer_ids))) > MAX_LAYERS:
        raise BundleError(
            f"{where}: pair has {most} layers or taps, wanted at most {MAX_LAYERS}; build the bundle again"
        )
    try:
        return pair_programs(pair)
    except (ValueError, IndexError, KeyError) as error:
        raise BundleError(f"{where}: pair describes no model ({error}); build the bundle again") from None


def _member(where: str, field: str, found: str, accepted: Any) -> None:
    if found not in accepted:
        raise BundleError(f"{where}: {field} is {found!r}, wanted one of {', '.join(accepted)}")


def _text(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
