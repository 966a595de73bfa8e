"""Tokenizers that are made in code, and the schemas that random weights answer under."""

from __future__ import annotations

import json

import numpy as np
import pytest
from grammar_support import compile_schema

from edge_dflash.bench.random_pair import LEAST, synthetic_tokenizer
from edge_dflash.bench.subjects import SCENE_STEPS, STEPS, WORDS
from edge_dflash.decode.sampling import unpack
from edge_dflash.errors import RequestError

SIZE = 20_000


@pytest.fixture(scope="module")
def tokenizer():
    return synthetic_tokenizer(SIZE, WORDS)


def test_it_has_exactly_as_many_ids_as_the_model(tokenizer):
    assert tokenizer.size == SIZE
    assert tokenizer.eos_token_id == SIZE - 1
    assert len({tokenizer.token(index) for index in range(SIZE)}) == SIZE
    assert synthetic_tokenizer(SIZE, WORDS).to_json() == tokenizer.to_json()


def test_its_words_are_as_long_as_those_of_real_vocabularies(tokenizer):
    lengths = [len(tokenizer.token(index)) for index in range(1000, SIZE - 1)]
    assert 6 < np.mean(lengths) < 8
    assert max(lengths) <= 14


def test_a_plan_is_a_few_tokens_a_step_and_any_text_comes_back(tokenizer):
    step = '{"action":"navigate","target":"red_toolbox"},'
    assert len(tokenizer.encode(step)) <= 12
    assert tokenizer.decode(tokenizer.encode(step)) == step
    for text in ("kitchen table 42", "Größe: 5 µm\n\t☃"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_one_that_holds_no_words_is_refused():
    with pytest.raises(RequestError, match=f"of 300 ids is too small; give at least {LEAST}"):
        synthetic_tokenizer(300)


def test_random_choices_make_steps_without_end(tokenizer):
    grammar = compile_schema(SCENE_STEPS.schema, tokenizer, SIZE, [SIZE - 1]).constraint()
    rng, tokens = np.random.default_rng(0), []
    for _ in range(500):
        allowed = np.flatnonzero(unpack(grammar.masks(())[0], SIZE))
        assert SIZE - 1 not in allowed
        tokens.append(int(rng.choice(allowed)))
        grammar.advance(tokens[-1:])
    text = tokenizer.decode(tokens)
    steps = json.loads(text[: text.rindex("},") + 1] + "]}")["steps"]
    assert len(steps) > 30
    assert {tuple(step) for step in steps} == {("action", "target")}


def test_the_schema_of_bundles_takes_a_plan_and_ends(tokenizer):
    grammar = compile_schema(STEPS.schema, tokenizer, SIZE, [SIZE - 1]).constraint()
    grammar.advance(tokenizer.encode('{"steps":[{"action":"open","target":"the fridge"}]}'))
    grammar.advance([SIZE - 1])
    assert list(np.flatnonzero(unpack(grammar.masks(())[0], SIZE))) == [SIZE - 1]
