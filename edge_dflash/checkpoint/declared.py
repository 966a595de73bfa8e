"""What a checkpoint's configuration says about the storage of each module, to be compared with the tensors.

Two dialects: ModelOpt (hf_quant_config.json, or quantization_config with quant_method "modelopt") with shell globs,
and compressed-tensors (quantization_config) with exact names and ``re:`` patterns.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from edge_dflash.checkpoint.fields import Fields
from edge_dflash.checkpoint.files import read_json
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
    config = Fields(directory / "config.json", read_json(directory / "config.json"))
    quantization = config.child("quantization_config")
    if not quantization.values:
        quantization = config.child("text_config").child("quantization_config")
    method = quantization.text("quant_method", "")
    if method == "compressed-tensors":
        return _compressed_tensors(quantization)
    if method not in ("", "modelopt"):
        raise quantization.error("quant_method", method, "'modelopt' or 'compressed-tensors'")
    file = directory / "hf_quant_config.json"
    if file.is_file():
        return _modelopt(Fields(file, read_json(file)).child("quantization"), "exclude_modules")
    if method:
        return _modelopt(quantization, "ignore")
    return lambda module: None


def _modelopt(fields: Fields, exclude: str) -> Declared:
    if (cache := fields.text("kv_cache_quant_algo", "FP8")) != "FP8":
        raise fields.error("kv_cache_quant_algo", cache, "'FP8' or null: scales of another format would be misread")
    algorithm = fields.text("quant_algo", "")
    if not algorithm:
        return lambda module: None
    ignored = _names(fields, exclude)
    if algorithm == "MIXED_PRECISION":
        layers = fields.child("quantized_layers")
        if not layers.values:  # config.json mirrors the scheme without the list
            return lambda module: None
        storages = {name: _modelopt_storage(layers.child(name)) for name in layers.values}
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
    ignored = _names(fields, "ignore")
    rules: list[tuple[list[str], Storage]] = []
    for name in groups.values:
        group = groups.child(name)
        rules.append((_names(group, "targets"), _ct_storage(group.child("weights"))))

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
    if kind == "float" and bits == 4 and weights.integer("group_size", 16) == 16:
        return "nvfp4"
    if kind == "float" and bits == 8:
        return "fp8"
    raise CheckpointError(
        f"{weights.file}: weights of {bits} bits and type {kind!r} are not supported, "
        "wanted float 4 in groups of 16 (NVFP4) or float 8 (FP8)"
    )


def _ct_match(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.endswith("." + pattern)


def _names(fields: Fields, name: str) -> list[str]:
    value: Any = fields.values.get(name) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise fields.error(name, value, "a list of names or patterns")
    for item in value:
        if item.startswith("re:"):
            try:
                re.compile(item[3:])
            except re.error as error:
                raise fields.error(name, item, f"a valid pattern ({error})") from None
    return value
