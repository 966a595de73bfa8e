"""Conversations that go on over many requests, on one backend: reuse, forks, states to save.

A session's request names the whole sequence that is to be answered; what of it needs no computing is found here. A
request that fails or is cancelled leaves its session at the last step that was delivered. Knows tokens and the loop,
nothing of text, files or threads: a manager, its sessions and their streams belong to the thread that owns the
backend. How states move is :mod:`edge_dflash.decode.slot`, with the invariants.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from edge_dflash.bundle.manifest import Manifest, dump_manifest
from edge_dflash.decode.backend import Backend, Snapshot
from edge_dflash.decode.controls import NO_CONTROLS, Controls
from edge_dflash.decode.loop import DecodeOptions, Step, admit, decode
from edge_dflash.decode.slot import Conversation, Reuse, SessionSlot, frozen
from edge_dflash.decode.store import PrefixStore
from edge_dflash.errors import BundleError, ContextError, RequestError

__all__ = ["Reuse", "Session", "SessionManager", "SessionState", "SessionStream", "fingerprint"]
T = TypeVar("T")


def to_end(steps: Generator[None, None, T]) -> T:
    """What a generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value


def fingerprint(manifest: Manifest) -> str:
    """What binds states to a bundle: the checksum of its manifest, which covers the hashes of all its files."""
    return str(json.loads(dump_manifest(manifest))["checksum"])


@dataclass(frozen=True)
class SessionState:
    """All of a session, outside of any backend."""

    tokens: tuple[int, ...]  # prompts and answers in order; the last has no K/V yet
    snapshot: Snapshot | None  # state after tokens[:-1]; None: computed when it is needed
    fingerprint: str  # of the bundle that the state belongs to
    note: str = ""  # what the session's owner wants to keep with it

    def __post_init__(self) -> None:
        """Raise RequestError when tokens and snapshot do not belong together."""
        if self.snapshot is not None and not 0 <= self.snapshot.length == len(self.tokens) - 1:
            raise RequestError(
                f"the session's snapshot holds {self.snapshot.length} tokens, wanted {len(self.tokens) - 1} "
                "(all of the session's but the last); start a new session"
            )


class Session:
    """One conversation. Made by a :class:`SessionManager`; closing it gives its memory back."""

    def __init__(self, slot: SessionSlot, conversation: Conversation, bundle: str) -> None:
        self._slot = slot
        self._conversation = conversation
        self._bundle = bundle  # its fingerprint
        self._turn = 0  # number of the newest stream; older ones have ended

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompts and answers in order, up to the last step that was delivered."""
        return tuple(self._conversation.tokens)

    def stream(
        self,
        prompt: Sequence[int],
        options: DecodeOptions,
        *,
        speculative: bool = True,
        controls: Controls = NO_CONTROLS,
        keep: Sequence[int] = (),
    ) -> SessionStream:
        """Answer ``prompt``: the whole sequence, that is the conversation so far, as it is to be seen, and what is new.

        State is reused as far as the prompt begins with this session's tokens or with a stored prefix. ``keep`` names
        lengths of the prompt whose state goes to the prefix store on the way: the end of the system prompt, and the
        end of the last message before the tokens that open the answer (chat templates write earlier answers in
        another form than they were generated in, so the next prompt parts from this one there). A stream of this
        session that is still open ends. Raises RequestError and ContextError before anything is changed; nothing is
        computed before the first step is asked for.
        """
        self._check_open()
        prompt, slot = tuple(prompt), self._slot
        admitted = admit(slot.backend.shape, 0, prompt, options)
        _ = options.sampling  # refuse bad values now
        if odd := [at for at in keep if not 0 < at < len(prompt)]:
            raise RequestError(f"keep names length {odd[0]} of a prompt of {len(prompt)}; give 1 to {len(prompt) - 1}")
        cuts = tuple(sorted(keep)) if slot.store.budget else ()

        def begin(held: int, hold: Callable[[], None]) -> Iterator[Step]:
            held_controls = replace(controls, hold=hold, cuts=cuts)
            missing = prompt[held:]
            return decode(slot.backend, missing, options, admitted, speculative=speculative, controls=held_controls)

        self._turn += 1
        return SessionStream(self, prompt, cuts, begin)

    def fork(self) -> Session:
        """Another session that goes on from here; the two share their state until one of them moves on."""
        return to_end(self.fork_steps())

    def fork_steps(self) -> Generator[None, None, Session]:
        """:meth:`fork`, yielding between two chunks of what has to be computed; nothing may come in between."""
        snapshot = (yield from self.state_steps()).snapshot
        return Session(self._slot, self._slot.add(self._conversation.tokens, snapshot), self._bundle)

    def state(self) -> SessionState:
        """All of the session, to be saved. Its state is computed if it was lost."""
        return to_end(self.state_steps())

    def state_steps(self) -> Generator[None, None, SessionState]:
        """:meth:`state`, as :meth:`fork_steps`."""
        self._check_open()
        snapshot = yield from self._slot.snapshot_steps(self._conversation)
        return SessionState(self.tokens, snapshot, self._bundle)

    def close(self) -> None:
        """Forget the session; its streams end. Closing twice does no harm."""
        self._turn += 1
        self._conversation.closed = True
        self._conversation.snapshot = None

    def _check_open(self) -> None:
        if self._conversation.closed:
            raise RequestError("the session is closed; open a new one")


class SessionStream(Iterator[Step]):
    """Steps of one request. It may be left at any step, and other sessions may run between two.

    The loop works on the backend itself. Before a pass it has the state brought in, if it is not there any more.
    """

    def __init__(
        self,
        session: Session,
        prompt: tuple[int, ...],
        cuts: tuple[int, ...],
        begin: Callable[[int, Callable[[], None]], Iterator[Step]],
    ) -> None:
        """``begin`` makes the steps, told how much of the prompt is held and what to call before a pass."""
        self._session = session
        self._slot, self._conversation = session._slot, session._conversation
        self._prompt: tuple[int, ...] | None = prompt  # until the first tokens are delivered
        self._rows: int | None = None  # of the prompt that were computed; None before its first chunk
        self._cuts = cuts
        self._begin = begin
        self._steps: Iterator[Step] | None = None
        self._turn = session._turn
        self._chosen: tuple[Reuse, Snapshot | None] = (Reuse(0, len(prompt), "nothing"), None)

    @property
    def reuse(self) -> Reuse:
        """What the prompt found; "nothing" before the first step."""
        return self._chosen[0]

    def __next__(self) -> Step:
        if self._turn != self._session._turn:
            raise StopIteration
        try:
            if self._steps is None:
                assert self._prompt is not None
                self._chosen = self._slot.choose(self._conversation, self._prompt)
                self._steps = self._begin(self.reuse.tokens, self._hold)
            step = next(self._steps)
            self._take(step)
        except StopIteration:
            raise
        except BaseException as error:
            self._slot.failed(self._conversation, error)
            self.close()
            raise
        return step

    def close(self) -> None:
        """Stop here; the session stays at the last step. Closing twice does no harm."""
        self._steps = iter(())

    def _hold(self) -> None:
        """Make the backend hold the state that the next pass goes on from."""
        slot, conversation = self._slot, self._conversation
        if self._prompt is not None and self._rows is None:
            slot.load(conversation, *self._chosen)
            self._chosen = (self.reuse, None)  # the snapshot may go now
            return
        if self._prompt is not None and conversation.prompt is not self._prompt:  # the tokens' own state was asked for
            assert self._rows is not None
            slot.release(conversation)
            conversation.compute(self._prompt, self._rows)
        slot.bring(conversation)

    def _take(self, step: Step) -> None:
        """Note what a step changed."""
        slot, conversation = self._slot, self._conversation
        if step.tokens:
            conversation.advance(self._prompt, step.tokens)
            self._prompt = None
        elif step.chunk and self._prompt is not None:
            self._rows = slot.backend.length()
            conversation.compute(self._prompt, self._rows)
        else:
            return
        slot.occupy(conversation)
        if step.chunk and self._rows in self._cuts and self._prompt is not None:
            slot.keep(self._prompt[: self._rows])


class SessionManager:
    """The sessions of one backend, which must not be used beside it without :meth:`vacate`."""

    def __init__(
        self, backend: Backend, bundle: str, *, store: PrefixStore | None = None, parked_budget: int | None = None
    ) -> None:
        """Serve sessions on ``backend``, loaded from the bundle with the fingerprint ``bundle``.

        ``store`` keeps shared prefixes (None: none are kept). ``parked_budget`` bounds the bytes of the snapshots of
        sessions outside the backend (None: no bound); beyond it, the state of those used longest ago is dropped and
        computed again when it is needed.
        """
        self._store = store if store is not None else PrefixStore(0)
        self._slot = SessionSlot(backend, self._store, parked_budget)
        self._bundle = bundle

    @property
    def fingerprint(self) -> str:
        """Of the bundle whose states these are."""
        return self._bundle

    @property
    def store(self) -> PrefixStore:
        """The shared prefixes."""
        return self._store

    @property
    def parked_bytes(self) -> int:
        """Bytes of all sessions' snapshots; one that several share counts once."""
        return self._slot.parked_bytes

    @property
    def swaps(self) -> int:
        """How often a snapshot was brought back into the backend."""
        return self._slot.swaps

    def open(self) -> Session:
        """A session without tokens."""
        return Session(self._slot, self._slot.add((), None), self._bundle)

    def adopt(self, state: SessionState) -> Session:
        """A session that goes on from ``state``.

        Raises BundleError when it belongs to another bundle, RequestError for an id outside the vocabulary,
        ContextError when it is longer than the context. The arrays of its snapshot become read-only.
        """
        if state.fingerprint != self._bundle:
            raise BundleError(
                f"the session's fingerprint is {state.fingerprint}, this bundle's is {self._bundle}; "
                "open the bundle that the session was made with, or start a new session"
            )
        shape = self._slot.backend.shape
        for token in state.tokens:
            if not 0 <= token < shape.vocab_size:
                raise RequestError(f"the session has token id {token}, outside the vocabulary of {shape.vocab_size}")
        if len(state.tokens) > shape.max_context:
            raise ContextError(
                f"the session has {len(state.tokens)} tokens, the context holds {shape.max_context}; "
                "build the bundle with a longer context"
            )
        snapshot = frozen(state.snapshot) if state.snapshot is not None else None
        return Session(self._slot, self._slot.add(state.tokens, snapshot), self._bundle)

    def warm(self, tokens: Sequence[int]) -> bool:
        """Compute the state of a prefix and store it before anybody asks. False: the store's budget is too small.

        Raises RequestError and ContextError for tokens that could not begin a prompt.
        """
        tokens, slot = tuple(tokens), self._slot
        admit(slot.backend.shape, 0, tokens, DecodeOptions())
        if tokens in self._store:
            return True
        conversation = slot.add((), None)
        slot.load(conversation, *slot.choose(conversation, tokens))
        slot.backend.prefill(tokens[slot.backend.length() :])
        return slot.keep(tokens)

    def vacate(self) -> None:
        """Park the session that is in the backend, so that the backend may be used otherwise for a while."""
        self._slot.vacate()
