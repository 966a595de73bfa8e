"""What the planner and its grammar processes say to each other: datagrams of a letter and what belongs to it.

The planner talks to a *zygote*, which has built the vocabulary and forks a *child* for each grammar; to the child on
its control socket; and to each constraint of that grammar on one more socket, beside which lies memory that both see:
the masks.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# to the zygote
FORK = b"f"  # number of the child; with its control socket and its page
KILL = b"k"  # number of the child
# from a child, and from the zygote in its place
BEGUN = b"b"
COMPILED = b"c"
REFUSED = b"r"  # the reason, a RequestError's
DIED = b"d"  # the signal, 0 without one
# to a child
OPEN = b"o"  # with a constraint's socket and its memory
# of a constraint: to it
ADVANCE = b"+"  # tokens
WALK = b"w"  # tokens that were drafted freely; answered by ASK, if it must be, PATH, and MASKS of that path
CHOSEN = b"t"  # one token, or none
LOOK = b"l"  # tokens; answered by MASKS
# and from it
ASK = b"a"  # row, whose mask lies in the memory
PATH = b"p"  # tokens
MASKS = b"m"  # how many lie in the memory, and why there are no more, if that is an error

MESSAGE_BYTES = 64 * 1024  # longest datagram
TOKENS_AT_ONCE = 4096  # of a long history
SPIN_SECONDS = (
    0.0004  # for which a wait looks again and again before it sleeps: to be woken takes 0.1 ms, thrice a cycle
)
ROWS = 64  # masks of one path; a longer one ends there
_PAGE = 4096


@dataclass(frozen=True)
class Layout:
    """Where masks of ``words`` 32-bit words lie in a constraint's memory: two halves, that change with each ADVANCE.

    Masks stay as they are until the ADVANCE after the next one. At the beginning, two uint32: number of the last
    message that was read, and how many rows of it are made: those of a process that was killed can still be used.
    """

    words: int

    @property
    def nbytes(self) -> int:
        """Size of the memory. Pages that are never written take no place."""
        return _PAGE + 2 * ROWS * self._stride

    @property
    def _stride(self) -> int:
        return -(-4 * self.words // 64) * 64

    def row(self, half: int, row: int) -> int:
        """Offset of a mask."""
        return _PAGE + (half * ROWS + row) * self._stride


def soon(receive: Callable[[], bytes]) -> bytes | None:
    """What ``receive``, which does not wait, gives within SPIN_SECONDS; None when nothing came."""
    until = time.perf_counter() + SPIN_SECONDS
    while time.perf_counter() < until:
        with contextlib.suppress(BlockingIOError):
            return receive()
    return None


def packed(values: Iterable[int]) -> bytes:
    """Numbers of 32 bits as they are sent."""
    return array("I", values).tobytes()


def unpacked(data: bytes) -> list[int]:
    """The numbers again."""
    return array("I", data).tolist()
