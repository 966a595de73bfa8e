"""The text of an answer as its tokens come: taken apart, and cut before a stop text.

Two walkers over the same tokens. :class:`StopFinder` is asked before tokens are committed, so that the last one is the
one that completes a stop text; :class:`AnswerReader` gives the text to the caller and holds back what may become a stop
text. Stop texts are looked for in the answer, not in thinking or tool calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge_dflash.decode.loop import Step
from edge_dflash.result import Increment
from edge_dflash.text.chat import Answer, AnswerStream, Detokenizer, Markers, thinking_is_open
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.text.tool_calls import Tool


class StopFinder:
    """Finds the token that completes a stop text. Called with all tokens of an answer, in order."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        markers = Markers.of(tokenizer)
        self._opens = {markers.think: markers.end_think, markers.tool_call: markers.end_tool_call}
        self._tokenizer = tokenizer
        self._stops = stops
        self._reach = max(map(len, stops)) - 1  # characters that may belong to a stop text's beginning
        self._until = markers.end_think if thinking_is_open(prompt, tokenizer) else None  # inside a span: its end
        self._begin(trim=False)

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """How many of the tokens belong to the answer when it ends with them; None when it goes on."""
        return next((index for index, token in enumerate(tokens, 1) if self._completes(token)), None)

    def _begin(self, *, trim: bool) -> None:
        self._detokenizer, self._tail, self._trim = Detokenizer(self._tokenizer.decode), "", trim

    def _completes(self, token: int) -> bool:
        if self._until is not None:
            if token == self._until:
                self._until = None
                self._begin(trim=True)  # newlines after a span belong to the template
            return False
        if (until := self._opens.get(token)) is not None:
            self._until = until
            return False
        text = self._detokenizer.add([token])
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        seen = self._tail + text
        self._tail = seen[-self._reach :] if self._reach else ""
        return any(stop in seen for stop in self._stops)


class AnswerReader:
    """Increments of the steps of an answer, in order, and the answer that they make; without a tokenizer tokens only.

    Text is made where it is read, and at the end for the plan: a cycle does not wait for it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        stop_token_ids: Sequence[int],
        tools: Sequence[Tool] | None,
        stops: Sequence[str],
    ) -> None:
        self.answer = Answer()
        self._stream = None
        if tokenizer is not None:
            self._stream = AnswerStream(tokenizer, prompt, stop_token_ids=stop_token_ids, tools=tools)
        self._stops = stops
        self._held = ""  # the beginning of a stop text, perhaps
        self._cut = False

    @property
    def thinking(self) -> bool:
        """Whether the answer stands inside a thinking span."""
        return self._stream is not None and self._stream.thinking

    def __call__(self, step: Step) -> Increment:
        """The increment of the next step."""
        if self._stream is None:
            return Increment(None, step.tokens, logprobs=step.logprobs, prompt_logprobs=step.prompt)
        piece = self._before_stop(self._stream.add(step.tokens), last=False)
        if step.finish_reason is not None:
            piece += self._before_stop(self._stream.finish(), last=True)
        self.answer += piece
        return Increment(piece.content, step.tokens, piece.thinking, piece.tool_calls, step.logprobs, step.prompt)

    def _before_stop(self, piece: Answer, *, last: bool) -> Answer:
        if self._cut or not self._stops:
            return replace(piece, content="") if self._cut else piece
        text = self._held + piece.content
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self._cut = bool(found)
        held = 0 if last or found else max(_overlap(text, stop) for stop in self._stops)
        certain = min(found) if found else len(text) - held
        self._held = "" if found else text[certain:]
        return replace(piece, content=text[:certain])


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that ``stop`` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
