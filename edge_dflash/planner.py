"""The planner: a task in, a plan out; whole or as it is made, from any thread or asyncio."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from edge_dflash.backends import load, selftest
from edge_dflash.backends.selftest import SelfTestResult
from edge_dflash.bundle.manifest import fingerprint
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common import rules
from edge_dflash.common.progress import CHECKING, LOADING, SELF_TEST, Progress, shown
from edge_dflash.common.rules import PATH, TEXT
from edge_dflash.decode.backend import Backend
from edge_dflash.decode.drafts import draft_choice
from edge_dflash.decode.gaze import SeenStats
from edge_dflash.decode.grammar.compiled import hold, warm_up
from edge_dflash.decode.shape import PairShape
from edge_dflash.decode.store import PrefixStats
from edge_dflash.errors import RequestError
from edge_dflash.model.specs import VisionSpec
from edge_dflash.pictures.decode import ImageLimits
from edge_dflash.runner.astream import AsyncPlanStream
from edge_dflash.runner.engine import Engine
from edge_dflash.runner.local import LocalPlanning
from edge_dflash.runner.observer import OBSERVED, Observer
from edge_dflash.runner.recording import AnswerLog, Recording, RecordStats
from edge_dflash.runner.request import Preparer
from edge_dflash.runner.settings import EngineOptions, EngineSettings, OpenOptions, OpenSettings
from edge_dflash.runner.stream import PlanStream
from edge_dflash.session import PlannerSession
from edge_dflash.text.images import ImageReader
from edge_dflash.text.prompt import Task
from edge_dflash.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edge_dflash.client.planner import RemotePlanner

__all__ = ["AsyncPlanStream", "PlanStream", "Planner", "Task"]


_CLOSE_SECONDS = 10.0  # wait for the worker of a planner that was left without being closed
_ARGUMENTS = {
    "stop_token_ids": rules.sequence_of(Integral, "a list of token ids"),
    "bundle": TEXT.saying("the fingerprint of a bundle"),
    "path": PATH.saying("the path of a directory or file"),
    "progress": rules.either(rules.FLAG, rules.FUNCTION, "a function of (stage, done, total), True or False"),
    "observer": rules.having(OBSERVED, "an Observer").or_none(),
    "system": TEXT.saying("the text of a system prompt").or_none(),
}


def _check(**given: object) -> None:
    """Raise RequestError for an argument of another type or range."""
    rules.checked(_ARGUMENTS, given)


class Planner(LocalPlanning[PlannerSession]):
    """A loaded pair that turns tasks into plans, from any thread: one in each lane, others in a fair, bounded queue.

    The way of a task: ``plan`` and its like (runner/planning.py) have it prepared as jobs (runner/local.py), which
    ``Engine.submit`` queues; on the engine's thread (runner/engine.py) each job goes through the steps of
    decode/loop.py, and a round's cycles run together: ``backend.cycles``.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer | None,
        stop_token_ids: Sequence[int] = (),
        *,
        bundle: str = "",
        self_test: SelfTestResult | None = None,
        observer: Observer | None = None,
        vision: VisionSpec | None = None,
        **settings: Unpack[EngineOptions],
    ) -> None:
        """Take a loaded backend over; ``bundle``: fingerprint to which saved sessions are bound. See :meth:`open`.

        ``vision``: the target's tower; None: images are refused.
        """
        _check(stop_token_ids=stop_token_ids, bundle=bundle, observer=observer)
        self._self_test = self_test
        checked = EngineSettings.of(settings)
        limits = ImageLimits(pixels=checked.image_pixels)
        images = ImageReader(vision, limits, checked.images) if vision else None
        recorder = AnswerLog(checked.record) if isinstance(checked.record, Recording) else None
        if recorder is not None:
            weakref.finalize(self, recorder.close)
        self._letting_go = threading.Lock()
        self._engine = Engine(backend, bundle, checked, observer)
        self._submit = self._engine.submit
        ends, room = tuple(dict.fromkeys(stop_token_ids)), self._engine.check_room
        self._preparer = Preparer(backend.shape, tokenizer, ends, images, recorder, room)
        weakref.finalize(self, self._engine.close, drain=False, timeout=_CLOSE_SECONDS)
        self._end_forms = (lambda: None) if tokenizer is None else hold(self, tokenizer)

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        progress: Progress | bool = False,
        observer: Observer | None = None,
        **settings: Unpack[OpenOptions],
    ) -> Planner:
        """Open the bundle at ``path`` and load it.

        ``settings`` (:class:`~edge_dflash.runner.settings.OpenSettings` lists them with their defaults), none of which
        changes a token:

        - ``lanes`` requests run at a time (None: as many as the bundle was built for), each with the tokens that it has
          alone; while some decode, the prompts of others have ``prompt_share`` of the time. ``queue`` requests may
          wait, half of them of one caller; more are refused with QueueFullError, unless they are more urgent than one
          that waits, which is refused in their place.
        - ``drafts``: cycles verify at most so many (0: plain decoding); None: as many as are measured to give most
          tokens a second, or all without ``fallback``. ``drafter=False`` loads the target alone.
        - ``prefix_bytes`` bounds the states of system prompts that are kept for the next request. A request has at
          most ``images`` images of ``image_pixels`` pixels together.
        - ``record``: the path of a file (or a :class:`~edge_dflash.runner.recording.Recording`, with a limit of bytes)
          to which prompts and answers are appended, to train a drafter on. None, the default, writes nothing.
        - ``check_hashes=False`` skips the SHA-256 of the bundle's files. ``self_test`` says what follows when the
          loaded pair does not repeat what the build recorded: "refuse", "warn" (RuntimeWarning), or "off" to skip it.

        ``progress`` is told (stage, done, total); True shows it in a line on stderr. ``observer`` is told of every step
        on the worker's thread. Raises BundleError for a damaged bundle, BackendError when it cannot run here,
        VerificationError when the self-test fails, RequestError for a bad argument.
        """
        _check(path=path, progress=progress, observer=observer)
        given = OpenSettings.of(settings)
        with shown(progress) as report:
            return cls._open(path, report, observer, given)

    @classmethod
    def _open(cls, path: Path | str, progress: Progress, observer: Observer | None, given: OpenSettings) -> Planner:
        bundle = Bundle.open(path, check_hashes=given.check_hashes, progress=partial(progress, CHECKING))
        manifest = bundle.manifest
        draft_choice(manifest.pair.drafts if given.drafter else 0, given.drafts, measured=False)  # before it is loaded
        tokenizer = Tokenizer.open(bundle.path / "tokenizer") if manifest.tokenizer else None
        ends = (*manifest.pair.target.eos_token_ids, tokenizer.eos_token_id if tokenizer else None)
        stop = [token for token in ends if token is not None]
        progress(LOADING, 0, 0)
        backend, planner = load(bundle, drafter=given.drafter, lanes=given.lanes or manifest.lanes), None
        try:
            if given.self_test != "off":
                progress(SELF_TEST, 0, 0)
            tested = selftest.check(bundle, backend, given.self_test)
            name = fingerprint(manifest) + "+none" * (not given.drafter)
            make = partial(cls, backend, tokenizer, stop, bundle=name)
            planner = make(self_test=tested, observer=observer, vision=manifest.pair.target.vision, **given.engine)
            planner._engine.pace.begin(backend, tested.accept_length if tested else None)
        except BaseException:
            (planner or backend).close()
            raise
        return planner

    @staticmethod
    def connect(
        url: str, *, model: str | None = None, api_key: str | None = None, timeout: float = 600.0
    ) -> RemotePlanner:
        """A planner that another process serves, with the interface of an open one.

        ``url`` is that of ``edge-dflash serve``: ``unix:/PATH``, ``http+unix://%2FPATH``, ``http://HOST:PORT`` or
        ``https://HOST``; ``model`` its model's name, which is checked; ``timeout`` the most seconds between two pieces
        of an answer. Raises ServiceError when it cannot be reached, is another server, has not loaded its bundle, or
        httpx2 (the extra ``client``) is missing.
        """
        from edge_dflash.client.planner import RemotePlanner

        return RemotePlanner(url, model=model, api_key=api_key, timeout=timeout)

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all requests and release the device. Closing twice does no harm.

        Called by an observer, on the engine's own thread, it returns at once: the device is released after the step
        that runs.
        """
        self._engine.shut(self._let_go)

    def _let_go(self) -> None:
        with self._letting_go:
            self._engine.backend.close()
            if self._preparer.recorder is not None:
                self._preparer.recorder.close()
            self._end_forms()

    def warm_up(self) -> None:
        """Begin to build what the first form else waits for, on other cores: 3 s, 220 MB with 248,000 tokens."""
        if self.tokenizer is not None:
            with suppress(RequestError):  # a model that takes no forms
                warm_up(self.tokenizer, self._preparer.ends_of_form())

    @property
    def backend(self) -> Backend:
        """The loaded pair, for checks below the level of text, while no request runs.

        Sessions keep their state. Nothing here waits for requests: one whose prompt is being computed goes on.
        """
        self._engine.call(self._engine.manager.lanes.evict_all)
        return self._engine.backend

    @property
    def shape(self) -> PairShape:
        """Sizes of the loaded pair: vocabulary, block, context."""
        return self._engine.backend.shape

    @property
    def fingerprint(self) -> str:
        """Of the bundle, to which saved sessions are bound; empty without one."""
        return self._engine.manager.bundle

    @property
    def self_test(self) -> SelfTestResult | None:
        """What the self-test gave at open; None when it did not run."""
        return self._self_test

    @property
    def waiting(self) -> int:
        """Requests in the queue, the running ones not counted."""
        return self._engine.waiting

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's worker, and all requests with it; None while it works. Only a new planner helps."""
        return self._engine.failure

    @property
    def drafting(self) -> bool:
        """Whether cycles draft now; False without a drafter, and while it rests because it was measured not to pay."""
        return self.shape.drafts > 0 and self._engine.pace.drafts != 0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a plan: the model's own end-of-text ids."""
        return self._preparer.stop_token_ids

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The bundle's tokenizer; None when the bundle takes and returns token ids only."""
        return self._preparer.tokenizer

    @property
    def recorded(self) -> RecordStats:
        """What became of finished answers; all zeros without ``record``."""
        return RecordStats() if self._preparer.recorder is None else self._preparer.recorder.stats

    @property
    def prefixes(self) -> PrefixStats:
        """What is kept of system prompts, and how it served."""
        return self._engine.manager.store.stats

    @property
    def pictures(self) -> SeenStats:
        """What is kept of pictures that the vision tower has seen, and how it served."""
        return self._engine.manager.seen.stats

    def session(self, system: str | None = None) -> PlannerSession:
        """A new conversation, with a system prompt if one is given."""
        _check(system=system)
        return PlannerSession(self, system)

    def load_session(self, path: Path | str) -> PlannerSession:
        """The conversation that :meth:`PlannerSession.save` wrote.

        Raises BundleError when it was made with another bundle, RequestError when the file is missing or damaged.
        """
        _check(path=path)
        return PlannerSession._load(self, path)
