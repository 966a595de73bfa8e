"""Which fields of ops and of specs the native engine honours. Whatever else says anything is refused by name.

A field that is new says something where it differs from its default; one without a default always does. An op that no
table has is refused whole, and so is a kind of spec inside an op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass

from edge_dflash.errors import BackendError, short
from edge_dflash.model import ops, specs
from edge_dflash.model.program import PairPrograms

Names = frozenset[str]
_TENSORS = "inputs output"


def _fields(*names: str) -> Names:
    return frozenset(" ".join(names).split())


_LINEAR, _ADD = _fields(_TENSORS, "weight"), _fields(_TENSORS)

TEXT: Mapping[type, Names] = {
    ops.Embed: _fields(_TENSORS, "weight"),
    ops.Linear: _LINEAR,
    ops.RmsNorm: _fields(_TENSORS, "weight eps plus_one"),
    ops.Add: _ADD,
    ops.SwiGlu: _fields(_TENSORS),
    ops.Concat: _fields(_TENSORS),
    ops.SelectRows: _fields(_TENSORS, "which"),
    ops.KvAppend: _fields(_TENSORS, "state k_norm eps plus_one rope kv_heads head_dim"),
    ops.Attend: _fields(
        _TENSORS,
        "state q_norm k_norm eps plus_one bidirectional window",
        "heads kv_heads head_dim rope gated",  # AttentionSpec
    ),
    ops.GatedDelta: _fields(
        _TENSORS,
        "state conv a_log dt_bias norm eps",
        "key_heads value_heads key_dim value_dim conv_kernel",  # GatedDeltaSpec
    ),
    ops.GroupedConv: _fields(_TENSORS, "base side taps group_size"),
    ops.SelectorWalk: _fields(_TENSORS, "rank top_k predecessor successor projection"),
    ops.MarkovWalk: _fields(_TENSORS, "rank top_k predecessor successor mix judge kind confidence"),
    ops.Experts: _fields(_TENSORS, "router gates ups downs top_k renormalised shared"),
}
"""Ops of the passes of a pair, and their fields that its kernels, engines and host code act on."""

TOWER: Mapping[type, Names] = {
    ops.Linear: _LINEAR,
    ops.Add: _ADD,
    ops.Bias: _fields(_TENSORS, "weight"),
    ops.LayerNorm: _fields(_TENSORS, "weight bias eps"),
    ops.GeluTanh: _fields(_TENSORS),
    ops.GeluErf: _fields(_TENSORS),
    ops.PositionRows: _fields(_TENSORS, "weight"),
    ops.FrameAttend: _fields(_TENSORS, "heads head_dim"),
    ops.Fold: _fields(_TENSORS, "count"),
}
"""Ops of the pass of a vision tower."""

SPECS: Mapping[type, Names] = {
    specs.RopeSpec: _fields("theta dims scaling mrope_section"),
    specs.YarnScaling: _fields("factor original_max_position_embeddings attention_factor beta_fast beta_slow"),
    ops.SharedExpert: _fields("gate up down judge"),
    specs.VisionSpec: _fields(
        "depth hidden_size intermediate_size heads positions theta out patches",
        "image_token_id video_token_id vision_start_token_id vision_end_token_id",
    ),
    specs.PatchSpec: _fields("patch merge temporal min_pixels max_pixels mean std"),
}
"""What ops hold, and the tower's spec."""

REFUSED: Mapping[type, Names] = {ops.Remap: _fields(_TENSORS, "weight vocab")}
"""Fields that somebody decided not to honour; all those of an op without a kernel."""
_CALLED: Mapping[type, str] = {ops.Remap: "a draft vocabulary (d2t)"}  # in messages


def check_programs(programs: PairPrograms) -> None:
    """Raise BackendError, naming op and field, for what the native engine would ignore of the passes of a pair."""
    passes = [(programs.verify, TEXT), (programs.propose, TEXT), (programs.prefill, TEXT)]
    passes += [(programs.see, TOWER)] if programs.see else []
    read = {op.state: op for program, _ in passes for op in program.ops if isinstance(op, ops.Attend)}
    for program, known in passes:
        for op in program.ops:
            try:
                check_honoured(op, known)
                if isinstance(op, ops.KvAppend) and op.state in read:
                    _check_append(op, read[op.state])
            except BackendError as error:
                raise BackendError(f"{op.output}: {error}") from None


def _check_append(op: ops.KvAppend, read: ops.Attend) -> None:
    """Rows are appended by the kernels and the table of the layer that reads them."""
    for name in ("k_norm", "eps", "plus_one", "rope", "kv_heads", "head_dim"):
        ours, theirs = getattr(op, name), getattr(read, name)
        if ours != theirs:
            raise BackendError(
                f"{name} is {ours}, that of {read.output} {theirs}; the native kernels take one for both"
            )


def check_honoured(value: object, known: Mapping[type, Names] = SPECS) -> None:
    """Raise BackendError, naming it, for a field of an op (of ``known``) or of a spec that would be ignored."""
    name, honoured = type(value).__name__, known.get(type(value))
    if honoured is None:
        kind = f"{'op' if isinstance(value, ops.Op) else 'spec'} {name}"
        raise BackendError(f"the native backend has no kernel for {_CALLED.get(type(value), kind)}")
    for field, default in fields_of(type(value)):
        found = getattr(value, field)
        if field not in honoured and (default is MISSING or found != default):
            raise BackendError(f"{field} of {name} is {short(found)}, which the native backend does not honour")
        for part in found if type(found) is tuple else (found,):
            if is_dataclass(part) or hasattr(part, "_fields"):
                check_honoured(part)


def fields_of(kind: type) -> Iterator[tuple[str, object]]:
    """Names and defaults of the fields of a dataclass or a named tuple; MISSING: none."""
    if is_dataclass(kind):
        for field in fields(kind):
            made = field.default_factory
            yield field.name, field.default if made is MISSING else made()
    else:
        defaults: Mapping[str, object] = getattr(kind, "_field_defaults", {})
        yield from ((name, defaults.get(name, MISSING)) for name in getattr(kind, "_fields", ()))
