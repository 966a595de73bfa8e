from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_dflash.common.tables import UNWRITTEN, decode, encode
from edge_dflash.errors import BundleError


@dataclass(frozen=True)
class Inner:
    ratio: float
    name: str | None


@dataclass(frozen=True)
class Outer:
    flag: bool
    count: int
    kind: Literal["a", "b"]
    many: tuple[int, ...]
    two: tuple[float, float]
    inner: Inner | None
    table: Mapping[str, Inner]


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
INNERS = st.builds(Inner, FLOATS, st.none() | st.text())
OUTERS = st.builds(
    Outer,
    st.booleans(),
    st.integers(),
    st.sampled_from(["a", "b"]),
    st.lists(st.integers()).map(tuple),
    st.tuples(FLOATS, FLOATS),
    st.none() | INNERS,
    st.dictionaries(st.text(), INNERS),
)
EXAMPLE = encode(Outer(True, 3, "a", (1,), (1.0, 2.0), Inner(0.5, None), {"x": Inner(1.0, "y")}))


@given(OUTERS)
def test_decode_undoes_encode(value):
    assert decode(Outer, encode(value), "outer") == value


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("flag", 1, "o.flag: found 1, wanted bool"),
        ("count", True, "o.count: found True, wanted int"),
        ("count", 1.0, "o.count: found 1.0, wanted int"),
        ("kind", "c", "o.kind: found 'c', wanted one of 'a', 'b'"),
        ("kind", ["a"], "o.kind: found ['a']"),
        ("many", [1, "2"], "o.many[1]: found '2', wanted int"),
        ("many", {}, "o.many: found {}, wanted an array"),
        ("two", [1.0], "o.two: found [1.0], wanted an array of 2"),
        ("two", [1.0, float("inf")], "o.two[1]: found inf, wanted float"),
        ("inner", {"ratio": "x", "name": None}, "o.inner.ratio: found 'x', wanted float"),
        ("inner", {"ratio": 1.0}, "o.inner: key 'name' is missing"),
        ("table", {"x": {"ratio": 1.0, "name": None, "z": 1}}, "o.table.x: unknown key 'z'"),
        ("table", [], "o.table: found [], wanted an object"),
    ],
)
def test_wrong_values_are_refused_by_field(field, value, message):
    with pytest.raises(BundleError) as error:
        decode(Outer, {**EXAMPLE, field: value}, "o")
    assert str(error.value).startswith(message)


def test_an_integer_may_stand_for_a_float():
    decoded = decode(Inner, {"ratio": 2, "name": None}, "i")
    assert decoded == Inner(2.0, None)
    assert isinstance(decoded.ratio, float)


def test_values_without_a_json_form_are_refused():
    with pytest.raises(ValueError, match="nan has no JSON form"):
        encode(Inner(float("nan"), None))
    with pytest.raises(TypeError, match="set has no JSON form"):
        encode({1})


@dataclass(frozen=True)
class Grown:
    name: str
    kind: str = field(default="plain", metadata=UNWRITTEN)


def test_a_field_that_came_later_is_written_only_where_it_differs():
    assert encode(Grown("x")) == {"name": "x"}
    assert encode(Grown("x", "odd")) == {"name": "x", "kind": "odd"}
    for value in (Grown("x"), Grown("x", "odd")):
        assert decode(Grown, encode(value), "g") == value
    with pytest.raises(BundleError, match=r"g\.kind: found 1, wanted str"):
        decode(Grown, {"name": "x", "kind": 1}, "g")
