"""Answers under a JSON Schema, with every kind of drafter: what their losslessness is, on any backend."""

import json
from dataclasses import replace

from golden_pairs import same_bits
from grammar_support import END, compile_schema, open_tokenizer
from json_schema import faults

from edge_dflash.checks.lossless import Adversary, ByTurns, noise, oracle_until, staircase
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.generation import generate

ACTION = {
    "type": "object",
    "properties": {
        "action": {"enum": ["go", "pick"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "to": {"type": "string", "maxLength": 3},
    },
    "required": ["action", "n", "to"],
    "additionalProperties": False,
}


def accepted_under_a_schema(backend, prompt, options):
    """Accept lengths of drafters that are right until row 0, 1, ...; those answers, and others', are the plain one."""
    words, stop = open_tokenizer(), (open_tokenizer().control_id(END),)
    grammar = compile_schema(ACTION, words, backend.shape.vocab_size, stop)

    def run(place, **changes):
        backend.reset()
        controls, asked = Controls(constraint=grammar.constraint()), replace(options, max_new_tokens=60, **changes)
        return generate(place, prompt, asked, stop_token_ids=stop, controls=controls), backend.snapshot()

    plain, state = run(backend, speculative=False)
    assert plain.finish_reason == "stop"
    assert not faults(ACTION, json.loads(words.decode(plain.tokens[:-1])), ACTION)
    drafters = [staircase(), noise(), *map(oracle_until, range(backend.shape.verify_rows))]
    runs = [run(backend), run(ByTurns(backend)), run(backend, draft_confidence=0.5)]
    runs += [run(Adversary(backend, [*prompt, *plain.tokens], drafter)) for drafter in drafters]
    for found, left in runs:
        assert (found.tokens, found.finish_reason) == (plain.tokens, "stop")
        assert same_bits(left, state)
    return [found.accept_lengths for found, _ in runs[5:]]
