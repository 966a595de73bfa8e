"""The form of an answer: a schema, a regex, a grammar or calls, compiled for a request, and where it begins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from edge_dflash.decode.controls import Patience
from edge_dflash.decode.grammar.calls import AnswerForm, Calls
from edge_dflash.decode.grammar.compiled import Grammar, compile_form
from edge_dflash.decode.grammar.schema import schema_json
from edge_dflash.decode.grammar.walker import Source
from edge_dflash.decode.options import Options
from edge_dflash.decode.steering import AfterThinking, Constraint, InCalls
from edge_dflash.errors import RequestError
from edge_dflash.text.chat import Markers, dialect_of, thinking_is_open
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.text.tool_calls import Tool

_BEFORE_ANSWER = "\n\n"  # what the chat templates of the Qwen family write between thinking and answer


def ends_of_form(tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The stop tokens that no text is written with: a comma that ends other answers is a comma inside a form."""
    stop = tuple(token for token in stop_token_ids if not tokenizer.is_ordinary(token))
    if not stop:
        found = f"; its stop tokens {list(stop_token_ids)} are ordinary text" if stop_token_ids else ""
        raise RequestError(
            f"this model has no end-of-text token, which a form needs{found}; leave schema, regex, grammar out"
        )
    return stop


def form_of(options: Options, tokenizer: Tokenizer, stop: tuple[int, ...], size: int, patience: Patience) -> Grammar:
    """The form of a constrained answer over ``size`` ids, ended by ``stop``. Raises RequestError, and Interrupted."""
    calls = bool(options.tools) and options.grammar is None
    try:
        if calls:
            source = Source("calls", _calls(options, options.tools or (), tokenizer), options.whitespace, size)
        elif options.regex is not None:
            source = Source("regex", options.regex, False, size)
        elif options.grammar is not None:
            source = Source("grammar", options.grammar, options.whitespace, size)
        else:
            source = Source("schema", schema_json(options.schema), options.whitespace, size)
        return compile_form(source, tokenizer, stop, patience, options.caller)
    except RequestError as error:
        if not calls or options.forced_tools:
            raise
        what = "regex" if options.regex is not None else "schema" if options.schema is not None else "strict"
        remedy = "leave strict out" if what == "strict" else f"leave tools or {what} out, or give tool_choice none"
        raise RequestError(f"{what} and tools are given: {error}; {remedy}") from None


def _calls(options: Options, tools: Sequence[Tool], tokenizer: Tokenizer) -> str:
    """The form of an answer that is a call, or may be one or hold some."""
    try:
        dialect = dialect_of(tokenizer)
    except RequestError as error:
        if options.forced_tools:
            raise
        raise RequestError(str(error).rpartition(";")[0]) from None  # its remedy is that of a forced call
    if forced := options.forced_tools:
        calls = Calls.of("forced", forced, dialect)
    elif options.regex is not None:
        calls = Calls.of("beside", tools, dialect, AnswerForm("regex", options.regex))
    elif options.schema is not None:
        calls = Calls.of("beside", tools, dialect, AnswerForm("schema", schema_json(options.schema)))
    else:
        calls = Calls.of("strict", tools, dialect)
    return calls.to_json()


def constraint_of(
    form: Grammar, options: Options, prompt: Sequence[int], tokenizer: Tokenizer, patience: Patience
) -> Constraint:
    """The form at the beginning of an answer: after the thinking, or inside each call of a free one."""
    markers, thinking = Markers.of(tokenizer), thinking_is_open(prompt, tokenizer)
    begin, end = markers.think, markers.end_think
    if options.strict_calls:
        assert markers.tool_call is not None
        assert markers.end_tool_call is not None
        return InCalls(
            partial(form.constraint, patience),
            markers.tool_call,
            markers.end_tool_call,
            None if begin is None or end is None else (begin, end),
            thinking=thinking,
        )
    inner = form.constraint(patience)
    if not thinking:
        return inner
    return AfterThinking(
        inner,
        () if end is None else (end,),
        form.vocab_size,
        then=tokenizer.encode(_BEFORE_ANSWER),
        stop_token_ids=form.stop_token_ids,
    )
