"""Which architectures this version runs, and by what name the others that can be recognised are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from edge_dflash.errors import CheckpointError, UnsupportedModelError
from edge_dflash.model import keys
from edge_dflash.model.fields import Fields

Architecture = Literal["qwen3", "qwen3_5"]

DRAFTER = "DFlashDraftModel"
_TARGETS: dict[str, Architecture] = {"Qwen3ForCausalLM": "qwen3", **dict.fromkeys(keys.QWEN3_5_NAMES, "qwen3_5")}


def target_fields(file: Path, config: Mapping[str, Any]) -> tuple[Architecture, Fields, Fields]:
    """Architecture of a target, its config.json, and the part of that about the language model, both checked.

    Raises UnsupportedModelError, naming what it is where that is known.
    """
    name = _name(file, config)
    if name == DRAFTER:
        raise UnsupportedModelError(f"{file} is a DFlash drafter; give it as the drafter, not as the target")
    if name not in _TARGETS:
        raise _unsupported(file, config, name, tuple(_TARGETS))
    architecture = _TARGETS[name]
    text = config.get("text_config")
    nested = architecture == "qwen3_5" and text is not None
    for part in (config, text) if isinstance(text, dict) else (config,):
        _refuse_experts(file, part)
    if name.endswith("ForConditionalGeneration") and not nested:
        raise CheckpointError(f"{file} lacks the field text_config, which {name} has; the checkpoint is incomplete")
    if not nested:
        fields = Fields(file, config, keys.FLAT[architecture])
        return architecture, fields, fields
    repeated = [key for key in config if key not in keys.NESTED and _same(text, config, key)]
    fields = Fields(file, {key: value for key, value in config.items() if key not in repeated}, keys.NESTED)
    return architecture, fields, fields.child("text_config")


def drafter_fields(file: Path, config: Mapping[str, Any]) -> Fields:
    """A drafter's config.json, checked.

    Raises UnsupportedModelError unless it is that of a DFlash drafter whose row r drafts position s + r.
    """
    name = _name(file, config)
    if name != DRAFTER:
        raise _unsupported(file, config, name, (DRAFTER,))
    _refuse_experts(file, config)
    return Fields(file, config, keys.DRAFTER)


def _same(text: object, config: Mapping[str, Any], key: str) -> bool:
    """Whether ``text`` is an object with the key and the value that ``config`` has."""
    return isinstance(text, dict) and key in text and json.dumps(text[key]) == json.dumps(config[key])


def _name(file: Path, config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f"{file}: architectures is {names!r}, wanted a list with one name")
    return names[0]


def _refuse_experts(file: Path, config: Mapping[str, Any]) -> None:
    """Before its keys are looked at: most of those that are unknown are about the experts."""
    if "moe" in (kind := str(config.get("model_type")).lower()):
        raise UnsupportedModelError(f"{file}: {kind} is a mixture-of-experts model, wanted a dense one")


def _unsupported(file: Path, config: Mapping[str, Any], name: str, accepted: tuple[str, ...]) -> UnsupportedModelError:
    kind = ""
    if "moe" in name.lower() or "moe" in str(config.get("model_type", "")).lower():
        kind = " (a mixture-of-experts model)"
    elif name == "DFlash2DraftModel":
        kind = " (DFlash2, another drafter design)"
    elif "DSpark" in name or "DeepSpec" in name or name == "Qwen3DFlashModel":
        kind = " (DSpark/DeepSpec, another drafter design)"
    return UnsupportedModelError(f"{file}: architecture {name}{kind} is not supported, wanted {' or '.join(accepted)}")
