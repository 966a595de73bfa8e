"""A small byte-level BPE with the special tokens of the Qwen family, schemas with documents that satisfy them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, partial

import numpy as np
from fakes import Stepped
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from edge_dflash.decode.grammar.compiled import Grammar, compile_form
from edge_dflash.decode.grammar.library import Vocabulary
from edge_dflash.decode.grammar.schema import schema_json
from edge_dflash.decode.grammar.walker import Compiled, Source, Walker, compiled
from edge_dflash.decode.sampling import unpack
from edge_dflash.text.chat import Answer, AnswerStream
from edge_dflash.text.template import ChatTemplate
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.text.tool_calls import Tool

END, TURN = "<|im_end|>", "<|im_start|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added, but not special: as in Qwen3
PADDING = 24  # ids of the model beyond the tokenizer

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}{% for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}{% if not enable_thinking %}{{- '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


@cache
def tokenizer() -> Tokenizer:
    hf = HfTokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    corpus = [json.dumps({"goal": f"pick mug {i}", "steps": [{"action": "go", "n": i}]}) for i in range(40)]
    compact = [text.replace(": ", ":").replace(", ", ",") for text in corpus]
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, min_frequency=2
    )
    hf.train_from_iterator([*corpus, *compact, "think about the tool_call"], trainer)
    hf.add_special_tokens([AddedToken(END, special=True), AddedToken(TURN, special=True)])
    hf.add_tokens([AddedToken(name, special=False) for name in MARKERS])
    return Tokenizer(hf, ChatTemplate(TEMPLATE, {}, "test"), hf.token_to_id(END))


def vocab_size() -> int:
    return tokenizer().size + PADDING


@cache
def open_tokenizer() -> Tokenizer:
    """The same for tests without a planner: one that no planner of another test has closed."""
    return tokenizer.__wrapped__()


@cache
def vocabulary(stop: tuple[int, ...]) -> Vocabulary:
    return Vocabulary(tokenizer().to_json(), tokenizer().size, stop)


def compiled_here(kind: str, text: str, stop: tuple[int, ...], whitespace: bool = False) -> Compiled:
    """A grammar, compiled in this process."""
    return compiled(Source(kind, text, whitespace, vocab_size()), vocabulary(stop))


def compile_there(kind: str, form: object, words: Tokenizer, size: int, stop: Sequence[int]) -> Grammar:
    """A form compiled in its process, without blanks; ``form`` is a text, or a schema of any type."""
    text = schema_json(form) if kind == "schema" else form
    return compile_form(Source(kind, text, False, size), words, stop)


compile_schema = partial(compile_there, "schema")
compile_regex = partial(compile_there, "regex")
compile_lark = partial(compile_there, "grammar")


def split_answer(
    ids: Sequence[int],
    words: Tokenizer,
    prompt: Sequence[int] = (),
    *,
    stop_token_ids: Sequence[int] = (),
    tools: Sequence[Tool] | None = None,
) -> Answer:
    """A finished answer, taken apart."""
    stream = AnswerStream(words, prompt, stop_token_ids=stop_token_ids, tools=tools)
    return stream.add(ids) + stream.finish()


class Walk(Walker):
    """What runs in a grammar's process, here."""

    @property
    def complete(self) -> bool:
        """Whether the text so far is whole: the grammar may end here."""
        return bool(self.allowed()[self._grammar.stop_token_ids[0]])

    def allowed(self):
        return unpack(np.frombuffer(self.packed(), np.uint32), vocab_size())


class Direct(Stepped):
    """A grammar in this process, as a constraint."""

    def __init__(self, kind, text, stop):
        super().__init__(Walker(compiled_here(kind, text, stop)))

    @property
    def ended(self):
        return self.inner.ended

    def packed(self):
        return np.frombuffer(self.inner.packed(), np.uint32)


def allowed_by(mask):
    """Ids that a mask allows; None where every one is."""
    return None if mask is None else [int(i) for i in np.flatnonzero(unpack(mask, vocab_size()))]


def compact(document: object) -> str:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def _object(parts):
    names = [f"k{i}" for i in range(len(parts))]
    schema = {
        "type": "object",
        "properties": dict(zip(names, (part[0] for part in parts), strict=True)),
        "required": names,
        "additionalProperties": False,
    }
    documents = st.tuples(*(part[1] for part in parts)).map(lambda values: dict(zip(names, values, strict=True)))
    return schema, documents


def _array(part, low, high):
    schema = {"type": "array", "items": part[0], "minItems": low, "maxItems": low + high}
    return schema, st.lists(part[1], min_size=low, max_size=low + high)


def _integers(low, span):
    return {"type": "integer", "minimum": low, "maximum": low + span}, st.integers(low, low + span)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=8)
_LEAVES = st.one_of(
    st.just(({"type": "boolean"}, st.booleans())),
    st.just(({"type": "null"}, st.none())),
    st.builds(_integers, st.integers(-300, 300), st.integers(0, 999)),
    st.just(({"type": "string", "maxLength": 8}, TEXT)),
    st.lists(TEXT, min_size=1, max_size=3, unique=True).map(lambda values: ({"enum": values}, st.sampled_from(values))),
    st.sampled_from(["plain", "<think>x</think>", "<|im_end|>", 'quo"te\\', "é中"]).map(
        lambda value: ({"const": value}, st.just(value))
    ),
)


def _more(inner):
    return st.one_of(
        st.lists(inner, min_size=0, max_size=3).map(_object),
        st.builds(_array, inner, st.integers(0, 2), st.integers(0, 2)),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda parts: ({"anyOf": [part[0] for part in parts]}, st.one_of([part[1] for part in parts]))
        ),
    )


# (schema, strategy of documents that satisfy it)
SCHEMAS = st.recursive(_LEAVES, _more, max_leaves=5)
CASES = SCHEMAS.flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1]))
