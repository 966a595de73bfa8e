"""Constraints from a JSON Schema, a regular expression or a Lark grammar.

A grammar is compiled once and walked by many requests; CACHED of them are kept, and a few compile at a time. The
library runs in other processes (:mod:`edge_dflash.decode.grammar.worker`): what a grammar can make it do is bounded in
time and memory there, and can be ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from edge_dflash.decode.controls import ENDLESS, Interrupted, Patience
from edge_dflash.decode.grammar.process import SLICE, Channel, Child, Died, OverBounds, Zygote
from edge_dflash.decode.grammar.walker import Source
from edge_dflash.decode.grammar.worker import Bounds
from edge_dflash.decode.sampling import Packed
from edge_dflash.decode.steering import Ask
from edge_dflash.errors import RequestError
from edge_dflash.text.tokenizer import Tokenizer

CACHED = 32  # compiled grammars kept for each tokenizer
CACHED_BYTES = 512 << 20  # of memory that they take together, beyond the vocabulary
MAX_REGEX_BYTES = 16 * 1024
BOUNDS = Bounds()
REFUSED_SECONDS = 60.0  # a grammar that went over its bounds is not tried again; later the board may be less busy
TRIES = 3  # to compile or to open, when a process ends meanwhile
_CLOSED = "the planner of this grammar is closed; open it again"


def compile_form(
    source: Source, tokenizer: Tokenizer, stop_token_ids: Sequence[int], patience: Patience = ENDLESS, caller: str = ""
) -> Grammar:
    """Compile a form that an answer must have; ``stop_token_ids`` end the answer.

    ``caller`` has a share of the processes that compile at the same time. Raises RequestError, naming the reason, for
    a form that is invalid, too big, has a part that would not be enforced, that nothing can satisfy, or that takes more
    time or memory than BOUNDS; Interrupted when ``patience`` is over before. A Lark grammar whose choices never lead to
    an end is not always found out here.
    """
    size = len(source.text.encode(errors="replace")) if source.kind == "regex" else 0
    if size > MAX_REGEX_BYTES:
        raise RequestError(f"the regex has {size} bytes, at most {MAX_REGEX_BYTES} are taken; make it smaller")
    for token in stop_token_ids:
        if not 0 <= token < source.vocab_size:
            raise RequestError(f"stop token id {token} is outside the vocabulary of {source.vocab_size}")
    grammars = _grammars(tokenizer, stop_token_ids)
    grammars.child(source, patience, caller)
    return Grammar(grammars, source)


class Grammar:
    """A grammar that was compiled. :meth:`constraint` gives each request its own state; for any thread."""

    def __init__(self, grammars: Grammars, source: Source) -> None:
        """``source`` was compiled by ``grammars``, and is again where its process ended."""
        self._grammars = grammars
        self._source = source
        self.vocab_size = source.vocab_size
        self.stop_token_ids = grammars.stop_token_ids

    def constraint(self, patience: Patience = ENDLESS) -> GrammarConstraint:
        """A fresh constraint, at the grammar's start, for a request of this patience."""
        return GrammarConstraint(self._grammars, self._source, patience)


class GrammarConstraint:
    """A :class:`~edge_dflash.decode.steering.Constraint` at the start of a grammar.

    Stop tokens are allowed where the text so far is whole, and nothing but them after one. Special tokens are never
    allowed, unless a Lark grammar names them. When the process dies below it, by its bounds or by accident, another one
    is brought to where it stood, and no drafts are tried any more: masks come as in plain decoding. The second death is
    a RequestError.
    """

    def __init__(self, grammars: Grammars, source: Source, patience: Patience) -> None:
        """``source`` is compiled again where its process has ended."""
        self._grammars, self._source, self._patience = grammars, source, patience
        self._advanced: list[int] = []
        self._died = False
        self._channel: Channel | None = None
        with contextlib.suppress(RequestError, Interrupted):  # they come again with the first mask
            self._open()

    def amend(self, free: Sequence[int], ask: Ask) -> list[int]:
        """See Constraint."""
        if free and not self._died:
            with self._asked() as channel:
                return channel.amend(free, ask, self._patience)
        return []

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """See Constraint."""
        while True:
            with self._asked() as channel:
                return [*channel.masks(() if self._died else drafts, self._patience)]

    def advance(self, tokens: Sequence[int]) -> None:
        """See Constraint."""
        self._advanced += tokens
        if self._channel is not None:
            try:
                self._channel.advance(tokens)
            except Died:
                self._channel = None  # as if it had died before

    @contextmanager
    def _asked(self) -> Iterator[Channel]:
        """A channel after all tokens so far, for one thing that is asked of it; its first death is passed over."""
        channel = self._open()
        try:
            yield channel
        except Died as death:
            self._channel = None
            if self._died:
                child, doing = channel.child, f"for the next token after {len(self._advanced)}"
                why = child.why(death.signal or 0, "the grammar", child.bounds.step_seconds, doing)
                raise RequestError(why) from None
            self._died = True
        except BaseException:
            self._channel = None  # it waits for what was asked
            raise

    def _open(self) -> Channel:
        for _ in range(TRIES):
            if self._channel is not None:
                return self._channel
            child = self._grammars.child(self._source, self._patience)
            try:
                channel = Channel(child, (self._source.vocab_size + 31) // 32)
                channel.advance(self._advanced)
                self._channel = channel
            except Died:  # before anything was asked of it
                child.cause()
        raise RequestError("the grammar's processes end as soon as they begin; look for who ends them")


class FairSemaphore:
    """Who may do something now: ``places`` in all, ``share`` of them for each caller."""

    def __init__(self, places: int, share: int) -> None:
        self._places, self._share = places, share
        self._taken: Counter[str] = Counter()
        self._changed = threading.Condition()

    @contextmanager
    def place(self, caller: str, patience: Patience) -> Iterator[None]:
        """Hold a place, once there is one. Raises Interrupted when ``patience`` is over before."""
        with self._changed:
            while self._taken.total() >= self._places or self._taken[caller] >= self._share:
                patience.check()
                self._changed.wait(SLICE)
            self._taken[caller] += 1
        try:
            yield
        finally:
            with self._changed:
                self._taken[caller] -= 1
                self._changed.notify_all()


_COMPILING = FairSemaphore(4, 2)  # a board has 6 to 14 cores, and what compiles gives way to all else


class Grammars:
    """The grammars of one vocabulary: compiled once, kept within bounds. For any thread."""

    def __init__(self, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...], bounds: Bounds = BOUNDS) -> None:
        """``bounds`` of each grammar."""
        self.stop_token_ids = stop_token_ids
        self._tokenizer = weakref.ref(tokenizer)
        self._bounds = bounds
        self._lock = threading.Lock()
        self._starting = threading.RLock()  # a collection of garbage inside may call close
        self._zygote: Zygote | None = None
        self._closed = False
        self._known: OrderedDict[Source, Future[Child | None]] = OrderedDict()  # the last used one at the end

    def child(self, source: Source, patience: Patience, caller: str = "") -> Child:
        """The process of a grammar, one for all who ask. Raises RequestError, Interrupted."""
        while True:
            with self._lock:
                found = self._known.get(source)
                if found is None or (found.done() and not _holds(found)):
                    mine = self._known[source] = Future()
                    break
                self._known.move_to_end(source)
            while not wait((found,), SLICE).done:
                patience.check()
            if error := found.exception():
                raise RequestError(str(error))
            if child := found.result():
                return child
        try:
            child = self._compiled(source, patience, caller)
            mine.set_result(child)
            return child
        except RequestError as error:  # another one is kept: a traceback holds all that its request has
            mine.set_exception((OverBounds if isinstance(error, OverBounds) else RequestError)(str(error)))
            raise
        finally:
            if not mine.done():  # it was given up: who waits compiles it
                mine.set_result(None)
            self._trim(mine)

    def start(self) -> Zygote:
        """The vocabulary's process, which begins if it does not run."""
        with self._starting:
            if self._zygote is None or not self._zygote.alive:
                tokenizer = self._tokenizer()
                if self._closed or tokenizer is None or (self._zygote is not None and not self._zygote.close.alive):
                    raise RequestError(_CLOSED)
                self._zygote = Zygote(tokenizer, self.stop_token_ids)
                if self._closed:  # meanwhile
                    self._zygote.close()
            return self._zygote

    def close(self) -> None:
        """End all processes, for good."""
        with self._starting:
            self._closed = True
            if self._zygote is not None:
                self._zygote.close()

    def _compiled(self, source: Source, patience: Patience, caller: str) -> Child:
        with _COMPILING.place(caller, patience):
            for _ in range(TRIES):
                with contextlib.suppress(Died):  # with its zygote
                    return Child(self.start(), source, self._bounds, patience)
        raise RequestError(f"the process that compiles the {source.kind} ended {TRIES} times; look for who ends it")

    def _trim(self, new: Future[Child | None]) -> None:
        """Forget what holds no more, and what was used longest ago and nobody uses, until the others are few enough."""
        with self._lock:
            for source, found in tuple(self._known.items()):
                if found.done() and not _holds(found):
                    del self._known[source]
            done = {source: found for source, found in self._known.items() if found.done()}
            children = {source: found.result() for source, found in done.items() if not found.exception()}
            used = sum(child.private_bytes for child in children.values() if child)
            for source, found in done.items():
                if len(self._known) <= CACHED and used <= CACHED_BYTES:
                    return
                child = children.get(source)
                if found is new or (child and child.channels):
                    continue
                del self._known[source]
                if child:
                    used -= child.private_bytes
                    child.end()


def _holds(found: Future[Child | None]) -> bool:
    """Whether what came of a grammar is still so."""
    if error := found.exception():
        return isinstance(error, OverBounds) and time.monotonic() < error.since + REFUSED_SECONDS
    return (child := found.result()) is not None and child.alive


# The processes of tokenizers ------------------------------------------------------------------------------------------

_known: WeakKeyDictionary[Tokenizer, dict[tuple[int, ...], Grammars]] = WeakKeyDictionary()
_owners: WeakKeyDictionary[Tokenizer, int] = WeakKeyDictionary()
_lock = threading.RLock()  # a collection of garbage inside may call _release


def _grammars(tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> Grammars:
    stop = tuple(sorted(set(stop_token_ids)))
    with _lock:
        if _owners.get(tokenizer) == 0:  # no one would end them
            raise RequestError(_CLOSED)
        return _known.setdefault(tokenizer, {}).setdefault(stop, Grammars(tokenizer, stop))


def warm_up(tokenizer: Tokenizer, stop_token_ids: Sequence[int]) -> None:
    """Begin to build the vocabulary, in its process; what is wrong with it is said to the first that needs it."""
    _grammars(tokenizer, stop_token_ids).start()


def hold(owner: object, tokenizer: Tokenizer) -> Callable[[], object]:
    """The processes of a tokenizer belong to ``owner``, too: they end when it calls what is returned, or is gone.

    With the last owner, that is; without one they end with the tokenizer.
    """
    with _lock:
        _owners[tokenizer] = _owners.get(tokenizer, 0) + 1
    return weakref.finalize(owner, _release, tokenizer)


def _release(tokenizer: Tokenizer) -> None:
    with _lock:
        _owners[tokenizer] -= 1
        known = _known.pop(tokenizer, {}) if not _owners[tokenizer] else {}
    for grammars in known.values():
        grammars.close()
