"""Whose state is in the backend, and how it gets there: the place that sessions share.

A conversation is its tokens. Its state (K/V and gated-delta state of both models) is a function of them, and is held in
the backend, in a snapshot, or nowhere; losing it costs a prefill, never a token. Knows the backend and the prefix
store, nothing of requests.

Invariants, between any two steps of the loop:
S1 the state of a conversation, where there is one, has ``rows`` rows: of all tokens but the last, which is the next
   anchor and has no K/V yet; or, between two chunks of a prompt, of that prompt's first. (Right after a prefill the
   backend has all of the prompt's rows, and it is nobody's state until the first token is there.)
S2 tokens change when a step is delivered, and by exactly that step (the first token brings its prompt).
S3 at most one conversation is in the backend; it is moved out only when the place is needed.
S4 the arrays of a snapshot are never written: forks, conversations and the prefix store share them.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_dflash.decode.backend import Backend, Snapshot
from edge_dflash.decode.store import PrefixStore, snapshot_bytes
from edge_dflash.errors import BackendError, RequestError


@dataclass(eq=False)
class Conversation:
    """Tokens, and their state when it is not in the backend."""

    tokens: list[int]
    snapshot: Snapshot | None  # the state
    used: int = 0  # when it last had the place, in the slot's count
    closed: bool = False
    prompt: tuple[int, ...] | None = None  # of which the state holds a part, in the place of that of ``tokens``
    rows: int = 0  # of the state

    def __post_init__(self) -> None:
        """Stand behind the tokens."""
        self.rows = max(len(self.tokens) - 1, 0)

    @property
    def computed(self) -> Sequence[int]:
        """The tokens that the state stands for, and more behind them."""
        return self.tokens if self.prompt is None else self.prompt

    def advance(self, prompt: Sequence[int] | None, tokens: Sequence[int]) -> None:
        """Take over delivered tokens; ``prompt`` is given with the first and replaces what was there."""
        if prompt is not None:
            self.tokens = list(prompt)
        self.tokens.extend(tokens)
        self.settle()

    def compute(self, prompt: tuple[int, ...], rows: int) -> None:
        """The state is that of the first ``rows`` tokens of a prompt now."""
        self.prompt, self.rows, self.snapshot = prompt, rows, None

    def settle(self) -> None:
        """The state is that of the tokens."""
        self.prompt, self.rows, self.snapshot = None, max(len(self.tokens) - 1, 0), None  # what was parked moved on


@dataclass(frozen=True)
class Reuse:
    """What a request need not compute again."""

    tokens: int  # leading tokens of the prompt whose state was there already
    prompt_tokens: int
    source: Literal["session", "store", "nothing"]

    @property
    def prefilled(self) -> int:
        """Tokens of the prompt that the request computes."""
        return self.prompt_tokens - self.tokens


class SessionSlot:
    """One backend as the place of many conversations. ``parked_budget`` bounds the bytes of snapshots outside it."""

    def __init__(self, backend: Backend, store: PrefixStore, parked_budget: int | None) -> None:
        self.backend = backend
        self.store = store
        self.swaps = 0  # snapshots brought back into the backend
        self._parked_budget = parked_budget
        self._conversations: weakref.WeakSet[Conversation] = weakref.WeakSet()
        self._resident: weakref.ref[Conversation] | None = None
        self._clock = 0

    def add(self, tokens: Sequence[int], snapshot: Snapshot | None) -> Conversation:
        """Make a conversation that goes on from here."""
        self._clock += 1
        conversation = Conversation(list(tokens), snapshot, self._clock)
        self._conversations.add(conversation)
        self._trim()
        return conversation

    @property
    def parked_bytes(self) -> int:
        """Bytes of all conversations' snapshots; one that several share counts once."""
        snapshots = {id(c.snapshot): c.snapshot for c in self._conversations if c.snapshot is not None}
        return sum(snapshot_bytes(snapshot) for snapshot in snapshots.values())

    def choose(self, conversation: Conversation, tokens: Sequence[int]) -> tuple[Reuse, Snapshot | None]:
        """The longest state there is that ``tokens`` begin with, and its snapshot; None: it is in the backend.

        The last token is never part of it: its pass gives the logits. The conversation's own state comes first, then
        the prefix store; a gated-delta state cannot be taken back to where a prompt parts from it.
        """
        present = conversation.snapshot is not None or self._occupant() is conversation
        held = conversation.rows if present else 0
        own = held if held < len(tokens) and list(conversation.computed[:held]) == list(tokens[:held]) else 0
        stored = self.store.longest(tokens[:-1], longer_than=own)
        if stored is not None:
            return Reuse(stored.length, len(tokens), "store"), stored
        return Reuse(own, len(tokens), "session" if own else "nothing"), conversation.snapshot if own else None

    def occupy(self, conversation: Conversation) -> None:
        """Note that the backend holds this conversation's state (S1)."""
        self._clock += 1
        conversation.used = self._clock
        self._resident = weakref.ref(conversation)

    def bring(self, conversation: Conversation) -> None:
        """Make the backend hold the conversation's state (S1), computing what is nowhere."""
        for _ in self.bring_steps(conversation):
            pass

    def bring_steps(self, conversation: Conversation) -> Iterator[None]:
        """:meth:`bring` chunk by chunk; no other session may be brought in between two."""
        if self._occupant() is conversation:
            return
        rows, tokens, backend = conversation.rows, conversation.computed, self.backend
        self.load(conversation, *self.choose(conversation, tokens[: rows + 1]))
        while (at := backend.length()) < rows:
            backend.prefill(tokens[at : min(rows, at + backend.shape.prefill_chunk)]).argmax()  # wait for it
            yield
        self.occupy(conversation)

    def keep(self, tokens: Sequence[int]) -> bool:
        """Store the backend's state, which is that of ``tokens``; False when it is larger than the store's budget."""
        return self.store.put(tokens, frozen(self.backend.snapshot()))

    def snapshot_steps(self, conversation: Conversation) -> Generator[None, None, Snapshot | None]:
        """State of a conversation's tokens; None when it has none. Kept, within the budget, until it moves on.

        Yields between two chunks of what has to be computed.
        """
        if conversation.prompt is not None:
            self.release(conversation)
            conversation.settle()
        snapshot = conversation.snapshot
        if snapshot is None and conversation.tokens:
            yield from self.bring_steps(conversation)
            conversation.snapshot = snapshot = frozen(self.backend.snapshot())
            self._trim()
        return snapshot

    def vacate(self) -> None:
        """Park the conversation that is in the backend."""
        conversation, self._resident = self._occupant(), None
        if conversation is not None and conversation.snapshot is None:
            conversation.snapshot = frozen(self.backend.snapshot())
            self._trim()

    def release(self, conversation: Conversation) -> None:
        """Give up a conversation's state, wherever it is."""
        if self._occupant() is conversation:
            self._resident = None
        conversation.snapshot = None

    def failed(self, conversation: Conversation, error: BaseException) -> None:
        """Give up the state in the backend, unless the error says that no pass can have been cut short."""
        if not isinstance(error, RequestError) or self._occupant() is not conversation:
            self._resident = None

    def _occupant(self) -> Conversation | None:
        """The conversation whose state the backend holds, if it still does."""
        conversation = self._resident() if self._resident is not None else None
        if conversation is None or conversation.closed or self.backend.length() != conversation.rows:
            return None
        return conversation

    def load(self, conversation: Conversation, reuse: Reuse, snapshot: Snapshot | None) -> None:
        """Put a chosen state into the backend, where it is nobody's until somebody occupies it."""
        if self._occupant() is not conversation:
            self.vacate()
        elif reuse.source == "session":
            self._resident = None
            return
        self._resident = None
        if snapshot is None:
            self.backend.reset()
            return
        try:
            self.backend.restore(snapshot)
        except BackendError:
            if conversation.snapshot is snapshot:
                conversation.snapshot = None  # the next request computes it
            raise
        self.swaps += 1

    def _trim(self) -> None:
        """Drop the states of the conversations used longest ago, until the rest is within the budget."""
        while self._parked_budget is not None and self.parked_bytes > self._parked_budget:
            parked = [conversation for conversation in self._conversations if conversation.snapshot is not None]
            min(parked, key=lambda conversation: conversation.used).snapshot = None


def frozen(snapshot: Snapshot) -> Snapshot:
    """Protect a snapshot that will be shared (S4)."""
    for array in snapshot.arrays.values():
        array.flags.writeable = False
    return snapshot
