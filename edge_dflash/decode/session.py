"""Conversations over many requests on one backend, and whose state each of its lanes holds.

A session is its tokens, and the pictures among them. Its state (K/V and gated-delta state of both models) is a function
of them, and is held in a lane, in a snapshot, or nowhere; losing it costs a prefill, never a token. A request that
fails or is cancelled leaves its session at the last step that was delivered. Sessions and their manager belong to the
thread that owns the backend.

Invariants, between any two steps of the loop:
S1 a session's state, if held, has ``rows`` rows: of all tokens but the last, which is the next anchor
   and has no K/V yet; or, between two chunks of a prompt, of that prompt's first. (Right after a prefill the lane has
   all of the prompt's rows, and it is nobody's state until the first token is there.)
S2 tokens change when a step is delivered, and by exactly that step (the first token brings its prompt).
S3 a lane holds the state of at most one session; it is evicted only when the lane is needed.
S4 the arrays of a snapshot are never written: forks, sessions and the prefix store share them.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from typing import TypeVar

from edge_dflash.decode.backend import Backend, Snapshot
from edge_dflash.decode.gaze import Gaze, SeenStore
from edge_dflash.decode.options import Request
from edge_dflash.decode.store import PrefixStore, Reuse
from edge_dflash.errors import BackendError, DeviceLostError, RequestError
from edge_dflash.pictures.pictured import Pictured, Placed


class Session:
    """One conversation. Made by a :class:`SessionManager`; closing it gives its memory back."""

    def __init__(
        self,
        manager: SessionManager,
        tokens: Sequence[int],
        snapshot: Snapshot | None,
        pictures: tuple[Placed, ...] = (),
        *,
        loaded: bool = False,
    ) -> None:
        self.reuse = Reuse(0, "nothing")  # of the newest request
        self.cuts: tuple[int, ...] = ()  # lengths of its prompt at which a chunk has to end
        self.forks: Sequence[Session] = ()  # who answer its prompt in its place, from the last token on
        self.closed = False
        self.loaded = loaded  # its state came from a file, and nobody knows whether it is that of its tokens
        self.resting = True  # no pass of it comes soon: its lane is the first to be given away
        self.manager, self.backend = manager, manager.backend
        self._tokens, self.pictures = list(tokens), pictures  # pictures: needed to compute the state again
        self._request: Request | None = None  # the newest; older ones have ended
        self._initial: tuple[Snapshot | None] | None = None  # what the newest begins with, until its first pass
        self._chunked = 0  # rows of its prompt that were computed, until its first token
        self._prompt: Pictured | None = None  # of which the state holds a part, instead of the tokens
        self.rows = max(len(tokens) - 1, 0)  # of the state
        self.snapshot = snapshot  # the state, where no lane holds it

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompts and answers in order, up to the last step that was delivered."""
        return tuple(self._tokens)

    @property
    def computed(self) -> Pictured:
        """Tokens of which the state holds the first ``rows``."""
        return Pictured(self._tokens, self.pictures) if self._prompt is None else self._prompt

    def close(self) -> None:
        """Forget the session; its request ends. Closing twice does no harm."""
        self.closed, self._request, self.snapshot, self.pictures, self._prompt = True, None, None, (), None

    def fork(self) -> Generator[None, None, Session]:
        """Another session with the same tokens; the two share their state until one of them advances.

        Yields between two chunks of what has to be computed; nothing may come in between.
        """
        snapshot = yield from self.ensure_snapshot()
        return Session(self.manager, self._tokens, snapshot, self.pictures, loaded=self.loaded)

    def ensure_snapshot(self) -> Generator[None, None, Snapshot | None]:
        """A snapshot of its state, None before its first token. What was lost is computed, as in :meth:`fork`."""
        self._check_open()
        if self._prompt is not None:
            self.manager.release(self)
            self._settle()
        if self.snapshot is None and self._tokens:
            lane = yield from self.manager.make_resident(self)
            self.snapshot = self.manager.lanes.snapshot(lane)
        return self.snapshot

    # for the loop -----------------------------------------------------------------------------------------------------

    def begin(self, request: Request, *, again: bool = False) -> int:
        """Answer ``request`` from now on; how many tokens of its prompt need no computing. Touches no lane.

        ``again``: others may have used the lanes since the first time, and no chunk was computed.
        """
        self._check_open()
        scored = request.options.prompt_logprobs  # all of it is computed
        known = request.filled if scored else request.identities
        self.reuse, snapshot = self.manager.find(self, known, counted=not again and not scored)
        self._request, self._initial, self._chunked = request, (snapshot,), 0
        self.cuts = (*self._stored_lengths(request), *((len(request.prompt) - 1,) if self.forks else ()))
        return self.reuse.tokens

    def answers(self, request: Request) -> bool:
        """Whether ``request`` is the newest of an open session."""
        return self._request is request

    def acquire_lane(self) -> int:
        """The lane that holds the state before the next pass; the state is brought there if need be."""
        self.resting = False
        if self._initial is not None:
            (snapshot,), self._initial = self._initial, None
            lane = self.manager.load(self, self.reuse, snapshot)
        else:
            if self._chunked and self._prompt is None:  # the tokens' own state was asked for between two chunks
                self.manager.release(self)
                self.hold_prompt(self._request.pictured if self._request else Pictured(()), self._chunked)
            lane = to_end(self.manager.make_resident(self))
        self.manager.lanes.touch(lane)
        return lane

    def hold_prompt(self, prompt: Pictured, rows: int) -> None:
        """The state is that of the first ``rows`` tokens of a prompt now."""
        self._prompt, self.rows, self.snapshot = prompt, rows, None

    def chunk(self, lane: int, rows: int) -> None:
        """A pass has computed the prompt up to ``rows``, and more of it comes."""
        assert self._request is not None
        prompt, self._chunked, kept = self._request.pictured, rows, self._stored_lengths(self._request)
        self.hold_prompt(prompt, rows)
        self.manager.lanes.assign(self, lane)
        if rows in kept:
            self.manager.store.put(prompt.identities[:rows], self.manager.lanes.snapshot(lane))
        if self.forks and rows == len(prompt.ids) - 1:
            for fork in self.forks:
                fork.hold_prompt(prompt, rows)
            self._request = None  # they have it
            self.manager.lanes.share(lane, self.forks)

    def advance(self, lane: int, tokens: Sequence[int], *, first: bool = False) -> None:
        """Take over what a step delivers; the ``first`` brings its prompt, which replaces what was there."""
        if first:
            assert self._request is not None
            self._tokens, self.pictures, self._chunked = list(self._request.filled), self._request.pictures, 0
        self._tokens.extend(tokens)
        self._settle()
        self.manager.lanes.assign(self, lane)

    def _stored_lengths(self, request: Request) -> tuple[int, ...]:
        """Lengths of the prompt whose state goes to the prefix store: never one made of a file's."""
        foreign = self.loaded and self.reuse.source == "session"
        return request.keep if self.manager.store.budget and not foreign else ()

    def _settle(self) -> None:
        """The state is that of the tokens; what was evicted moved on."""
        self._prompt, self.rows, self.snapshot = None, max(len(self._tokens) - 1, 0), None

    def _check_open(self) -> None:
        if self.closed:
            raise RequestError("the session is closed; open a new one")


class SessionManager:
    """The sessions of one backend, which must not be used otherwise before all sessions are evicted."""

    def __init__(self, backend: Backend, bundle: str = "", store: PrefixStore | None = None) -> None:
        """Serve sessions on ``backend``, loaded from the bundle with the fingerprint ``bundle``.

        ``store`` keeps shared prefixes (None: none are kept).
        """
        self.backend = backend
        self.bundle = bundle
        self.store = store or PrefixStore(0)
        self.seen = SeenStore()
        self._foreign: BackendError | None = None  # what the backend said of a file's state
        self.lanes = Lanes(backend)

    def open(self) -> Session:
        """A session without tokens."""
        return Session(self, (), None)

    def find(self, session: Session, tokens: tuple[int, ...], *, counted: bool = True) -> tuple[Reuse, Snapshot | None]:
        """The longest state there is that a prompt begins with, and its snapshot; None: a lane holds it.

        ``tokens`` are those by which prompts are compared (:attr:`~edge_dflash.decode.options.Request.identities`).

        The last token is never part of it: its pass gives the logits. The session's own state comes first, then the
        prefix store; a gated-delta state cannot be taken back to where a prompt parts from it.
        """
        held = session.rows if session.snapshot is not None or self.lanes.of(session) is not None else 0
        own = held if 0 < held < len(tokens) and session.computed.identities[:held] == tokens[:held] else 0
        stored = self.store.longest(tokens[:-1], longer_than=own, counted=counted)
        if stored is not None:
            return Reuse(stored.length, "store"), stored
        return Reuse(own, "session" if own else "nothing"), session.snapshot if own else None

    def load(self, session: Session, reuse: Reuse, snapshot: Snapshot | None) -> int:
        """Put what :meth:`find` gave into a lane, where it is nobody's until it is assigned."""
        lane = self.lanes.of(session)
        held = lane is not None
        self.lanes.drop(session)
        if lane is None:
            lane = self.lanes.acquire()
        if held and reuse.source == "session":
            return lane
        if snapshot is not None:
            try:
                self.backend.restore(snapshot, lane)
            except BackendError as error:
                if session.snapshot is snapshot:
                    session.snapshot = None  # the next request computes it
                if session.loaded and not isinstance(error, DeviceLostError):
                    self._foreign = error
                raise
        else:
            self.backend.reset(lane)
        return lane

    def make_resident(self, session: Session) -> Generator[None, None, int]:
        """Bring a session's state into a lane (S1), chunk by chunk where it has to be computed; the lane.

        No other session may be made resident between two chunks.
        """
        if (lane := self.lanes.of(session)) is not None:
            return lane
        rows, sequence, backend = session.rows, session.computed, self.backend
        found = self.find(session, sequence.until(rows + 1).identities)
        lane, gaze = self.load(session, *found), Gaze(sequence, backend, self.seen)
        while (at := backend.length(lane)) < rows:
            end = min(rows, at + backend.shape.prefill_chunk)
            if (unseen := gaze.unseen(at, end)) is not None:
                gaze.see(unseen)
            else:
                backend.prefill(sequence.ids[at:end], lane, gaze.sight(at, end)).argmax()  # wait for it
            yield
        self.lanes.assign(session, lane)
        return lane

    def release(self, session: Session) -> None:
        """Give up a session's state, wherever it is."""
        self.lanes.drop(session)
        session.snapshot = None

    def failed(self, error: BaseException) -> None:
        """Give up the states in the lanes, unless no pass of a lane can have been cut short.

        The tower's pass is of none, and nor is a file's state that the backend refuses.
        """
        harmless, self._foreign, self.seen.failure = (self._foreign, self.seen.failure), None, None
        if not isinstance(error, RequestError) and not any(error is one for one in harmless):
            self.lanes.drop_all()


_RUNS = 2  # in the order of eviction: a lane whose session has a pass soon


class Lanes:
    """Whose state each lane of a backend holds (S3), and which is evicted where another session needs a lane."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._held: list[weakref.ref[Session] | None] = [None] * backend.shape.lanes
        self._used, self._uses = [0] * backend.shape.lanes, 0  # by which lane was entered last

    def of(self, session: Session) -> int | None:
        """The lane that holds a session's state."""
        return next((lane for lane in range(len(self._held)) if self._holder(lane) is session), None)

    def acquire(self) -> int:
        """A lane that is nobody's until it is assigned: what rests longest in one is evicted."""
        self.evict(lane := min(range(len(self._held)), key=self._eviction_order))
        return lane

    def share(self, lane: int, forks: Sequence[Session]) -> None:
        """Give what a lane holds to sessions: the first one has the lane, others copies in lanes that are free or rest.

        Those for whom no lane is left share a snapshot.
        """
        first, *others = forks
        self.assign(first, lane)
        spare = sorted((one for one in range(len(self._held)) if one != lane), key=self._eviction_order)
        spare = [one for one in spare if self._eviction_order(one)[0] < _RUNS]
        for fork, target in zip(others, spare, strict=False):
            self.evict(target)
            self._backend.copy(lane, target)
            self.assign(fork, target)
        if left := others[len(spare) :]:
            snapshot = self.snapshot(lane)
            for fork in left:
                fork.snapshot = snapshot

    def touch(self, lane: int) -> None:
        """Note that a pass of a lane comes next."""
        self._uses += 1
        self._used[lane] = self._uses

    def assign(self, session: Session, lane: int) -> None:
        """Note whose state a lane holds (S1)."""
        self._held[lane] = weakref.ref(session)

    def drop(self, session: Session) -> None:
        """No lane holds the session's state, nor what it left behind when its request ended before its first token."""
        self._held = [None if held is not None and held() is session else held for held in self._held]

    def evict(self, lane: int) -> None:
        """Evict the session of a lane: a snapshot has its state."""
        session, self._held[lane] = self._holder(lane), None
        if session is not None and session.snapshot is None:
            session.snapshot = self.snapshot(lane)

    def snapshot(self, lane: int) -> Snapshot:
        """The state of a lane, to be shared (S4)."""
        return self._backend.snapshot(lane).frozen()

    def evict_all(self) -> None:
        """Evict all sessions."""
        for lane in range(len(self._held)):
            self.evict(lane)

    def drop_all(self) -> None:
        """Give up the states of all lanes."""
        self._held = [None] * len(self._held)

    def _eviction_order(self, lane: int) -> tuple[int, int]:
        """Order of eviction: nobody's lane before one that rests, before one that runs; the longest ago first."""
        holder = self._holder(lane)
        return 0 if holder is None else 1 if holder.resting else _RUNS, self._used[lane]

    def _holder(self, lane: int) -> Session | None:
        """The session whose state a lane holds, if it still does."""
        held = self._held[lane]
        session = held() if held is not None else None
        if session is None or session.closed or self._backend.length(lane) != session.rows:
            return None
        return session


T = TypeVar("T")


def to_end(steps: Generator[None, None, T]) -> T:
    """What a generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value
