"""What the native engine does not honour is refused by name: nobody can add a field that it ignores in silence."""

from dataclasses import dataclass, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
from golden_pairs import ENGINE
from native_support import MIXED, NATIVE_PAIR, SIGHTED, formats_of, programs

from edge_dflash.backends.cuda import backend, support
from edge_dflash.backends.cuda.honoured import REFUSED, SPECS, TEXT, TOWER, fields_of
from edge_dflash.backends.cuda.support import check_native
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Attend, Elementwise, FrameAttend, KvAppend, Op, SwiGlu
from edge_dflash.model.specs import RopeSpec, VisionSpec


@dataclass(frozen=True, kw_only=True)
class Tilted(Attend):
    """An op as if somebody had added a field."""

    tilt: float | None = None


@dataclass(frozen=True)
class Stretched(RopeSpec):
    """A spec as if somebody had added a field."""

    stretch: float = 1.0


class GeGlu(Elementwise):
    """An op that is new."""


def own(kind):
    """Classes of the package below one, without those that are only bases of others."""
    below = [one for one in kind.__subclasses__() if one.__module__.startswith("edge_dflash.")]
    return [leaf for one in below for leaf in own(one)] or [kind]


def held(kind, seen):
    """Adds a class and those of its fields' values."""
    if kind in seen or not (is_dataclass(kind) or hasattr(kind, "_fields")):
        return
    seen.add(kind)
    types = [get_type_hints(kind)[name] for name, _ in fields_of(kind)]
    while types:
        held(one := types.pop(), seen)
        types += [part for part in get_args(one) if not isinstance(part, str)]


def test_somebody_decided_for_every_field_of_every_op_and_of_what_ops_hold():
    kinds = set()
    for kind in (*own(Op), VisionSpec):
        held(kind, kinds)
    tables = (TEXT, TOWER, SPECS, REFUSED)
    assert kinds == {kind for table in tables for kind in table}
    for kind in kinds:
        decided = [table[kind] for table in tables if kind in table]
        names = {name for name, _ in fields_of(kind)}
        told = f"{kind.__name__}: say in backends/cuda/honoured.py whether the native engine honours its fields"
        assert frozenset().union(*decided) == names, told
        assert not (REFUSED.get(kind, frozenset()) & frozenset().union(*decided[:-1])), told


def changed_programs(pair, kind, change):
    """Passes of a pair, each op of a kind (in those of text) changed."""
    made = programs(pair)
    passes = {
        name: replace(one, ops=tuple(change(op) if isinstance(op, kind) else op for op in one.ops))
        for name, one in (("verify", made.verify), ("propose", made.propose), ("prefill", made.prefill))
    }
    return replace(made, **passes)


def changed(monkeypatch, kind, change, pair=NATIVE_PAIR):
    """Check a pair with changed passes."""
    found = changed_programs(pair, kind, change)
    monkeypatch.setattr(support, "pair_programs", lambda _: found)
    check_native(pair, formats_of("bf16", pair))


def with_fields(kind, op, **more):
    return kind(**{field.name: getattr(op, field.name) for field in fields(op)}, **more)


@pytest.mark.parametrize("pair", [NATIVE_PAIR, MIXED, SIGHTED], ids=["mlp", "mixed", "sighted"])
def test_what_there_is_passes(pair):
    check_native(pair, formats_of("bf16", pair))


def test_a_new_field_passes_until_it_says_something(monkeypatch):
    monkeypatch.setitem(TEXT, Tilted, TEXT[Attend])
    changed(monkeypatch, Attend, lambda op: with_fields(Tilted, op))
    with pytest.raises(
        BackendError,
        match=r"attn: tilt of Tilted is 50.0, which the native backend does not honour; "
        "build it with --backend reference",
    ):
        changed(monkeypatch, Attend, lambda op: with_fields(Tilted, op, tilt=50.0))


def test_a_new_field_of_a_spec_inside_an_op_passes_until_it_says_something(monkeypatch):
    def stretch(by):
        return lambda op: replace(op, rope=with_fields(Stretched, op.rope, stretch=by))

    monkeypatch.setitem(SPECS, Stretched, SPECS[RopeSpec])
    changed(monkeypatch, (Attend, KvAppend), stretch(1.0))
    with pytest.raises(BackendError, match=r"stretch of Stretched is 2\.0, which the native backend does not honour"):
        changed(monkeypatch, (Attend, KvAppend), stretch(2.0))


def test_an_op_or_a_spec_that_is_new_is_refused_whole(monkeypatch):
    with pytest.raises(BackendError, match="swiglu: the native backend has no kernel for op GeGlu"):
        changed(monkeypatch, SwiGlu, lambda op: GeGlu(inputs=op.inputs, output=op.output))
    with pytest.raises(BackendError, match="the native backend has no kernel for spec Stretched"):
        changed(monkeypatch, (Attend, KvAppend), lambda op: replace(op, rope=with_fields(Stretched, op.rope)))


@pytest.mark.parametrize(
    ("table", "kind", "field"),
    [(TEXT, Attend, "window"), (TOWER, FrameAttend, "heads"), (SPECS, VisionSpec, "theta")],
)
def test_a_field_that_is_no_longer_honoured_is_refused(monkeypatch, table, kind, field):
    monkeypatch.setitem(table, kind, table[kind] - {field})
    with pytest.raises(
        BackendError, match=f"{field} of {kind.__name__} is .*, which the native backend does not honour"
    ):
        check_native(SIGHTED, formats_of("bf16", SIGHTED))


def test_rows_are_appended_as_the_layer_that_reads_them_takes_them(monkeypatch):
    with pytest.raises(BackendError, match=r"ctx: eps is 0\.5, that of drafter\.layers\.0\.attn 1e-06; the native"):
        changed(monkeypatch, KvAppend, lambda op: replace(op, eps=0.5))


def test_the_backend_itself_refuses_before_it_looks_for_a_device(monkeypatch):
    tilted = changed_programs(NATIVE_PAIR, Attend, lambda op: with_fields(Tilted, op))
    monkeypatch.setattr(backend, "pair_programs", lambda _: tilted)
    monkeypatch.setattr(backend, "Launches", lambda *_: SimpleNamespace(most_rows=16))
    with pytest.raises(BackendError, match="the native backend has no kernel for op Tilted"):
        backend.NativeBackend(NATIVE_PAIR, None, ENGINE, cubin=None, max_context=64)
