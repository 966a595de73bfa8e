"""What a checkpoint's configuration says about the storage of each module, to be compared with the tensors.

Two dialects: ModelOpt (hf_quant_config.json, or quantization_config with quant_method "modelopt") with shell globs,
and compressed-tensors (quantization_config) with exact names and ``re:`` patterns.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from edge_dflash.checkpoint.fields import Fields
from edge_dflash.checkpoint.files import read_json
from edge_dflash.checkpoint.keys import COMPRESSED_TENSORS, HF_QUANT, MODELOPT
from edge_dflash.errors import CheckpointError

Storage = Literal["wide", "fp8", "nvfp4"]
Declared = Callable[[str], Storage | None]
"""Module path as in the checkpoint -> declared storage; None when the configuration does not say."""

_MODELOPT: dict[str, Storage] = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
}


def read_declared(directory: Path) -> Declared:
    """Declared storage of the checkpoint in ``directory``. Raises CheckpointError for an unknown scheme."""
    file = directory / "config.json"
    config = read_json(file)
    places = [(path, part) for path, part in (("", config), ("text_config.", config.get("text_config"))) if part]
    found = [(path, part["quantization_config"]) for path, part in places if part.get("quantization_config")]
    path, values = found[0] if found else ("", {})
    where = f"{path}quantization_config"
    if any(other != values for _, other in found) or not isinstance(values, dict):
        raise CheckpointError(f"{file}: {where} is {values!r:.60}, wanted one object, in one place")
    if values and "quant_method" not in values:
        raise CheckpointError(f"{file} lacks the field {where}.quant_method; the checkpoint is incomplete")
    method = values.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(Fields(file, values, COMPRESSED_TENSORS, f"{where}."))
    if method not in (None, "modelopt"):
        raise CheckpointError(f"{file}: {where}.quant_method is {method!r}, wanted 'modelopt' or 'compressed-tensors'")
    mirror = Fields(file, values, MODELOPT, f"{where}.")
    own = directory / "hf_quant_config.json"
    if own.is_file():
        scheme = Fields(own, read_json(own), HF_QUANT).child("quantization")
        for key in ("quant_algo", "kv_cache_quant_algo"):
            if mirror.has(key) and mirror.text(key) != scheme.text(key):
                raise mirror.error(key, mirror.text(key), f"the same as in {own.name} ({scheme.text(key)!r})")
        return _modelopt(scheme, "exclude_modules")
    if method:
        return _modelopt(mirror, "ignore")
    return lambda module: None


def _modelopt(fields: Fields, exclude: str) -> Declared:
    algorithm = fields.text("quant_algo")
    ignored = _patterns(fields, exclude)
    layers = fields.child("quantized_layers")
    storages = {name: _modelopt_storage(layers.child(name)) for name in layers.values}
    if not algorithm:
        return lambda module: None
    if algorithm == "MIXED_PRECISION":
        if not storages:  # config.json mirrors the scheme without the list
            return lambda module: None
        return lambda module: storages.get(module, "wide")
    default = _modelopt_storage(fields)
    return lambda module: "wide" if any(_glob(module, pattern) for pattern in ignored) else default


def _modelopt_storage(fields: Fields) -> Storage:
    algorithm = fields.text("quant_algo")
    if algorithm not in _MODELOPT:
        raise fields.error("quant_algo", algorithm, f"one of {', '.join(_MODELOPT)}")
    return _MODELOPT[algorithm]


def _glob(module: str, pattern: str) -> bool:
    """ModelOpt excludes a module and everything below it."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def _compressed_tensors(fields: Fields) -> Declared:
    groups = fields.child("config_groups")
    ignored = _patterns(fields, "ignore")
    rules: list[tuple[tuple[str, ...], Storage]] = []
    for name in groups.values:
        group = groups.child(name)
        rules.append((_patterns(group, "targets"), _ct_storage(group.child("weights"))))

    def declared(module: str) -> Storage | None:
        if any(_ct_match(module, pattern) for pattern in ignored):
            return "wide"
        for targets, storage in rules:  # named targets first: "Linear" is every linear module
            if any(_ct_match(module, target) for target in targets if target != "Linear"):
                return storage
        for targets, storage in rules:
            if "Linear" in targets:
                return storage
        return "wide" if rules else None

    return declared


def _ct_storage(weights: Fields) -> Storage:
    if not weights.values:  # a group that quantizes activations or the KV cache alone
        return "wide"
    bits, kind = weights.integer("num_bits"), weights.text("type")
    if kind == "float" and bits == 4 and weights.integer("group_size") == 16:
        return "nvfp4"
    if kind == "float" and bits == 8:
        return "fp8"
    raise CheckpointError(
        f"{weights.file}: weights of {bits} bits and type {kind!r} are not supported, wanted num_bits 4, type float and "
        "group_size 16 (NVFP4), or num_bits 8 and type float (FP8)"
    )


def _ct_match(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.endswith("." + pattern)


def _patterns(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.names(name)
    for item in value:
        if item.startswith("re:"):
            try:
                re.compile(item[3:])
            except re.error as error:
                raise fields.error(name, item, f"a valid pattern ({error})") from None
    return value
