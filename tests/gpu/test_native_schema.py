"""Answers under a JSON Schema on the native backend: those of plain decoding with every head, whatever is accepted."""

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")

from native_backend_support import prompt
from schema_answers import accepted_under_a_schema
from test_native_backend import OPTIONS
from test_native_drafters import PAIRS, native

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_answers_under_a_schema_are_those_of_plain_decoding(name, kind, mode):
    accepted_under_a_schema(native(name, kind), prompt(name, 25), OPTIONS[mode])
