"""Speculative is plain with pictures: wherever they stand, however the prompt is cut, whatever is drafted."""

import json
from dataclasses import replace

import pytest
from golden_pairs import ENGINE, FLOAT32, backend, golden, same_bits
from grammar_support import END, compile_schema, open_tokenizer
from json_schema import faults
from lane_mixes import Mix, differences
from pictures_support import ask, changed, filled, mixed, noise, picture, prompt, sighted

from edge_dflash.checks.lossless import Adversary, oracle_until, staircase, verify_lossless
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.generation import collect, generate
from edge_dflash.decode.options import Options
from edge_dflash.decode.session import SessionManager

NAME = "vision"
FIRST, LAST, WIDE = picture(0), picture(2), picture(1)
TEXT, MORE = [165, 27, 143], [36, 105]
PLACES = {
    "first": mixed(FIRST, TEXT),
    "last": mixed(TEXT, FIRST),
    "alone": mixed(WIDE),
    "two": mixed(TEXT, FIRST, MORE, WIDE, TEXT),
    "twice": mixed(TEXT, LAST, MORE, LAST, TEXT),
    "adjacent": mixed(TEXT, FIRST, LAST, LAST, MORE),
}
MODES = {"greedy": {}, "sampled": {"temperature": 4.0, "top_k": 40, "top_p": 0.9, "seed": 7}}


def test_every_place_of_a_picture_with_every_drafter():
    result = verify_lossless(backend(NAME, ENGINE, prefill_chunk=5), list(PLACES.values()), max_new_tokens=12)
    result.check()
    assert result.untried == ()
    assert result.prompts == len(PLACES)


def test_a_random_tower_before_another_target():
    said = mixed(TEXT, noise(3, (4, 6)), MORE, noise(4, (2, 2)), image=510)
    result = verify_lossless(sighted(precision=ENGINE, prefill_chunk=4), [said], max_new_tokens=12)
    result.check()
    assert result.accept_length > 0


@pytest.mark.parametrize("place", ["two", "adjacent"])
@pytest.mark.parametrize("mode", MODES)
def test_no_chunk_boundary_changes_a_token_or_a_bit(place, mode):
    said, options, found = PLACES[place], Options(max_new_tokens=9, **MODES[mode]), []
    for chunk in (512, 1, 2, 4, 7):
        b = backend(NAME, ENGINE, prefill_chunk=chunk)
        tokens = generate(b, said.ids, options, pictures=said.pictures).tokens
        found.append((tokens, b.snapshot()))
    assert {tokens for tokens, _ in found} == {found[0][0]}
    assert all(same_bits(state, found[0][1]) for _, state in found)


def test_what_a_picture_shows_and_where_it_stands_decides():
    b, found = backend(NAME, FLOAT32), []
    others = [
        mixed(changed(FIRST), TEXT),
        mixed(FIRST, TEXT),
        mixed(noise(0, (6, 4)), TEXT),
        mixed(noise(0, (4, 6)), TEXT),
    ]
    for said in others:
        b.reset()
        found.append(filled(b, said).logits().tobytes())
    assert len({*found}) == len(others)


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_under_a_schema(mode):
    words, b = open_tokenizer(), sighted()
    stop = (words.control_id(END),)
    schema = {"type": "object", "properties": {"to": {"enum": ["go", "pick"]}}, "required": ["to"]}
    grammar = compile_schema(schema | {"additionalProperties": False}, words, b.shape.vocab_size, stop)
    said, options = mixed(TEXT, FIRST, MORE, WIDE, TEXT, image=510), Options(max_new_tokens=40, **MODES[mode])

    def run(around, **changes):
        b.reset()
        controls, chosen = Controls(constraint=grammar.constraint()), replace(options, **changes)
        found = generate(around, said.ids, chosen, stop_token_ids=stop, controls=controls, pictures=said.pictures)
        return found, b.snapshot()

    plain, state = run(b, speculative=False)
    assert plain.finish_reason == "stop"
    assert not faults(schema, json.loads(words.decode(plain.tokens[:-1])), schema)
    for drafter in (None, staircase(), oracle_until(3)):
        around = b if drafter is None else Adversary(b, [*said.ids, *plain.tokens], drafter)
        found, left = run(around)
        assert (found.tokens, found.finish_reason) == (plain.tokens, "stop")
        assert same_bits(left, state)


def test_the_loop_has_the_golden_runs_tokens():
    for run in range(4):
        said, b = prompt(run), backend(NAME, FLOAT32, prefill_chunk=7)
        found = collect(list(ask(SessionManager(b).open(), said, Options(max_new_tokens=32))))
        assert found.tokens == tuple(golden(NAME)[f"p{run}.dflash_tokens"].tolist())


@pytest.mark.parametrize("seed", range(2))
def test_lanes_with_pictures_beside_text_have_what_they_have_alone(seed):
    mix = Mix(NAME, seed).run(10)
    assert mix.most > 1
    assert {bool(said.pictures) for _, _, said, _, _ in mix.ended} == {True, False}
    assert differences(mix) == []
