"""Runs the reference on one prompt and writes down what a golden file holds, under the golden's key names.

Keys and shapes: P prompt tokens, V vocabulary, H hidden, L target layers, B block size, N new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_dflash.backends.host_cycle import Delegate
from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.decode.accept import accepted
from edge_dflash.decode.backend import Precision, Rows
from edge_dflash.decode.loop import generate
from edge_dflash.decode.options import Options
from edge_dflash.model.program import PairPrograms
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import Array, WeightStore

FLOAT32 = Precision("float32", "float32")


class Recorder(Delegate):
    """Writes down every cycle of a speculative generation."""

    def __init__(self, backend: ReferenceBackend) -> None:
        super().__init__(backend)
        self.starts: list[int] = []
        self.draft_logits: list[Array] = []
        self.drafts: list[list[int]] = []
        self.accepted: list[int] = []
        self.verify_logits: list[Array] = []

    def propose(self, anchor: int, lane: int = 0) -> Rows:
        """Record position, logits and tokens of the drafts."""
        rows = super().propose(anchor, lane)
        self.starts.append(self.length(lane))
        self.draft_logits.append(rows.logits())
        self.drafts.append(rows.argmax())
        return rows

    def verify(self, ids: Sequence[int], lane: int = 0) -> Rows:
        """Record logits and the number of drafts that they accept."""
        rows = super().verify(ids, lane)
        self.verify_logits.append(rows.logits())
        self.accepted.append(accepted(list(ids[1:]), rows.argmax()))
        return rows


class GoldenObserver:
    """The reference in float32 on one pair; ``programs`` replaces the pair's own (tests of mutations)."""

    def __init__(self, spec: PairSpec, store: WeightStore, programs: PairPrograms) -> None:
        self._spec, self._store, self._programs = spec, store, programs
        self._interpreter = Interpreter(TorchWeights(store), FLOAT32)

    def prompt(self, prompt: Sequence[int], new_tokens: int, block: Sequence[int] | None) -> dict[str, Array]:
        """All keys of one prompt. ``block``: the first verify block, for the recurrent state after each of its rows."""
        backend = self._backend(len(prompt) + new_tokens + 2 * self._spec.rows)
        found = self._after_prefill(backend, prompt, block)
        last_row = found.pop("last_row")
        greedy: tuple[int, ...] = ()
        if new_tokens:
            greedy = self._generations(backend, prompt, new_tokens, found)
        found |= self._forward(prompt, greedy)
        found["prefill_logits"][-1] = last_row  # as the prefill pass computes it
        return found

    def tokens_and_logits(self, prompt: Sequence[int], new_tokens: int) -> tuple[Array, Array]:
        """Plain greedy tokens [N] and logits of the prompt's rows [P, V]."""
        backend = self._backend(len(prompt) + new_tokens + self._spec.rows)
        tokens = self._greedy(backend, prompt, new_tokens) if new_tokens else ()
        return np.array(tokens), self._forward(prompt, ())["prefill_logits"]

    def _backend(self, context: int) -> ReferenceBackend:
        return ReferenceBackend(self._spec, self._store, FLOAT32, max_context=context, programs=self._programs)

    def _forward(self, prompt: Sequence[int], greedy: Sequence[int]) -> dict[str, Array]:
        """One pass over prompt and greedy tokens, then the first block of the drafter on top of the prompt."""
        ids, rows, target = [*prompt, *greedy], len(prompt), self._spec.target
        block = self._spec.rows
        memory = Memory.allocate(
            self._programs.states, len(ids) + block, FLOAT32, lambda state: self._store.kv_scale(state)
        )
        layers = [f"target.layers.{i}.out" for i in range(target.num_layers - 1)]
        drafter = self._spec.drafter
        want = ["embedding", *layers, *(["drafter.feature"] if drafter else [])]
        out = {k: v.numpy() for k, v in self._interpreter.run(self._programs.verify, ids, memory, want).items()}
        found = {
            "prefill_logits": out["logits"][:rows].copy(),
            "prefill_hidden": np.stack([out[name][:rows] for name in ("embedding", *layers, "hidden")]),
        }
        if drafter is not None:
            found |= {"prefill_taps": out["taps"][:rows], "draft_ctx_feature": out["drafter.feature"][:rows]}
        if greedy:
            top = np.sort(out["logits"][rows - 1 : -1], axis=-1)
            found["teacher_forced_logits"] = out["logits"]
            found["greedy_top2_margin"] = top[:, -1] - top[:, -2]
        if greedy and drafter is not None:
            memory.length = rows  # rows past the prompt are garbage that the block overwrites
            block_rows = self._interpreter.run(self._programs.propose, drafter.block(greedy[0]), memory)
            found["cycle0_draft_hidden"] = block_rows["hidden"].numpy()
        return found

    def _after_prefill(
        self, backend: ReferenceBackend, prompt: Sequence[int], block: Sequence[int] | None
    ) -> dict[str, Array]:
        """Caches after prefill; recurrent state after prefill and after each row of ``block``."""
        found: dict[str, Array] = {"last_row": backend.prefill(prompt).logits()[0]}
        base = backend.snapshot()
        for name, array in base.arrays.items():
            model, _, layer, state, part = name.split(".")
            if state == "kv" and model == "target":
                found[f"kv.{layer}.{part}"] = array.transpose(1, 0, 2)
            elif state == "kv":
                found[f"draft_ctx_{part}.{layer}"] = array
        found |= _recurrent(base.arrays, 0)
        if block is not None and self._spec.target.gated_delta is not None:
            for rows in range(1, len(block) + 1):
                backend.restore(base)
                backend.verify(block)
                backend.commit(rows)
                found |= _recurrent(backend.snapshot().arrays, rows)
        return found

    def _generations(
        self, backend: ReferenceBackend, prompt: Sequence[int], new_tokens: int, found: dict[str, Array]
    ) -> tuple[int, ...]:
        """Plain and speculative greedy decoding, cycle by cycle. Returns the plain tokens."""
        greedy = self._greedy(backend, prompt, new_tokens)
        backend.reset()
        cycles = Recorder(backend)
        speculative = generate(cycles, prompt, Options(max_new_tokens=new_tokens))
        found["greedy_tokens"], found["dflash_tokens"] = np.array(greedy), np.array(speculative.tokens)
        if cycles.starts:
            found["cycle_start"], found["cycle_accepted"] = np.array(cycles.starts), np.array(cycles.accepted)
            found["cycle_draft_tokens"] = np.array(cycles.drafts)
            found["cycle_draft_logits"] = np.stack(cycles.draft_logits)
            found["cycle0_verify_logits"] = cycles.verify_logits[0]
        return greedy

    def _greedy(self, backend: ReferenceBackend, prompt: Sequence[int], new_tokens: int) -> tuple[int, ...]:
        backend.reset()
        return generate(backend, prompt, Options(max_new_tokens=new_tokens, speculative=False)).tokens


def _recurrent(arrays: Mapping[str, Array], rows: int) -> dict[str, Array]:
    """S [Hv, Dk, Dv] and conv history [C, K-1] (oldest column first) of every gated delta layer."""
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        _, _, layer, state, part = name.split(".")
        if state == "delta":
            found[f"gdn.{layer}.{part}.after{rows}"] = array if part == "state" else array.T
    return found
