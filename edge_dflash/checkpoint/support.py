"""Which architectures this version runs, and by what name the others that can be recognised are refused."""

from __future__ import annotations

from typing import Literal

from edge_dflash.checkpoint.fields import Fields
from edge_dflash.errors import UnsupportedModelError

Architecture = Literal["qwen3", "qwen3_5"]

DRAFTER = "DFlashDraftModel"
_TARGETS: dict[str, Architecture] = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
}
_MODEL_TYPES: dict[str, tuple[str, ...]] = {"qwen3": ("qwen3",), "qwen3_5": ("qwen3_5", "qwen3_5_text")}
# Fields of DSpark and DeepSpec drafters (named in vLLM speculators pull request 760 and sglang-jax 1619): their rows
# are shifted by one, and a Markov head corrects them. DeepSpec writes markov_rank also where it is 0.
_SHIFTED = ("sample_from_anchor", "shift_labels", "shifted")
_MARKOV = ("markov_rank", "markov_head_type", "enable_confidence_head")
_SPECULATORS = ("speculators_model_type", "transformer_layer_config")


def target_architecture(config: Fields, text: Fields) -> Architecture:
    """Architecture of a target: ``config`` is its config.json, ``text`` the part about the language model.

    Raises UnsupportedModelError, naming what it is where that is known.
    """
    name = _name(config)
    if name == DRAFTER:
        raise UnsupportedModelError(f"{config.file} is a DFlash drafter; give it as the drafter, not as the target")
    if name not in _TARGETS:
        raise _unsupported(config, name, tuple(_TARGETS))
    architecture = _TARGETS[name]
    for fields in (config, text):
        _check_model_type(fields, name, _MODEL_TYPES[architecture])
    _refuse_variants(text)
    return architecture


def check_drafter(config: Fields, dflash: Fields) -> None:
    """Raise UnsupportedModelError unless the config is that of a DFlash drafter whose row r drafts position s + r."""
    name = _name(config)
    if name != DRAFTER:
        raise _unsupported(config, name, (DRAFTER,))
    _check_model_type(config, name, ("qwen3",))
    for fields in (config, dflash):
        for key in (*_SHIFTED, *_MARKOV):
            if fields.values.get(key) if key in _SHIFTED else fields.has(key):
                raise UnsupportedModelError(
                    f"{config.file}: {key} is set: a DSpark/DeepSpec drafter, whose rows are shifted; wanted {DRAFTER}"
                )
    for key in _SPECULATORS:
        if config.has(key):
            raise UnsupportedModelError(
                f"{config.file}: {key} is set, which is the speculators format; wanted z-lab's DFlash files"
            )
    _refuse_variants(config)


def _name(config: Fields) -> str:
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.error("architectures", names, "a list with one name")
    return names[0]


def _check_model_type(fields: Fields, name: str, accepted: tuple[str, ...]) -> None:
    model_type = fields.text("model_type", accepted[0])
    if "moe" in model_type:
        raise UnsupportedModelError(f"{fields.file}: {model_type} is a mixture-of-experts model, wanted a dense one")
    if model_type not in accepted:
        raise fields.error("model_type", model_type, f"{' or '.join(accepted)} with architecture {name}")


def _unsupported(config: Fields, name: str, accepted: tuple[str, ...]) -> UnsupportedModelError:
    kind = ""
    if "moe" in name.lower() or "moe" in str(config.values.get("model_type", "")).lower():
        kind = " (a mixture-of-experts model)"
    elif name == "DFlash2DraftModel":
        kind = " (DFlash2, another drafter design)"
    elif "DSpark" in name or "DeepSpec" in name or name == "Qwen3DFlashModel":
        kind = " (DSpark/DeepSpec, another drafter design)"
    return UnsupportedModelError(
        f"{config.file}: architecture {name}{kind} is not supported, wanted {' or '.join(accepted)}"
    )


def _refuse_variants(fields: Fields) -> None:
    """Options of the model family that change the maths and that no supported checkpoint uses."""
    for key in ("num_experts", "num_local_experts"):
        if fields.values.get(key):
            raise UnsupportedModelError(
                f"{fields.file}: {key} is {fields.values[key]!r}: a mixture-of-experts model, wanted a dense one"
            )
    if fields.flag("attention_bias", False):
        raise UnsupportedModelError(f"{fields.file}: attention_bias is true, wanted false (no biases)")
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"{fields.file}: hidden_act is {activation!r}, wanted 'silu'")
    if (gate := fields.text("output_gate_type", "swish")) not in ("swish", "silu"):
        raise UnsupportedModelError(f"{fields.file}: output_gate_type is {gate!r}, wanted 'swish'")
