"""Text to token ids and back: the tokenizer, the chat template, and text that streams without broken characters.

Read from the files of a Hugging Face checkpoint (:mod:`edge_dflash.text.files`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from edge_dflash.common.files import is_there
from edge_dflash.errors import BundleError, RequestError, refused
from edge_dflash.text.files import DEFAULT, TOOL_USE, read, read_object, read_templates, special_tokens
from edge_dflash.text.template import BoundError, ChatTemplate, Message

MAX_TOKENIZER = 128 << 20  # bytes of tokenizer.json; the largest published ones have about 35 MB

REPLACEMENT = "\ufffd"  # what a decoder gives for bytes that are not (yet) a character
_HARMLESS = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tidy up."},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks."},
)
_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_BATCH = 64  # texts a call: other threads wait while it takes texts and gives results
_TOOL = {"type": "function", "function": {"name": "x", "description": "x", "parameters": {"type": "object"}}}


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: itself, or those from U+0100 on, in order."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + at): byte for at, byte in enumerate(hidden)}


_BYTE_OF = _byte_characters()


class Tokenizer:
    """A tokenizer and, when the model has one, its chat template.

    What the spelling of a control token (``<|im_end|>``, ``<think>``) in a text means is the caller's choice:
    :meth:`encode` reads it, :meth:`encode_text` does not, and in :meth:`encode_chat` only the template can write one.
    """

    def __init__(
        self,
        tokenizer: HfTokenizer,
        template: ChatTemplate | None,
        eos: int | None,
        tool_template: ChatTemplate | None = None,
    ) -> None:
        """``tool_template``: of requests with tools; None: they have the same as others."""
        self._tokenizer = tokenizer
        self.template = template
        self.tool_template = tool_template or template
        self.flaw: str | None = None  # why the template writes no conversation at all
        self.eos_token_id = eos
        self._bytes: dict[int, bytes | None] = {}  # of tokens that were asked for
        with _panics(BundleError, "the tokenizer cannot be used"):
            self._controls = _ControlTokens(tokenizer)

    @classmethod
    def open(cls, directory: Path) -> Tokenizer:
        """Read the tokenizer files of ``directory``, and render a conversation with the templates that there are.

        Raises BundleError when a file is missing or malformed, and for a template that takes too much time or memory,
        or builds its control tokens from parts: they would be text.
        """
        with _panics(BundleError, f"{directory / 'tokenizer.json'} cannot be used"):
            tokenizer: HfTokenizer = read(directory / "tokenizer.json", HfTokenizer.from_str, MAX_TOKENIZER)
            tokenizer.no_truncation()  # of a training run, perhaps: a prompt is whole
            tokenizer.no_padding()
        path = directory / "tokenizer_config.json"
        config = read_object(path) if is_there(path) else {}
        special = special_tokens(directory, config)
        eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
        sources = read_templates(directory, config)
        made = {
            name: ChatTemplate(sources[name], special, str(directory))
            for name in (DEFAULT, TOOL_USE)
            if name in sources
        }
        opened = cls(tokenizer, made.get(DEFAULT), eos, made.get(TOOL_USE))
        opened._try_templates(str(directory))
        return opened

    @property
    def size(self) -> int:
        """Number of ids, added tokens included; a model's vocabulary may be padded beyond it."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def token(self, token_id: int) -> str | None:
        """The token with this id; None for an id outside the vocabulary."""
        found = self._tokenizer.id_to_token(token_id)
        return None if found is None else str(found)

    def is_ordinary(self, token_id: int) -> bool:
        """Whether texts are written with this token: it is in the vocabulary, not added to it, and spells something."""
        if not 0 <= token_id < self.size or token_id in self._tokenizer.get_added_tokens_decoder():
            return False
        return bool(self.decode([token_id]))

    def control_id(self, token: str) -> int | None:
        """The id of a control token, which no text becomes; None for other words."""
        return self._controls.ids.get(token)

    def to_json(self) -> str:
        """Return the text of tokenizer.json."""
        return str(self._tokenizer.to_str())

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of ``text`` as it is: nothing is added. Control tokens written in it become their ids."""
        return tuple(_encode_all(self._tokenizer, [text])[0])

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of ``text`` as text: control tokens written in it are spelled out."""
        return self.encode_pieces([text])

    def encode_pieces(self, pieces: Sequence[str]) -> tuple[int, ...]:
        """Ids of text, control token, text, ..., text, as :meth:`render_pieces` gives them.

        Raises RequestError for a text that cannot be told from a control token.
        """
        return self._controls.encode(pieces)

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> tuple[int, ...]:
        """Ids of :meth:`render_pieces`."""
        return self.encode_pieces(self.render_pieces(messages, **variables))

    def render_pieces(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **variables: object
    ) -> list[str]:
        """A conversation up to where the answer begins: text, control token of the template, text, ..., text.

        The template is given ``tools`` and ``variables`` (``enable_thinking``). Raises RequestError without a chat
        template, for a tool without a name, and as :meth:`ChatTemplate.pieces` does.
        """
        template = self.tool_template if tools else self.template
        if template is None:
            raise RequestError("this model has no chat template; give plain text or token ids instead of messages")
        if tools:
            variables |= {"tools": _named(tools)}
            if "tools" not in template.names:
                raise RequestError("the chat template of this model takes no tools; describe them in a message instead")
        return template.pieces(tuple(self._controls.ids), messages, **variables)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, without special tokens."""
        with _panics(RequestError, "the tokenizer cannot write this answer"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one token, which may be a part of a character; a special token's spelling, None without a token."""
        if token_id not in self._bytes:
            spelled, text = self.token(token_id), self.decode([token_id])
            made = None if spelled is None else spelled.encode()
            if spelled is not None and text and REPLACEMENT not in text:
                made = text.encode()
            elif spelled is not None and all(char in _BYTE_OF for char in spelled):
                made = bytes(_BYTE_OF[char] for char in spelled)
            self._bytes[token_id] = made
        return self._bytes[token_id]

    def _try_templates(self, where: str) -> None:
        """Raise BundleError for a template that harmless messages show to be unfit."""
        if self.template is not None:
            self.flaw = self._try(where)
        if self.tool_template is not self.template:
            self._try(where, tools=[_TOOL])

    def _try(self, where: str, **variables: Any) -> str | None:
        """Why the template refuses all of the harmless conversations; None when it takes one."""
        why = None
        for messages in (_HARMLESS, _HARMLESS[1:2]):
            try:
                pieces = self.render_pieces(messages, **variables)
            except BoundError as error:
                raise BundleError(f"{where}: {error}") from None
            except RequestError as error:  # without system messages, for example
                why = str(error)
                continue
            try:
                whole = self.encode("".join(pieces)) == self.encode_pieces(pieces)
            except RequestError as error:  # not of these messages: no chat could be encoded
                raise BundleError(f"{where}: {error}") from None
            if not whole:
                raise BundleError(
                    f"{where}: the chat template builds control tokens from parts, so that they cannot be told from "
                    "text; write them whole in chat_template.jinja"
                )
            return None
        return why


class _ControlTokens:
    """The control tokens of ``tokenizer``, by their spelling, and text encoded without them.

    They are the added tokens of ``tokenizer.json`` (``<|im_end|>``, ``<think>``), but for those that are words: not
    special, and made of letters, digits and blanks.
    """

    def __init__(self, tokenizer: HfTokenizer) -> None:
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        words = {at: one for at, one in added.items() if not one.special and not re.search(r"[^\w\s]", one.content)}
        self._tokens = {token.content: (number, token) for number, token in added.items() if number not in words}
        self._words, self._moved = _without_controls(tokenizer, words)
        unknown = getattr(tokenizer.model, "unk_token", None)
        self._forbidden = frozenset(  # a single character (padding may be "!") has its id in texts, too
            number for name, (number, _) in self._tokens.items() if name != unknown and len(name) > 1
        )
        self.ids = {name: number for name, (number, _) in self._tokens.items()}

    def encode(self, pieces: Sequence[str]) -> tuple[int, ...]:
        """Ids of text, control token, text, ..., text; each text as if there were no control tokens.

        Raises RequestError for a text that becomes one all the same: the tokenizer's model may hold it as a word.
        """
        texts, controls = list(pieces[::2]), [self._tokens[name] for name in pieces[1::2]]
        for index, (_, token) in enumerate(controls):  # as the tokenizer does: blanks beside it belong to the token
            if token.lstrip:
                texts[index] = texts[index].rstrip(_BLANKS)
            if token.rstrip:
                texts[index + 1] = texts[index + 1].lstrip(_BLANKS)
        ids = list[int]()
        for index, words in enumerate(_encode_all(self._words, texts)):
            found = [self._moved.get(word, word) for word in words] if self._moved else words
            if not self._forbidden.isdisjoint(found):
                raise RequestError("a text spells a control token that this tokenizer cannot tell from text; remove it")
            ids += found
            if index < len(controls):
                ids.append(controls[index][0])
        return tuple(ids)


def _encode_all(tokenizer: HfTokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text as ``tokenizer`` makes them; nothing is added. Raises RequestError for a lone surrogate."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise RequestError("the text holds a lone surrogate, which is no character; remove it") from None
    each = list(dict.fromkeys(texts))  # what a template writes between messages comes often
    ids = dict[str, list[int]]()
    for at in range(0, len(each), _BATCH):
        some = each[at : at + _BATCH]
        # the batch call lets other threads run meanwhile, which encode does not: a second for each MB
        try:
            found = tokenizer.encode_batch_fast(some, add_special_tokens=False)
        except BaseException:
            with _panics(RequestError, "the tokenizer cannot read this text"):
                raise
        ids.update(zip(some, (text.ids for text in found), strict=True))
    return [ids[text] for text in texts]


def _without_controls(tokenizer: HfTokenizer, words: Mapping[int, AddedToken]) -> tuple[HfTokenizer, dict[int, int]]:
    """The tokenizer with ``words`` as its only added tokens, and their ids by those that they have there.

    It shares the model, so it costs no memory.
    """
    plain = HfTokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    plain.add_tokens(list(words.values()))
    moved = ((plain.token_to_id(token.content), number) for number, token in words.items())
    return plain, {there: here for there, here in moved if there is not None}


def _named(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as templates take them. Raises RequestError for one without a name."""
    for index, tool in enumerate(tools):
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise RequestError(
                f'tool {index} has no name; give {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}'
            )
    return [dict(tool) for tool in tools]


def _panics(kind: Callable[[str], BundleError | RequestError], what: str) -> AbstractContextManager[None]:
    """Errors of the library: a regular expression that backtracks for too long, a model without a token for a text."""
    return refused(kind, what, "use the tokenizer.json of this model")
