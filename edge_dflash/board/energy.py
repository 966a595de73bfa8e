"""Energy of a stretch of time: the power into the board, sampled and integrated.

Where the board does not say its power there is no energy, never 0.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise

from edge_dflash.board.power import Rail, read_input

PERIOD = 0.1  # seconds between two samples: the power monitors of Jetson boards average over about as long
GAP = 1.0  # seconds without a sample after which the power is unknown
_KEPT = 36_000  # samples: an hour of work


class EnergyMeter:
    """Samples the board's power between :meth:`begin` and :meth:`end`, on a thread. Used from any thread."""

    def __init__(self, read: Callable[[], Rail | None] = read_input, period: float = PERIOD) -> None:
        """``read`` gives the rail that feeds the whole board, or None; it may take milliseconds."""
        self._read = read
        self._period = period
        self._samples: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # time.perf_counter(), watts
        self._lock = threading.Lock()
        self._at_work = 0  # begun and not ended: works may lie inside each other
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self.rail: str | None = None  # that was read last

    def begin(self) -> None:
        """Sample from now on."""
        with self._lock:
            self._at_work += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="edge-dflash energy", daemon=True)
                self._thread.start()
        self._wake.set()

    def end(self) -> None:
        """Sample once more, then no longer, if this was the last work."""
        with self._lock:
            self._at_work = max(0, self._at_work - 1)
        self._wake.set()

    def joules(self, begin: float, end: float) -> float | None:
        """Energy between two times of time.perf_counter(): the trapezoids of the samples.

        None when nothing was read in it, or for longer than GAP seconds. Before the first sample and after the last one
        the power is taken to be that of the sample.
        """
        with self._lock:
            known = [sample for sample in self._samples if begin - GAP <= sample[0] <= end + GAP]
        if not known or end <= begin:
            return None
        if known[0][0] > begin:
            known.insert(0, (begin, known[0][1]))
        if known[-1][0] < end:
            known.append((end, known[-1][1]))
        total = 0.0
        for (t0, w0), (t1, w1) in pairwise(known):
            left, right = max(t0, begin), min(t1, end)
            if right <= left:
                continue
            if t1 - t0 > GAP:
                return None
            slope = (w1 - w0) / (t1 - t0)
            total += (right - left) * (w0 + slope * ((left + right) / 2 - t0))
        return total

    def _run(self) -> None:
        while True:
            self._wake.clear()
            with contextlib.suppress(OSError):  # a sensor that went away: what is not sampled is unknown
                self._sample()
            with self._lock:
                if not self._at_work:
                    self._thread = None
                    return
            self._wake.wait(self._period)

    def _sample(self) -> None:
        rail = self._read()
        if rail is None or rail.watts is None:
            return
        with self._lock:
            self.rail = rail.name
            self._samples.append((time.perf_counter(), rail.watts))
