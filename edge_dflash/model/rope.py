"""Rotary embedding of a config: flat keys (transformers 4), ``rope_parameters`` (transformers 5), YaRN scaling."""

from __future__ import annotations

from edge_dflash.model.fields import Fields
from edge_dflash.model.specs import RopeSpec, YarnScaling

_YARN = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate")


def read_rope(fields: Fields, head_dim: int, *, whole: bool) -> RopeSpec:
    """Rotary embedding of a model; ``whole``: it rotates whole heads, whatever the file says.

    As in transformers, a key of ``rope_parameters`` wins over the flat key, and ``rope_scaling`` stands in the place of
    ``rope_parameters``; where a file has both, they must agree but for the scaling. Raises CheckpointError for settings
    that do not agree, for other kinds of scaling, and for a YaRN whose ramp would run backwards.
    """
    old, new = (fields.child(name) for name in ("rope_scaling", "rope_parameters"))
    if not old.values:
        return _rope(new, fields, head_dim, whole)
    scaling = _scaling(old, fields)
    if new.has("rope_theta") and not old.has("rope_theta") and not fields.has("rope_theta"):
        raise fields.error("rope_scaling", old.values, "its own rope_theta: it stands in the place of rope_parameters")
    rope = _rope(old, fields, head_dim, whole)
    if new.values:
        other = _rope(new, fields, head_dim, whole)
        if (rope.theta, rope.dims) != (other.theta, other.dims) or other.scaling not in (None, scaling):
            raise fields.error(
                "rope_scaling", old.values, f"the same as rope_parameters ({dict(new.values)}); keep one"
            )
    return rope


def _rope(rope: Fields, fields: Fields, head_dim: int, whole: bool) -> RopeSpec:
    """Rotary embedding by one object of settings, and by the flat keys where it lacks some."""
    scaling = _scaling(rope, fields)
    theta = (rope if rope.has("rope_theta") else fields).number("rope_theta")
    source = rope if rope.has("partial_rotary_factor") else fields
    factor = source.number("partial_rotary_factor")
    dims = int(head_dim * factor)
    if dims % 2 or not 0 < dims <= head_dim or dims != head_dim * factor:
        raise source.error("partial_rotary_factor", factor, f"a share of head_dim {head_dim} that is an even number")
    if whole and dims != head_dim:
        raise source.error("partial_rotary_factor", factor, "1: this architecture rotates whole heads")
    if scaling is not None:
        if theta <= 1:
            raise rope.error("rope_theta", theta, "more than 1 for YaRN")
        low, high = scaling.ramp(theta, dims)
        if low > high:
            original = scaling.original_max_position_embeddings
            raise rope.error("original_max_position_embeddings", original, f"a context that fits theta {theta:g}")
    return RopeSpec(theta, dims, scaling)


def _scaling(rope: Fields, fields: Fields) -> YarnScaling | None:
    kind = rope.text("rope_type" if rope.has("rope_type") else "type")
    if rope.has("type") and rope.text("type") != kind:
        raise rope.error("type", rope.text("type"), f"the same as rope_type ({kind!r})")
    if kind != "yarn":
        for key in _YARN:
            if rope.has(key):
                raise rope.error(key, rope.values[key], "no such setting without rope_type 'yarn'")
        return None
    if (factor := rope.number("factor")) < 1:
        raise rope.error("factor", factor, "a number of at least 1")
    name = "original_max_position_embeddings"
    yarn = YarnScaling(
        factor=factor,
        original_max_position_embeddings=(
            rope.integer(name) if rope.has(name) else fields.integer("max_position_embeddings")
        ),
        attention_factor=rope.number("attention_factor") if rope.has("attention_factor") else None,
        beta_fast=rope.number("beta_fast"),
        beta_slow=rope.number("beta_slow"),
    )
    if yarn.beta_fast < yarn.beta_slow:
        raise rope.error("beta_fast", yarn.beta_fast, f"at least beta_slow ({yarn.beta_slow})")
    return yarn
