"""Answers under a JSON Schema on the native backend: those of plain decoding with every head, whatever is accepted."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")

from golden_pairs import same_bits
from grammar_support import END, compile_schema, open_tokenizer
from native_backend_support import prompt
from test_native_backend import OPTIONS
from test_native_drafters import PAIRS, native

from edge_dflash.checks.lossless import Adversary, ByTurns, noise, oracle_until, staircase
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.generation import generate

pytestmark = pytest.mark.gpu
WORDS = open_tokenizer()
STOP = (WORDS.control_id(END),)
SCHEMA = {
    "type": "object",
    "properties": {"action": {"enum": ["go", "pick"]}, "n": {"type": "integer"}, "to": {"type": "string"}},
    "required": ["action", "n", "to"],
    "additionalProperties": False,
}
SCHEMA["properties"]["n"] |= {"minimum": 0, "maximum": 99}
SCHEMA["properties"]["to"] |= {"maxLength": 3}


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_answers_under_a_schema_are_those_of_plain_decoding(name, kind, mode):
    backend, ids = native(name, kind), prompt(name, 25)
    grammar = compile_schema(SCHEMA, WORDS, backend.shape.vocab_size, STOP)
    options = replace(OPTIONS[mode], max_new_tokens=60)

    def run(place, **changes):
        backend.reset()
        controls = Controls(constraint=grammar.constraint())
        found = generate(place, ids, replace(options, **changes), stop_token_ids=STOP, controls=controls)
        return found.tokens, found.finish_reason, backend.snapshot()

    tokens, reason, state = run(backend, speculative=False)
    assert reason == "stop"
    assert json.loads(WORDS.decode(tokens[:-1]))["action"] in ("go", "pick")
    rows = backend.shape.verify_rows
    others = [Adversary(backend, [*ids, *tokens], d) for d in (staircase(), noise(), *map(oracle_until, range(rows)))]
    runs = [run(place) for place in (backend, ByTurns(backend), *others)] + [run(backend, draft_confidence=0.5)]
    for found, ended, left in runs:
        assert (found, ended) == (tokens, reason)
        assert same_bits(left, state)
