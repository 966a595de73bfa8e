"""Rotary embedding of a config: flat fields (transformers 4), ``rope_parameters`` (transformers 5), YaRN scaling."""

from __future__ import annotations

from edge_dflash.checkpoint.fields import Fields
from edge_dflash.checkpoint.specs import RopeSpec, YarnScaling

_YARN = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow")
# Keys that do not change the scaling. M-RoPE of text alone is ordinary RoPE: a token's three positions are equal.
_NEUTRAL = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def read_rope(fields: Fields, head_dim: int, partial: float) -> RopeSpec:
    """Rotary embedding of a model whose ``partial_rotary_factor`` is ``partial`` where the file has none.

    ``rope_parameters`` wins over ``rope_theta``; a YaRN ``rope_scaling``, which users add by hand, also counts beside
    it. Raises CheckpointError for other kinds of scaling and for YaRN settings that this version does not know.
    """
    rope = fields.child("rope_parameters")
    theta = rope.number("rope_theta") if rope.has("rope_theta") else fields.number("rope_theta")
    source = rope if rope.has("partial_rotary_factor") else fields
    factor = source.number("partial_rotary_factor", partial)
    dims = round(head_dim * factor)
    if dims % 2 or not 0 < dims <= head_dim or abs(dims - head_dim * factor) > 1e-6:
        raise source.error("partial_rotary_factor", factor, f"a share of head_dim {head_dim} that is an even number")
    if partial == 1.0 and dims != head_dim:
        raise source.error("partial_rotary_factor", factor, "1: this architecture rotates whole heads")
    return RopeSpec(theta, dims, _scaling(rope, fields) or _scaling(fields.child("rope_scaling"), fields))


def _scaling(rope: Fields, fields: Fields) -> YarnScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise rope.error("rope_type", kind, "'default' or 'yarn'")
    for key in sorted(rope.values):
        if rope.has(key) and key not in (*_YARN, *_NEUTRAL):
            raise rope.error(key, rope.values[key], f"no such setting; YaRN takes {', '.join(_YARN)}")
    if (factor := rope.number("factor")) < 1:
        raise rope.error("factor", factor, "a number of at least 1")
    original = _YARN[1]
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=(
            rope.integer(original) if rope.has(original) else fields.integer("max_position_embeddings")
        ),
        attention_factor=rope.number("attention_factor") if rope.has("attention_factor") else None,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
    )
