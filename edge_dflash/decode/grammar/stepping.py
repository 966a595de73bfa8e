"""Walking along drafts: what is asked of a grammar token by token becomes the two questions of a cycle.

Token ids and a grammar that can step forth and back; of no library and no process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from edge_dflash.errors import RequestError

M = TypeVar("M", covariant=True)
Ask = Callable[[int], "int | None"]  # the token that a row chooses; None: no more drafts are wanted


class Steps(Protocol[M]):
    """A grammar that stands behind the tokens that were pushed. Any method may raise RequestError: too complex here."""

    @property
    def ended(self) -> bool:
        """Whether a stop token was pushed."""
        ...

    def packed(self) -> M:
        """Tokens that may come next."""
        ...

    def push(self, token: int) -> bool:
        """Step over a token. False, and no step, when it is not allowed."""
        ...

    def pop(self, count: int) -> None:
        """Step back over the last ``count`` tokens."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that must come next, in order; empty when there is a choice."""
        ...


def walk(
    grammar: Steps[M], free: Sequence[int], ask: Ask, tell: Callable[[list[int]], object] = lambda path: None
) -> list[int]:
    """Drafts that the grammar allows, made from the ``free`` ones; the grammar is where it was afterwards.

    A draft that is refused is replaced by what is forced, and where nothing is, by what ``ask`` of its row gives, while
    the grammar stands before it; None ends the path. So does a grammar that becomes too complex. ``tell`` is told the
    path before the grammar goes back, which takes a while.
    """
    path: list[int] = []
    try:
        with contextlib.suppress(RequestError):
            _along(grammar, free, ask, path)
        tell(path)
    finally:
        grammar.pop(len(path))
    return path


def _along(grammar: Steps[M], free: Sequence[int], ask: Ask, path: list[int]) -> None:
    """Push what :func:`walk` gives, and append it to ``path``."""
    forced: list[int] = []
    for row, token in enumerate(free):
        token = forced.pop(0) if forced else token
        if not grammar.push(token):
            forced = list(grammar.forced())
            if not forced:
                chosen = ask(row)
                if chosen is None:
                    return
                forced = [chosen]
            token = forced.pop(0)
            if not grammar.push(token):
                return
        path.append(token)
        if grammar.ended:
            return


def look(grammar: Steps[M], drafts: Sequence[int], put: Callable[[int, M], None]) -> RequestError | None:
    """Give ``put`` the masks before the first draft, behind it, ...; the grammar is where it was afterwards.

    Returns why it gave up on the way, if it did. It also ends, without a reason, at a draft that is not allowed.
    """
    walked = 0
    try:
        put(0, grammar.packed())
        for draft in drafts:
            if not grammar.push(draft):
                break
            walked += 1
            put(walked, grammar.packed())
    except RequestError as error:
        return error
    finally:
        grammar.pop(walked)
    return None
