"""The traps, as mutations: of a spec, of a pair's Programs, or of one function while a test runs."""

from dataclasses import replace

import torch

from edge_dflash.backends.reference import attention, delta, dense, interpreter
from edge_dflash.backends.reference.attention import KvMemory
from edge_dflash.backends.reference.delta import DeltaMemory
from edge_dflash.backends.reference.interpreter import Interpreter
from edge_dflash.decode import cycle
from edge_dflash.model.ops import Attend, KvAppend, SelectRows
from edge_dflash.model.program import PairPrograms
from edge_dflash.weights.e4m3 import from_e4m3, to_e4m3

PASSES = ("prefill", "verify", "propose")


# Specs: a checkpoint's config read wrongly.


def drafter(**changes):
    """A function of a PairSpec: drafter fields replaced; a callable gets the old value."""

    def mutate(spec):
        values = {k: v(getattr(spec.drafter, k)) if callable(v) else v for k, v in changes.items()}
        return replace(spec, drafter=replace(spec.drafter, **values))

    return mutate


def taps(change):
    return drafter(target_layer_ids=lambda ids: tuple(change(i) for i in ids))


def masks(**changes):
    """Every drafter layer's mask changed where the field is not None."""

    def change(mask):
        return replace(mask, **{k: v(getattr(mask, k)) for k, v in changes.items() if getattr(mask, k) is not None})

    return drafter(layers=lambda layers: tuple(change(mask) for mask in layers))


def rope(model, **changes):
    def mutate(spec):
        part = getattr(spec, model)
        values = {k: v(getattr(part.attention.rope, k)) for k, v in changes.items()}
        turned = replace(part.attention, rope=replace(part.attention.rope, **values))
        return replace(spec, **{model: replace(part, attention=turned)})

    return mutate


# Programs: an architecture written wrongly.


def ops(condition, **changes):
    """A function of PairPrograms: fields of the ops that ``condition`` selects replaced, in every pass."""

    def mutate(programs):
        return PairPrograms(*(_mutated(getattr(programs, p), condition, changes) for p in PASSES))

    return mutate


def _mutated(program, condition, changes):
    changed = [
        replace(op, **{k: v(getattr(op, k)) for k, v in changes.items()}) if condition(op) else op for op in program.ops
    ]
    return replace(program, ops=tuple(changed))


def flip(value):
    return not value


def reads(suffix, model="target."):
    """Ops with a ``plus_one`` that read a weight of ``model`` with this ending."""
    return lambda op: hasattr(op, "plus_one") and any(w.startswith(model) and w.endswith(suffix) for w in op.weights)


def attends(model):
    return lambda op: isinstance(op, Attend) and op.state.startswith(model)


# Functions: a kernel or the loop written wrongly. Each takes pytest's monkeypatch.


def positions(shift, dims):
    """Rotary tables of ``dims`` dims start at position ``shift``."""

    def apply(patch):
        original = interpreter.rope_table

        def table(spec, capacity):
            cos, sin = original(spec, capacity + 1)
            if spec.dims != dims:
                return cos, sin
            if shift > 0:
                return cos[1:], sin[1:]
            return torch.cat((cos[1:2], cos[:-1])), torch.cat((-sin[1:2], sin[:-1]))

        patch.setattr(interpreter, "rope_table", table)

    return apply


def pass_starts_at(program_name, shift):
    """One pass runs ``shift`` positions away from the committed length."""

    def apply(patch):
        original = Interpreter.run

        def run(self, program, ids, memory, *args, **kwargs):
            off = shift if program.name == program_name and memory.length + shift >= 0 else 0
            memory.length += off
            try:
                return original(self, program, ids, memory, *args, **kwargs)
            finally:
                memory.length -= off

        patch.setattr(Interpreter, "run", run)

    return apply


def context_rows(permute):
    """The drafter's context K/V are appended in another order than that of the positions."""

    def apply(patch):
        original = interpreter.store_context

        def store(op, k, v, k_norm, table, memory, start, rows):
            if isinstance(op, KvAppend):
                order = permute(rows)
                k, v = k[order], v[order]
                table = (table[0][: len(order)], table[1][: len(order)])
            return original(op, k, v, k_norm, table, memory, start, rows)

        patch.setattr(interpreter, "store_context", store)

    return apply


def row_zero_is_a_draft(patch):
    original = Interpreter._execute

    def execute(self, op, run, memory, observer):
        if isinstance(op, SelectRows) and op.which == "drafts":
            rows = run.valid[op.inputs[0]] - 1
            return interpreter.pad(run.tensors[op.inputs[0]][:rows], interpreter.padded_rows(rows)), rows
        return original(self, op, run, memory, observer)

    patch.setattr(Interpreter, "_execute", execute)


def gate_layout(reorder):
    """The target's q projection is read in another order; ``reorder`` takes [rows, heads, 2, D]."""

    def apply(patch):
        original = interpreter.attend

        def attend(op, q, *args):
            if op.gated:
                q = reorder(q.view(-1, op.heads, 2, op.head_dim), op).reshape(q.shape)
            return original(op, q, *args)

        patch.setattr(interpreter, "attend", attend)

    return apply


def gate_first(q, op):
    return q.flip(2)


def gate_in_second_half(q, op):
    return q.reshape(-1, 2, op.heads, op.head_dim).transpose(1, 2)


def commits(change):
    """``change`` takes (rows to commit, rows in flight) and gives the rows that are replayed."""

    def apply(patch):
        original = DeltaMemory.commit

        def commit(self, rows):
            flight = 0 if self.in_flight is None else len(self.in_flight)
            original(self, max(0, min(flight, change(rows, flight))))

        patch.setattr(DeltaMemory, "commit", commit)

    return apply


def conv_history_stays(patch):
    original = DeltaMemory.replay

    def replay(self, *args):
        history = self.history
        original(self, *args)
        self.history = history

    patch.setattr(DeltaMemory, "replay", replay)


def delta_norm_is_one_plus_w(patch):
    original = delta.rms_norm
    patch.setattr(delta, "rms_norm", lambda x, w, eps, *, plus_one: original(x, w, eps, plus_one=True))


def block_keys_are_not_rounded(patch):
    """A pass sees its own rows' K/V before they were stored as FP8."""
    append, read = KvMemory.append, KvMemory.read

    def keep(self, start, k, v):
        append(self, start, k, v)
        self.fresh = (start, k, v)

    def overlay(self, rows):
        stored = read(self, rows)
        start, *fresh = self.fresh
        for whole, part in zip(stored, fresh, strict=True):
            whole[start : start + len(part)] = part
        return stored

    patch.setattr(KvMemory, "append", keep)
    patch.setattr(KvMemory, "read", overlay)


def activations_share_a_scale(patch):
    """Activations are rounded to FP8 with one scale for all rows of the pass."""
    original = dense.linear

    def linear(x, *args):
        scale = float(x.abs().max()) / 448 or 1.0
        return original(from_e4m3(to_e4m3(x, scale), scale), *args)

    patch.setattr(dense, "linear", linear)


def softmax_over_the_block(patch):
    """A row attends to the rows behind it, as with an upper-left aligned causal mask."""
    original = attention._mask
    patch.setattr(attention, "_mask", lambda rule, *rest: original((True, rule[1]), *rest))


def one_draft_too_many(patch):
    original = cycle.accepted
    patch.setattr(cycle, "accepted", lambda drafts, choices, _: min(len(drafts), original(drafts, choices) + 1))


def noise_by_row(patch):
    original = cycle.choose
    patch.setattr(cycle, "choose", lambda rows, sampling, position, masks=None: original(rows, sampling, 0))
