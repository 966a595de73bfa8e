from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from grammar_support import (
    CASES,
    END,
    MARKERS,
    SCHEMAS,
    Walk,
    compact,
    compile_schema,
    compile_there,
    compiled_here,
    open_tokenizer,
    tokenizer,
    vocab_size,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from json_schema import faults

from calib.demo.evaluate import heldout_tasks
from edge_dflash import demo as demo_package
from edge_dflash.decode.grammar import walker as module
from edge_dflash.decode.grammar.library import Vocabulary
from edge_dflash.decode.grammar.schema import schema_json
from edge_dflash.decode.grammar.walker import Source, Walker, compiled
from edge_dflash.decode.sampling import unpack
from edge_dflash.demo.checking import plan_schema
from edge_dflash.errors import RequestError
from edge_dflash.text.tokenizer import Tokenizer

END_ID = tokenizer().control_id(END)
OTHER_STOP = vocab_size() - 1  # a padded id: a model may name one that the tokenizer lacks
STOP = (END_ID, OTHER_STOP)
OWN = re.compile(  # words of the library
    r"coerce_one_of|lenient|NoExtension|TooComplex|non-verbose|Some\(|SearchRegex|json-schema:|\bserde|\d \| |\^\^|`|\n"
)
PLAN = {
    "type": "object",
    "properties": {"goal": {"type": "string", "maxLength": 12}, "action": {"enum": ["go", "pick"]}},
    "required": ["goal", "action"],
    "additionalProperties": False,
}


def schema(source, stop=STOP, **options):
    return Walk(compiled_here("schema", schema_json(source), stop, **options))


def regex(source, stop=STOP):
    return Walk(compiled_here("regex", source, stop))


def lark(source, **options):
    return Walk(compiled_here("grammar", source, STOP, **options))


def accepts(constraint, text):
    """Whether some tokens that spell ``text`` lead to a whole answer: at each place the longest that is allowed."""
    rest, constraint = text.encode(), constraint.copy()
    while rest:
        allowed = [int(i) for i in np.flatnonzero(constraint.allowed()) if i < len(SPELLING)]
        fitting = [i for i in allowed if SPELLING[i] and rest.startswith(SPELLING[i])]
        if not fitting:
            break
        token = max(fitting, key=lambda i: len(SPELLING[i]))
        assert constraint.push(token)
        rest = rest[len(SPELLING[token]) :]
    return not rest and constraint.complete


def spelling():
    """Bytes of each id, of the byte-level alphabet; added tokens spell nothing."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    table = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    added = {tokenizer().control_id(name) for name in (END, "<|im_start|>", *MARKERS)}
    texts = (b"" if i in added else bytes(table[c] for c in tokenizer().token(i)) for i in range(tokenizer().size))
    return list(texts)


SPELLING = spelling()


def walk(constraint, rng, longest=600, favoured=lambda tokens: ()):
    """Random allowed tokens until one ends the answer: those before it; None when it does not end.

    ``favoured``: sets of ids, each with how often one of them comes where it may.
    """
    tokens = []
    while len(tokens) < longest:
        ids = [int(i) for i in np.flatnonzero(constraint.allowed())]
        assert ids, "a place with no allowed token"
        for some, share in favoured(tokens):
            among = [i for i in ids if i in some]
            ids = among if among and rng.random() < share else ids
        token = rng.choice(ids)
        assert constraint.push(token)
        if token in STOP:
            return tokens
        tokens.append(token)
    return None


class Stepper:
    """A constraint, token by token."""

    def __init__(self, constraint):
        self.constraint = constraint

    def allowed(self):
        return unpack(self.constraint.masks(())[0], vocab_size())

    def push(self, token):
        self.constraint.advance([token])
        return True


def text_of(tokens):
    return b"".join(SPELLING[token] for token in tokens).decode()


@settings(max_examples=60)
@given(CASES)
def test_documents_that_satisfy_a_schema_are_accepted_token_by_token(case):
    source, document = case
    assert accepts(schema(source), compact(document))


@settings(max_examples=60)
@given(SCHEMAS, st.randoms(use_true_random=False))
def test_a_random_walk_along_allowed_tokens_ends_in_a_document_that_satisfies_the_schema(pair, rng):
    text = text_of(walk(schema(pair[0]), rng))
    assert not faults(pair[0], json.loads(text), pair[0])
    assert not any(blank in text.replace(" ", "") for blank in "\n\t\r")


@settings(max_examples=40)
@given(SCHEMAS, st.randoms(use_true_random=False))
def test_the_mask_depends_on_the_tokens_alone_whatever_is_tried(pair, rng):
    """The probing of drafts must not change what is allowed later."""
    plain, probed = schema(pair[0]), schema(pair[0])
    for token in [*walk(schema(pair[0]), rng), END_ID]:
        before, forced, tried = probed.allowed().copy(), probed.forced(), probed.copy()
        for _ in range(rng.randint(1, 8)):
            tried.push(int(rng.choice(list(np.flatnonzero(tried.allowed())))))
            if rng.random() < 0.3:
                tried.forced()
            assert not tried.push(vocab_size() - 2)
        probed.forget()
        np.testing.assert_array_equal(probed.allowed(), before)
        np.testing.assert_array_equal(plain.allowed(), before)
        assert probed.forced() == forced
        assert plain.push(token)
        assert probed.push(token)


@settings(max_examples=60)
@given(SCHEMAS, st.randoms(use_true_random=False))
def test_forced_tokens_are_the_only_allowed_ones(pair, rng):
    constraint = schema(pair[0], stop=(END_ID,))
    for token in [*walk(schema(pair[0]), rng), END_ID]:
        forced, tried = constraint.forced(), constraint.copy()
        for follower in forced:
            assert list(np.flatnonzero(tried.allowed())) == [follower]
            assert tried.push(follower)
        assert forced or constraint.allowed().sum() > 1
        assert constraint.push(token)


def test_stop_tokens_come_when_the_text_is_whole_and_nothing_after_them():
    constraint = regex("ab?")
    assert not constraint.push(END_ID)
    assert not constraint.complete
    assert constraint.push(SPELLING.index(b"a"))
    assert constraint.complete
    assert constraint.allowed()[list(STOP)].all()
    stopped = constraint.copy()
    assert stopped.push(OTHER_STOP)
    assert list(np.flatnonzero(stopped.allowed())) == sorted(STOP)
    assert stopped.forced() == ()
    assert not stopped.push(SPELLING.index(b"b"))
    assert stopped.push(END_ID)
    assert constraint.push(SPELLING.index(b"b"))
    assert list(np.flatnonzero(constraint.allowed())) == sorted(STOP)


def test_padded_and_special_ids_are_never_allowed():
    constraint = schema({"type": "string"})
    assert constraint.push(SPELLING.index(b'"'))
    allowed = constraint.allowed()
    assert allowed.shape == (vocab_size(),)
    assert not allowed[tokenizer().size :].any()
    assert not any(allowed[tokenizer().control_id(name)] for name in (END, "<|im_start|>", *MARKERS))
    for token in (*(tokenizer().control_id(name) for name in MARKERS), tokenizer().size, vocab_size(), -1):
        assert not constraint.push(token)


def test_compact_json_is_the_default_and_blanks_are_bounded():
    spaced = '{ "goal": "x",\n "action": "go" }'
    assert not accepts(schema(PLAN), spaced)
    assert accepts(schema(PLAN, whitespace=True), spaced)
    assert accepts(schema(PLAN, whitespace=True), compact({"goal": "x", "action": "go"}))
    assert accepts(schema(PLAN, whitespace=True), "{" + " " * 64 + '"goal":"x","action":"go"}')
    assert not accepts(schema(PLAN, whitespace=True), "{" + " " * 65 + '"goal":"x","action":"go"}')


def test_schemas_come_as_text_as_mappings_and_as_pydantic_models():
    class Model:
        @classmethod
        def model_json_schema(cls):
            return PLAN

    for source in (PLAN, json.dumps(PLAN), Model):
        assert accepts(schema(source), '{"goal":"x","action":"pick"}')
        assert not accepts(schema(source), '{"goal":"x","action":"fly"}')


def test_a_recursive_schema_that_can_end_is_taken():
    tree = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 3}}}
    assert accepts(schema(tree), "[[],[[[]]]]")


def test_regexes_match_the_whole_answer():
    assert accepts(regex("[a-z]+/\\d{2}"), "mug/42")
    assert not accepts(regex("[a-z]+/\\d{2}"), "mug/4")
    assert accepts(regex("^a|b$"), "b")
    assert accepts(regex("é中+"), "é中中")


def test_lark_grammars_may_name_special_tokens_and_hold_schemas():
    call = lark('start: <tool_call> body </tool_call> // "<nothing>"\nbody: %json {"const":"<think>"}')
    opened, closed = tokenizer().control_id("<tool_call>"), tokenizer().control_id("</tool_call>")
    assert call.forced()[0] == opened
    assert call.push(opened)
    for token in call.forced():
        assert call.push(token)
    assert text_of(call._pushed) == '"<think>"'
    assert call._pushed[-1] == closed
    assert call.complete
    assert accepts(lark('start: "<x>" /[<>]+/'), "<x><><>")
    spaced = 'start: %json {"type":"array","items":{"type":"null"},"minItems":1}'
    assert accepts(lark(spaced, whitespace=True), "[ null]")
    assert not accepts(lark(spaced), "[ null]")


def nested(levels):
    source = {"type": "null"}
    for _ in range(levels):
        source = {"type": "array", "items": source}
    return source


def chain(length):
    links = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "null"}}}


def test_nesting_is_limited_before_the_library_would_exhaust_the_stack():
    assert accepts(schema(nested(60)), "[" * 30 + "]" * 30)
    with pytest.raises(RequestError, match="nested deeper than 64 levels"):
        schema(nested(65))
    assert accepts(schema(chain(150)), '{"x":{"x":{}}}')
    with pytest.raises(RequestError, match="levels deep in all, at most 512"):
        schema(chain(300))
    rules = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(400)) + 'r400: "a"'
    assert accepts(lark(rules), "a")


REFUSED = [
    ("schema", "[]", "the schema is of type list"),
    ("schema", True, "the schema is of type bool"),
    ("schema", '{"type": ', "the schema is no JSON"),
    ("schema", {"const": {1, 2}}, "cannot be written as JSON"),
    ("schema", {"maximum": float("nan")}, "cannot be written as JSON"),
    ("schema", {"enum": ["x" * 300_000]}, "bytes, at most 262144 are taken"),
    ("schema", '{"const": "' + "x" * 300_000 + '"}', "bytes, at most 262144 are taken"),
    ("schema", '{"items":' * 5000 + "{}" + "}" * 5000, "the schema is n"),  # no JSON, or nested too deep: by Python
    ("schema", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
    ("schema", {"required": ["a"], "type": "object", "additionalProperties": False}, "property 'a' is unsatisfiable"),
    ("grammar", 'start: "a" start', "leaves no choice for more than 4096 tokens"),
    ("grammar", 'x: "a"', "it has no start rule"),
    ("grammar", "start: <nope>", "names the token <nope>, which the tokenizer lacks"),
    ("grammar", 'start: r "b"\nr[max_tokens=3]: /a+/', "sets max_tokens, which would not be enforced"),
    ("grammar", 'start: r "b"\nr[temperature=0.5]: /a+/', "sets temperature"),
    ("grammar", 'start: %json {"type": "string", "not": {}}', "'not' at # would not be enforced"),
    ("grammar", 'start: %json {"type": ', "%json is no JSON"),
    ("grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(600)) + 'r600: "a"', "602 rules, at most"),
    ("grammar", "start: " + '"a" ' * 20_000, "bytes, at most 65536"),
    ("grammar", "start: /(/", "line 1, column 8: the regex /(/ is not valid: unclosed group"),
    ("grammar", "start: x\nx: y\ny: x", "no text leads to its end"),
    ("grammar", 'start: a\na: b c\nc: "x"', 'line 2, column 4: unknown name: "b"'),
    ("grammar", "start: 'x'", "line 1, column 8: a character stands where none of the language can"),
    ("grammar", "start: (a", "line 1, column 10: Expected token ')'"),
    ("regex", "a(?=b)", "look-around"),
    ("regex", "(ab", "unclosed group"),
    ("regex", "[^\\s\\S]", "nothing satisfies the regex (no text leads to its end"),
    ("regex", "a{100000}", "leaves no choice"),
    ("regex", "a" * 20_000, "bytes, at most 16384"),
    ("regex", "a{5,2}", "the regex /a{5,2}/ is not valid: invalid repetition count range"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "reason"), REFUSED, ids=lambda value: str(value)[:30])
def test_forms_are_refused_with_the_reason(kind, source, reason):
    with pytest.raises(RequestError) as refused:
        compile_there(kind, source, open_tokenizer(), vocab_size(), STOP)
    assert reason in str(refused.value)
    assert not OWN.search(str(refused.value))


def test_masks_do_not_depend_on_paths_that_were_left():
    """Found with this schema: behind the library's rollback, the end of an object of the wrong branch is allowed."""
    demo = Tokenizer.open(Path(demo_package.__file__).parent / "models" / "target")
    ids = Vocabulary(demo.to_json(), demo.size, (2,))
    grammar = compiled(Source("schema", json.dumps(plan_schema()), False, demo.size), ids)
    answers = [demo.encode(task.answer) for task in heldout_tasks()[:12]]
    for seed in range(12):
        rng = random.Random(seed)
        answer, constraint, straight = answers[seed], Walker(grammar), Walker(grammar)
        for token in answer:
            assert constraint.push(token)
            assert straight.push(token)
            if rng.random() < 0.7:
                continue
            tried = constraint.copy()
            for _ in range(rng.randrange(1, 16)):
                allowed = unpack(np.frombuffer(tried.packed(), np.uint32), demo.size)
                allowed = [int(i) for i in np.flatnonzero(allowed) if i != 2]
                if not allowed:
                    break
                tried.push(rng.choice(allowed))
            assert constraint.packed() == straight.packed()


def test_a_grammar_that_turns_out_too_complex_is_an_error_that_leaves_the_walker_where_it_was():
    constraint = regex("a{40}c(a|b){14}")
    for _ in range(40):
        assert constraint.push(SPELLING.index(b"a"))
    for failing in (constraint.allowed, constraint.forced, lambda: constraint.push(SPELLING.index(b"c"))):
        constraint._matcher.consume_token(END_ID)  # what an error of the library looks like: it does not leave it
        constraint.forget()
        with pytest.raises(RequestError, match="cannot go on after 40 tokens"):
            failing()
        assert constraint.allowed()[SPELLING.index(b"c")]
    assert constraint.push(SPELLING.index(b"c"))


def test_requests_of_one_grammar_do_not_disturb_each_other():
    grammar = compile_schema(PLAN, open_tokenizer(), vocab_size(), STOP)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: walk(Stepper(grammar.constraint()), random.Random(seed)), range(4)))
    assert found == [walk(schema(PLAN), random.Random(seed)) for seed in range(4)]


def test_slices_of_the_vocabulary_change_no_mask():
    """Pieces of strings are taken or left by length; the library's own, coarser slices are the reference."""
    from llguidance import LLMatcher, LLTokenizer

    from edge_dflash.bench.random_pair import synthetic_tokenizer

    words = synthetic_tokenizer(4096)
    ours = Vocabulary(words.to_json(), words.size, (words.eos_token_id,)).tokenizer
    theirs = LLTokenizer(words.to_json(), eos_token=[words.eos_token_id])
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 24}}, "required": ["a"]}
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=module._json_options(False))
    matchers = [LLMatcher(tokenizer, source, log_level=0) for tokenizer in (ours, theirs)]
    for token in words.encode('{"a":"the red mug is on the big'):
        masks = [np.frombuffer(matcher.compute_bitmask(), np.uint8) for matcher in matchers]
        np.testing.assert_array_equal(*masks)
        assert [matcher.try_consume_tokens([token]) for matcher in matchers] in ([1, 1], [0, 0])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("schema", json.dumps({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1000)}})),
        ("grammar", "start: " + "x? " * 2000 + '\nx: "a" | "b"'),
    ],
)
def test_a_grammar_that_fails_with_the_first_token_is_refused(kind, text):
    with pytest.raises(RequestError, match=f"the {kind} cannot be used: .*too many ways are open at once"):
        compiled_here(kind, text, (END_ID,))
