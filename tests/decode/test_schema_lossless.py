"""Speculative is plain under a JSON Schema, with every kind of drafter, whatever is drafted and accepted."""

import json
from dataclasses import replace

import pytest
from golden_pairs import NAMES, WALKS, golden, pair, same_bits
from grammar_support import END, compile_schema, open_tokenizer, satisfies
from verify_support import exact

from edge_dflash.checks.lossless import Adversary, noise, oracle_until, staircase
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options

WORDS = open_tokenizer()
STOP = (WORDS.control_id(END),)
SCHEMA = {
    "type": "object",
    "properties": {
        "action": {"enum": ["go", "pick"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "to": {"type": "string", "maxLength": 3},
    },
    "required": ["action", "n", "to"],
    "additionalProperties": False,
}
MODES = {"greedy": Options(), "sampled": Options(temperature=4.0, top_k=40, top_p=0.9, seed=7)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [NAMES[0], *WALKS])
def test_answers_under_a_schema_are_those_of_plain_decoding(name, mode):
    grammar = compile_schema(SCHEMA, WORDS, pair(name).target.vocab_size, STOP)
    backend, prompt = exact(name), golden(name)["p0.prompt"].tolist()[-6:]
    options = replace(MODES[mode], max_new_tokens=60)

    def run(drafting, **changes):
        backend.reset()
        controls = Controls(constraint=grammar.constraint())
        found = generate(drafting, prompt, replace(options, **changes), stop_token_ids=STOP, controls=controls)
        return found, backend.snapshot()

    plain, state = run(backend, speculative=False)
    assert plain.finish_reason == "stop"
    assert satisfies(SCHEMA, json.loads(WORDS.decode(plain.tokens[:-1])))
    rows = backend.shape.verify_rows
    others = [staircase(), noise(), *map(oracle_until, range(rows))]
    runs = [run(backend), run(backend, draft_confidence=0.5)]
    runs += [run(Adversary(backend, [*prompt, *plain.tokens], drafter)) for drafter in others]
    for found, left in runs:
        assert (found.tokens, found.finish_reason) == (plain.tokens, "stop")
        assert same_bits(left, state)
    for right, (found, _) in enumerate(runs[-rows:]):  # what the grammar puts in a wrong draft's place may be right
        assert all(right < length <= rows for length in found.accept_lengths[:-1])
    assert runs[-rows][0].accept_lengths != runs[-1][0].accept_lengths
