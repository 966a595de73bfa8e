"""The planner: a task in, a plan out, whole or as it is made.

Puts together an open bundle, its backend, its tokenizer and the speculative loop. Knows nothing of the command line,
of robots or of how a backend computes. One request at a time; every request starts a new sequence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias, cast

from edge_dflash.backends import load
from edge_dflash.backends.base import Backend, PairShape
from edge_dflash.bundle.reader import Bundle, Progress
from edge_dflash.errors import RequestError
from edge_dflash.plan import Increment, Plan, PlanTimings
from edge_dflash.spec.loop import DecodeOptions, Step, admit, collect
from edge_dflash.spec.loop import stream as decode_steps
from edge_dflash.text import Detokenizer, Message, Tokenizer

Task: TypeAlias = str | Sequence[Message] | Sequence[int]


class PlanStream(Iterator[Increment]):
    """Increments of one request; :attr:`plan` is the whole once they are used up.

    Joined, the texts and the tokens of the increments are those of the plan. A stream that is closed early (or left
    with its ``with`` block, or overtaken by the planner's next request) ends there and has no plan.
    """

    def __init__(
        self,
        steps: Iterator[Step],
        detokenizer: Detokenizer | None,
        *,
        prompt_tokens: int,
        speculative: bool,
        began: float,
    ) -> None:
        """Read ``steps`` of the loop; ``began`` is the request's ``time.perf_counter()``. Made by Planner.stream."""
        self._steps = steps
        self._detokenizer = detokenizer
        self._prompt_tokens = prompt_tokens
        self._speculative = speculative
        self._began = began
        self._first_token = 0.0
        self._seen: list[Step] = []
        self._pieces: list[str] = []
        self._plan: Plan | None = None

    def __next__(self) -> Increment:
        step = next(self._steps)
        self._first_token = self._first_token or time.perf_counter()
        self._seen.append(step)
        piece = None
        if self._detokenizer is not None:
            piece = self._detokenizer.add(step.tokens)
            if step.finish_reason is not None:
                piece += self._detokenizer.finish()
            self._pieces.append(piece)
        if step.finish_reason is not None:
            self._plan = self._finished(time.perf_counter())
        return Increment(piece, step.tokens)

    def __enter__(self) -> PlanStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop here. Closing twice does no harm."""
        self._steps = iter(())

    @property
    def plan(self) -> Plan:
        """The finished plan. Raises RequestError when the stream was not read to its end."""
        if self._plan is None:
            raise RequestError("the stream was not read to its end, so there is no plan; read it first, or use plan()")
        return self._plan

    def _finished(self, now: float) -> Plan:
        made = collect(self._seen)
        return Plan(
            text="".join(self._pieces) if self._detokenizer is not None else None,
            tokens=made.tokens,
            finish_reason=made.finish_reason,
            prompt_tokens=self._prompt_tokens,
            accept_lengths=made.accept_lengths,
            accept_length=made.accept_length,
            timings=PlanTimings(
                prefill_seconds=made.timings.prefill_seconds,
                first_token_seconds=self._first_token - self._began,
                decode_seconds=now - self._first_token,
                total_seconds=now - self._began,
            ),
            speculative=self._speculative,
        )


class Planner:
    """A loaded pair that turns tasks into plans. Not thread-safe: one request at a time."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer | None, stop_token_ids: Sequence[int] = ()) -> None:
        """Take a loaded backend (closed by :meth:`close`); most callers want :meth:`open`."""
        self._backend = backend
        self._tokenizer = tokenizer
        self._stop = tuple(dict.fromkeys(stop_token_ids))
        self._active: PlanStream | None = None

    @classmethod
    def open(cls, path: Path | str, *, check_hashes: bool = True, progress: Progress | None = None) -> Planner:
        """Open the bundle at ``path`` and load it.

        ``check_hashes=False`` skips the SHA-256 of the bundle's files (seconds for large models); ``progress`` is told
        (bytes checked, bytes in all). Raises BundleError when the bundle is damaged or of another version,
        BackendError when it cannot run here.
        """
        bundle = Bundle.open(path, check_hashes=check_hashes, progress=progress)
        manifest = bundle.manifest
        tokenizer = Tokenizer.open(bundle.path / "tokenizer") if manifest.tokenizer else None
        stop = list(manifest.pair.target.eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            stop.append(tokenizer.eos_token_id)
        return cls(load(bundle), tokenizer, stop)

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the device. A running stream ends."""
        self._end_active()
        self._backend.close()

    @property
    def backend(self) -> Backend:
        """The loaded pair, for checks below the level of text. A running stream must not be continued after its use."""
        return self._backend

    @property
    def shape(self) -> PairShape:
        """Sizes of the loaded pair: vocabulary, block, context."""
        return self._backend.shape

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a plan: the model's own end-of-text ids."""
        return self._stop

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The bundle's tokenizer; None when the bundle takes and returns token ids only."""
        return self._tokenizer

    def plan(
        self,
        task: Task,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        thinking: bool = False,
        speculative: bool = True,
    ) -> Plan:
        """Make the whole plan; see :meth:`stream`."""
        stream = self.stream(
            task,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            thinking=thinking,
            speculative=speculative,
        )
        for _ in stream:
            pass
        return stream.plan

    def stream(
        self,
        task: Task,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        thinking: bool = False,
        speculative: bool = True,
    ) -> PlanStream:
        """Start a plan and return its increments, each given as soon as its tokens are final.

        ``task`` is text (one user message when the model has a chat template), a list of messages with ``role`` and
        ``content``, or token ids, used as they are. ``max_new_tokens`` None: until a stop token or the end of the
        usable context. ``temperature`` 0 is greedy; otherwise ``seed`` makes the plan repeatable. ``thinking`` is
        passed to the chat template as ``enable_thinking``. ``speculative`` False decodes plainly: the same tokens, one
        by one. Raises RequestError for bad input and ContextError for a prompt that does not fit, here and not at the
        first increment.
        """
        began = time.perf_counter()
        self._end_active()
        options = DecodeOptions(max_new_tokens, temperature, top_k, top_p, seed, self._stop)
        _ = options.sampling  # refuse bad values now
        prompt = self.encode(task, thinking=thinking)
        self._backend.reset()
        admit(self._backend, prompt, options)
        self._active = PlanStream(
            decode_steps(self._backend, prompt, options, speculative=speculative),
            Detokenizer(self._tokenizer.decode) if self._tokenizer is not None else None,
            prompt_tokens=len(prompt),
            speculative=speculative,
            began=began,
        )
        return self._active

    def encode(self, task: Task, *, thinking: bool = False) -> tuple[int, ...]:
        """Token ids of a task. Raises RequestError when it is of another kind, empty, or cannot be turned into ids."""
        if isinstance(task, (bytes, bytearray, Mapping)):
            raise RequestError(f"the task is of type {type(task).__name__}; give text, a list of messages or token ids")
        if not isinstance(task, str) and not (len(task) and isinstance(task[0], Mapping)):
            return _token_ids(task)
        if self._tokenizer is None:
            raise RequestError(
                "this bundle has no tokenizer: give token ids instead of text, "
                "or build it again from a checkpoint with tokenizer.json"
            )
        if not isinstance(task, str):
            return self._tokenizer.encode_chat(cast("Sequence[Message]", task), enable_thinking=thinking)
        if not task.strip():
            raise RequestError("the task is empty; say what is to be done")
        if self._tokenizer.template is None:
            return self._tokenizer.encode(task)
        return self._tokenizer.encode_chat([{"role": "user", "content": task}], enable_thinking=thinking)

    def _end_active(self) -> None:
        if self._active is not None:
            self._active.close()
            self._active = None


def _token_ids(task: Sequence[Any]) -> tuple[int, ...]:
    """Token ids must be integers; the loop checks their number and range."""
    for token in task:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"{token!r} is no token id; give text, a list of messages or a list of integer ids")
    return tuple(int(token) for token in task)
