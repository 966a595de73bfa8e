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
from dataclasses import dataclass
from typing import Any, Literal

from edge_dflash.backends.base import Precision
from edge_dflash.backends.native.compile import ARCHS as NATIVE_ARCHS
from edge_dflash.bundle.codec import decode, encode
from edge_dflash.checkpoint.specs import PairSpec
from edge_dflash.errors import BundleError
from edge_dflash.graph.program import KvState
from edge_dflash.models import pair_programs

SCHEMA = 1
MANIFEST = "manifest.json"
PLANS = "plans/"  # folder of TensorRT plans
ARCHS = ("cpu", "sm87", "sm89", "sm90a", "sm100a", "sm110", "sm110a", "sm120", "sm120a", "sm121", "sm121a")
BACKENDS = ("reference", "native", "tensorrt")
ARCHS_OF = {"reference": ("cpu",), "native": NATIVE_ARCHS, "tensorrt": tuple(a for a in ARCHS[1:] if a != "sm100a")}

WeightFormat = Literal["bf16", "f32", "fp8", "nvfp4", "tied"]  # tied: lm_head is read from the wide embedding
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle."""

    sha256: str  # lower-case hex
    size: int  # bytes


@dataclass(frozen=True)
class Source:
    """Fingerprint of one checkpoint file that the bundle was made from."""

    model: Literal["target", "drafter"]
    file: str  # name inside the checkpoint directory
    size: int  # bytes
    sha256: str  # of its first MiB: a config whole, a shard its header


@dataclass(frozen=True)
class Plans:
    """The TensorRT plans of a bundle. A plan runs with the very version of TensorRT that built it."""

    flavour: Literal["tensorrt", "tensorrt_rtx"]  # what to import
    version: str | None  # exact version, such as 10.13.3.9; None while plans are deferred
    names: tuple[str, ...]  # paths of all plans, there or deferred
    deferred: tuple[str, ...]  # those that the device has to build: edge-dflash build --finish


@dataclass(frozen=True)
class Manifest:
    """All that a bundle says about itself, except the schema version and the checksum, which frame it."""

    created_by: str  # "edge-dflash 0.1.0"
    arch: str
    backend: str
    pair: PairSpec
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    precision: Precision  # weights are listed one by one below
    recipe: str  # name of the recipe
    max_context: int  # rows of every KV state
    prefill_chunk: int  # most rows of one prefill pass
    kv_scales: Mapping[str, tuple[float, float]]  # (k, v) of each KV state; a state not listed has (1.0, 1.0)
    tokenizer: bool  # False: the bundle takes and returns token ids only
    tools: Mapping[str, str]  # versions of what took part in the build
    sources: tuple[Source, ...]
    weights: Mapping[str, WeightFormat]
    files: Mapping[str, FileEntry]  # every file of the bundle but manifest.json, by relative path
    plans: Plans | None = None  # of the tensorrt backend; the key is left out where there are none
    no_self_test: str | None = None  # why selftest.json is not among the files; the key is left out where it is

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
    body: dict[str, Any] = {"schema": SCHEMA, **encode(exact)}
    for optional in ("plans", "no_self_test"):
        if body[optional] is None:
            del body[optional]
    body["checksum"] = hashlib.sha256(_text(body)).hexdigest()
    return _text(body)


def parse_manifest(text: bytes, where: str = MANIFEST) -> Manifest:
    """Read and check a manifest against itself. Raises BundleError naming the field, found and wanted."""
    try:
        body = json.loads(text.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BundleError(f"{where} is damaged ({error}); build the bundle again or copy it again") from None
    if not isinstance(body, dict):
        raise BundleError(f"{where} holds {type(body).__name__}, wanted an object; build the bundle again")
    schema = body.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA:
        newer = type(schema) is int and schema > SCHEMA
        remedy = "update edge-dflash" if newer else "build the bundle again"
        raise BundleError(f"{where}: schema is {schema!r}, this version reads {SCHEMA}; {remedy}")
    body.pop("checksum", None)
    body = {"plans": None, "no_self_test": None, **body}
    manifest = decode(Manifest, body, where)
    check_manifest(manifest, where)
    if dump_manifest(manifest) != text:
        raise BundleError(f"{where}: checksum differs from the content; the file was changed after the build")
    return manifest


def check_manifest(manifest: Manifest, where: str = MANIFEST) -> None:
    """Compare the fields with each other and with the models' own shape. Raises BundleError by field."""
    drafter, target = manifest.pair.drafter, manifest.pair.target
    limit = target.max_position_embeddings
    _member(where, "arch", manifest.arch, ARCHS)
    _member(where, "backend", manifest.backend, BACKENDS)
    _member(where, f"arch of a {manifest.backend} bundle", manifest.arch, ARCHS_OF[manifest.backend])
    _equal(where, "block_size", manifest.block_size, drafter.block_size)
    _equal(where, "mask_token_id", manifest.mask_token_id, drafter.mask_token_id)
    _equal(where, "target_layer_ids", manifest.target_layer_ids, drafter.target_layer_ids)
    _range(where, "max_context", manifest.max_context, manifest.block_size + 1, limit)
    _range(where, "prefill_chunk", manifest.prefill_chunk, 1, manifest.max_context)
    programs = _programs(manifest.pair, where)
    kv_states = [name for name, state in programs.states.items() if isinstance(state, KvState)]
    for state, scales in manifest.kv_scales.items():
        _member(where, f"kv_scales.{state}", state, kv_states)
        if not all(scale > 0 and math.isfinite(scale) for scale in scales):
            raise BundleError(f"{where}: kv_scales.{state} is {scales}, wanted two positive numbers")
    _check_weights(manifest, programs.weights.keys(), where)
    _check_plans(manifest, where)
    for name, entry in manifest.files.items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise BundleError(f"{where}: files names {name!r}, wanted a relative path of plain names inside the bundle")
        if not _SHA256.fullmatch(entry.sha256) or entry.size < 0:
            raise BundleError(f"{where}: files.{name} has no valid sha256 and size")


def _check_weights(manifest: Manifest, wanted: Any, where: str) -> None:
    if missing := sorted(wanted - manifest.weights.keys()):
        raise BundleError(f"{where}: weights lacks {missing[0]} ({len(missing)} missing), which the models need")
    if extra := sorted(manifest.weights.keys() - wanted):
        raise BundleError(f"{where}: weights names {extra[0]}, which the models do not have")
    for name, form in manifest.weights.items():
        if form == "tied" and (name != "target.lm_head" or not manifest.pair.target.tied):
            raise BundleError(f"{where}: weights.{name} is 'tied'; only the lm_head of a tied target can be")


def _check_plans(manifest: Manifest, where: str) -> None:
    """Plans are those of a tensorrt bundle, and each is a file or deferred."""
    plans = manifest.plans
    if (plans is None) == (manifest.backend == "tensorrt"):
        found = "missing" if plans is None else "given"
        raise BundleError(f"{where}: plans is {found} for backend {manifest.backend!r}; build the bundle again")
    here = {name for name in manifest.files if name.startswith(PLANS)}
    names, deferred = (set(plans.names), set(plans.deferred)) if plans else (set(), set())
    if odd := sorted((here | deferred) ^ names or here & deferred):
        raise BundleError(f"{where}: plans.names and the files disagree on {odd[0]}; build the bundle again")
    if plans and (plans.version is None) != bool(deferred):
        raise BundleError(
            f"{where}: plans.version is {plans.version!r} with {len(deferred)} plans deferred; build again"
        )


def _programs(pair: PairSpec, where: str) -> Any:
    """The passes of the pair; a spec that no model can be made of is the manifest's fault."""
    try:
        return pair_programs(pair)
    except (ValueError, IndexError, KeyError) as error:
        raise BundleError(f"{where}: pair describes no model ({error}); build the bundle again") from None


def _member(where: str, field: str, found: str, accepted: Any) -> None:
    if found not in accepted:
        raise BundleError(f"{where}: {field} is {found!r}, wanted one of {', '.join(accepted)}")


def _equal(where: str, field: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise BundleError(f"{where}: {field} is {found}, wanted {wanted} as in pair.drafter; build the bundle again")


def _range(where: str, field: str, found: int, low: int, high: int) -> None:
    if not low <= found <= high:
        raise BundleError(f"{where}: {field} is {found}, wanted {low} to {high}")


def _text(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return found


def _no_constants(text: str) -> float:
    raise ValueError(f"{text} is not a number")
