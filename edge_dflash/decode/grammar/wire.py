"""What the planner and its grammar processes say to each other: datagrams of a letter and what belongs to it.

The planner talks to a *zygote*, which has built the vocabulary and forks a *child* for each grammar; to the child on
its control socket; and to each constraint of that grammar on one more socket, beside which lies memory that both see:
the masks. Imports little, because a child shares it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

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
SPIN_SECONDS = 0.0004  # of looking again and again before a wait sleeps: to be woken takes 0.1 ms, thrice a cycle
ROWS = 64  # masks of one path; a longer one ends there


@dataclass(frozen=True)
class Source:
    """A form that an answer must have as a whole, for a model of ``vocab_size`` ids.

    - "schema": JSON text. Properties come in the order in which it names them. ``whitespace`` False: no blanks outside
      strings; True: up to 64 in a row.
    - "regex": in the syntax of Rust's regex crate, without look-around and back-references.
    - "grammar": Lark in the dialect of llguidance, from its rule ``start``. ``<name>`` is a special token,
      ``%json {...}`` a JSON Schema, to which ``whitespace`` applies.
    - "calls": JSON of the :class:`~edge_dflash.decode.grammar.calls.Calls` that it may have.
    - "tools": Lark, made of them.
    """

    kind: Literal["schema", "regex", "grammar", "calls", "tools"]
    text: str
    whitespace: bool
    vocab_size: int


@dataclass(frozen=True)
class Bounds:
    """What one grammar may take."""

    compile_seconds: float = 5.0  # of one core; forms of robots take 0.01, the largest schemas that are taken 1
    step_seconds: float = 2.0  # of a walk along drafts with its masks; 16 of the most fuel take 0.25 on a fast core
    nbytes: int = 256 << 20  # beyond the vocabulary; forms of robots take 1 to 5 MB


class Page:
    """Memory that a child shares with the planner: the source until it is compiled, then how large the child is."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def of(cls, source: Source, bounds: Bounds) -> Page:
        """A new page."""
        page = cls(os.memfd_create("grammar"))
        os.pwrite(page._fd, json.dumps([asdict(source), asdict(bounds)]).encode(), 0)
        return page

    def fileno(self) -> int:
        """Its file."""
        return self._fd

    def read(self) -> tuple[Source, Bounds]:
        """What :meth:`of` wrote."""
        source, bounds = json.loads(os.pread(self._fd, os.fstat(self._fd).st_size, 0))
        return Source(**source), Bounds(**bounds)

    @property
    def private_bytes(self) -> int:
        """Memory that the child took for itself, when it last looked."""
        return int.from_bytes(os.pread(self._fd, 8, 0), "little")

    def note(self, shared_bytes: int) -> None:
        """Measure it, in the child, which shares so many bytes with its parent."""
        os.pwrite(self._fd, max(0, resident_bytes() - shared_bytes).to_bytes(8, "little"), 0)


def resident_bytes() -> int:
    """Memory of this process, shared or not."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@dataclass(frozen=True)
class MaskLayout:
    """Where masks of ``words`` 32-bit words lie in a constraint's memory: two halves, that change with each ADVANCE.

    Masks stay as they are until the ADVANCE after the next one. At the beginning, two uint32: number of the last
    message that was read, and how many rows of it are made: those of a process that was killed can still be used.
    """

    words: int

    @property
    def nbytes(self) -> int:
        """Size of the memory. Pages that are never written take no place."""
        return self.row(1, ROWS)

    def row(self, half: int, row: int) -> int:
        """Offset of a mask."""
        stride = -(-4 * self.words // 64) * 64
        return mmap.PAGESIZE + (half * ROWS + row) * stride


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
