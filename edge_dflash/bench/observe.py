"""Runs the reference on one prompt and writes down what a golden file holds, under the golden's key names.

Keys and shapes: P prompt tokens, V vocabulary, H hidden, L target layers, B block size, N new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.backends.reference.tower import TorchTower
from edge_dflash.decode.backend import Precision, Rows, no_tower
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.decode.replay import replay
from edge_dflash.decode.walk import WalkRows
from edge_dflash.model.ops import Experts, GroupedConv, MarkovWalk, Op, SelectorWalk
from edge_dflash.model.program import PairPrograms, Program
from edge_dflash.model.specs import PairSpec
from edge_dflash.pictures.pictured import Pictured, Placed, Seen, Sight
from edge_dflash.weights.formats import Array, WeightStore

if TYPE_CHECKING:
    import torch

FLOAT32 = Precision("float32", "float32")


class GoldenObserver:
    """The reference in float32 on one pair; ``programs`` replaces the pair's own (tests of mutations)."""

    def __init__(self, spec: PairSpec, store: WeightStore, programs: PairPrograms) -> None:
        self._spec, self._store, self._programs = spec, store, programs
        weights, vision, see = TorchWeights(store), spec.target.vision, programs.see
        self._interpreter = Interpreter(weights, FLOAT32)
        self.tower = TorchTower(vision, see, weights, FLOAT32) if vision and see else None

    def prompt(
        self, prompt: Pictured, new_tokens: int, block: Sequence[int] | None, threshold: float | None = None
    ) -> dict[str, Array]:
        """All keys of one prompt. ``block``: the first verify block, for states after its rows and its rows of experts.

        ``threshold``: of a second run that leaves out drafts which the drafter is less sure of.
        """
        backend = self._backend(len(prompt.ids) + new_tokens + 2 * self._spec.rows)
        found = self._after_prefill(backend, prompt, block)
        last_row = found.pop("last_row")
        greedy: tuple[int, ...] = ()
        if new_tokens:
            greedy = self._generations(backend, prompt, new_tokens, found)
        if new_tokens and threshold is not None:
            cut, _ = self._cycles(backend, prompt, new_tokens, threshold)
            found |= {f"cut_cycle_{name}": np.array(cut[name]) for name in ("start", "proposed", "accepted") if cut}
        found |= self._mixtures(prompt, block or ())
        found |= self._forward(prompt, greedy)
        found["prefill_logits"][-1] = last_row  # as the prefill pass computes it
        return found | (_places(prompt) if prompt.pictures else {})

    def tokens_and_logits(self, prompt: Sequence[int], new_tokens: int) -> tuple[Array, Array]:
        """Plain greedy tokens [N] and logits of the prompt's rows [P, V]."""
        backend, said = self._backend(len(prompt) + new_tokens + self._spec.rows), Pictured(prompt)
        tokens = self._greedy(backend, said, new_tokens) if new_tokens else ()
        return np.array(tokens), self._forward(said, ())["prefill_logits"]

    def _backend(self, context: int) -> ReferenceBackend:
        return ReferenceBackend(self._spec, self._store, FLOAT32, max_context=context, programs=self._programs)

    def _memory(self, capacity: int) -> Memory:
        return Memory.allocate(self._programs.states, capacity, FLOAT32, lambda state: self._store.kv_scale(state))

    def _sight(self, prompt: Pictured) -> Sight | None:
        """What the rows of a prompt have of pictures."""

        def see(placed: Placed) -> Seen:
            if self.tower is None:
                raise no_tower()
            return self.tower.see(placed.picture)

        return prompt.sight(0, len(prompt.ids), see)

    def _mixtures(self, prompt: Pictured, block: Sequence[int]) -> dict[str, Array]:
        """Rows of every mixture of experts, of a prefill of the prompt and of a verify pass of ``block`` behind it."""
        memory, found = self._memory(len(prompt.ids) + len(block)), dict[str, Array]()
        for program, said in ((self._programs.prefill, prompt), (self._programs.verify, Pictured(block))):
            ops = [op for op in program.ops if isinstance(op, Experts)]
            if ops and said.ids:
                found |= self._mixed(program, ops, said, memory)
            memory.length += len(said.ids)
            memory.offset = prompt.delta(len(prompt.ids))
        return found

    def _mixed(self, program: Program, ops: Sequence[Experts], said: Pictured, memory: Memory) -> dict[str, Array]:
        """Rows of the mixtures of one pass."""
        tiles: dict[str, list[Array]] = {}

        def observe(op: Op, role: str, values: torch.Tensor) -> None:
            if isinstance(op, Experts) and role in ("router_logits", "experts", "weights", "routed"):
                tiles.setdefault(_moe_key(op, role, program), []).append(values.numpy())

        ends = {_moe_key(op, "in", program): op.inputs[0] for op in ops}
        ends |= {_moe_key(op, "out", program): op.output for op in ops}
        out = self._interpreter.run(program, said.ids, memory, tuple(ends.values()), observe, self._sight(said))
        found = {key: np.concatenate(parts) for key, parts in tiles.items()}
        return found | {key: out[name].numpy() for key, name in ends.items()}

    def _forward(self, prompt: Pictured, greedy: Sequence[int]) -> dict[str, Array]:
        """One pass over prompt and greedy tokens, then the first block of the drafter on top of the prompt."""
        said, rows, target = Pictured([*prompt.ids, *greedy], prompt.pictures), len(prompt.ids), self._spec.target
        memory, sight = self._memory(len(said.ids) + self._spec.rows), self._sight(said)
        layers = [f"target.layers.{i}.out" for i in range(target.num_layers - 1)]
        drafter = self._spec.drafter
        want = ["embedding", *layers, *(["drafter.feature"] if drafter else [])]
        run = self._interpreter.run(self._programs.verify, said.ids, memory, want, sight=sight)
        out = {k: v.numpy() for k, v in run.items()}
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
            found |= self._first_block(drafter.block(greedy[0]), memory)
        return found

    def _first_block(self, block: Sequence[int], memory: Memory) -> dict[str, Array]:
        """Rows of the drafter's pass over ``block``."""
        program = self._programs.propose
        convolutions = [op.output for op in program.ops if isinstance(op, GroupedConv)]
        out = self._interpreter.run(program, block, memory, convolutions)
        found = {"cycle0_draft_hidden": out["hidden"].numpy()}
        for name in convolutions:  # such as drafter.layers.0.attention_conv.before
            found["cycle0_conv." + name.split(".", 2)[2].replace("_conv.", ".")] = out[name].numpy()
        if isinstance(program.walk, MarkovWalk):
            found["cycle0_base_logits"] = out["logits"].numpy()
        return found

    def _after_prefill(
        self, backend: ReferenceBackend, prompt: Pictured, block: Sequence[int] | None
    ) -> dict[str, Array]:
        """Caches after prefill; recurrent state after prefill and after each row of ``block``."""
        last = backend.prefill(prompt.ids, sight=self._sight(prompt))
        found: dict[str, Array] = {"last_row": last.logits()[0]}
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
        self, backend: ReferenceBackend, prompt: Pictured, new_tokens: int, found: dict[str, Array]
    ) -> tuple[int, ...]:
        """Plain and speculative greedy decoding, cycle by cycle. Returns the plain tokens."""
        greedy = self._greedy(backend, prompt, new_tokens)
        found["greedy_tokens"] = np.array(greedy)
        cycles, tokens = self._cycles(backend, prompt, new_tokens)
        if self._spec.drafter is not None:
            found[f"{self._spec.drafter.kind}_tokens"] = np.array(tokens)
        if cycles:
            found["cycle0_verify_logits"] = cycles.pop("verify_logits")[0]
            del cycles["proposed"]  # all of them
            found |= {f"cycle_{name}": np.array(values) for name, values in cycles.items()}
        return greedy

    def _cycles(
        self, backend: ReferenceBackend, prompt: Pictured, new_tokens: int, threshold: float = 0.0
    ) -> tuple[dict[str, list[Any]], list[int]]:
        """What every cycle of a speculative generation is, by the golden's names; and its tokens.

        ``threshold``: drafts from the first on that the drafter is less sure of are not verified.
        """
        found, tokens = dict[str, list[Any]](), list[int]()
        for one in replay(backend, prompt.ids, see=_drafted, threshold=threshold, sight=self._sight(prompt)):
            if tokens:
                cycle = {"start": one.start, "proposed": len(one.drafts), "accepted": len(one.tokens) - 1}
                for name, value in ((one.own or {}) | cycle | {"verify_logits": one.rows.logits()}).items():
                    found.setdefault(name, []).append(value)
            tokens += one.tokens
            if len(tokens) >= new_tokens:
                break
        return found, tokens[:new_tokens]

    def _greedy(self, backend: ReferenceBackend, prompt: Pictured, new_tokens: int) -> tuple[int, ...]:
        backend.reset()
        options = Options(max_new_tokens=new_tokens, speculative=False)
        return generate(backend, prompt.ids, options, pictures=prompt.pictures).tokens


def _drafted(rows: Rows) -> dict[str, Any]:
    """Tokens and scores of a drafter's rows."""
    found: dict[str, Any] = {"draft_tokens": rows.argmax()}
    if isinstance(rows, WalkRows) and isinstance(rows.op, SelectorWalk):
        ids, scores = (np.stack(part) for part in zip(*rows.candidates(), strict=True))
        found |= {"candidates": ids, "scores": scores, "draft_logits": rows.base}
    else:
        found["draft_logits"] = rows.logits()
    if isinstance(rows, WalkRows) and (confidence := rows.confidence()):
        found["confidence"] = confidence
    return found


def _places(prompt: Pictured) -> dict[str, Array]:
    """Positions of the prompt's rows [3, P], what a later token's is more than its index [1], rows of pictures [P]."""
    rows = len(prompt.ids)
    kinds = np.zeros(rows, np.int64)
    for placed in prompt.pictures:
        kinds[placed.at : placed.end] = 1
    places = prompt.positions(0, rows).astype(np.int64)
    return {"position_ids": places, "rope_delta": np.array([prompt.delta(rows)]), "mm_token_type_ids": kinds}


def _moe_key(op: Experts, what: str, program: Program) -> str:
    return f"moe.{op.output.split('.')[2]}.{what}.{program.name}"  # of target.layers.<i>.experts


def _recurrent(arrays: Mapping[str, Array], rows: int) -> dict[str, Array]:
    """S [Hv, Dk, Dv] and conv history [C, K-1] (oldest column first) of every gated delta layer."""
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        _, _, layer, state, part = name.split(".")
        if state == "delta":
            found[f"gdn.{layer}.{part}.after{rows}"] = array if part == "state" else array.T
    return found
