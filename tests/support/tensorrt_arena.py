"""Runs the TensorRT backend's schedule on a CPU: plans interpreted, other ops by the reference, tensors in one arena.

Everything that a device would do is done on bytes at the addresses that the schedule binds; memory starts as NaN, so
that what is read before it is written shows.
"""

import numpy as np
import torch
from golden_pairs import ENGINE
from tensorrt_support import Formatted, lowered, rows_of, spec, tensorrt, units
from trt_interpreter import run as interpret

from edge_dflash.backends.cuda.steps import Convolve, Draft, Last, State
from edge_dflash.backends.reference.dense import TorchWeights, pad, padded_rows
from edge_dflash.backends.reference.interpreter import Interpreter, Memory, _Pass
from edge_dflash.backends.tensorrt.runs import RunEngine, RunExperts, engine_pass
from edge_dflash.backends.tensorrt.units import CHOICES
from edge_dflash.decode.walk import WalkRows
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import KvAppend

NAN = 0x7FFF  # BF16


class ArenaBackend:
    """One sequence of a pair on interpreted plans."""

    def __init__(self, name: str, store: Formatted, capacity: int = 128):
        self.pair, self.vocabulary = units(name), spec(name).target.vocab_size
        self.drafter, self.block = spec(name).drafter, spec(name).verify_rows  # rows of the head
        self.plans = {key: lowered(unit, store) for key, unit in self.pair.units.items()}
        self.constants = {key: {} for key in self.plans}
        self.passes = {which: engine_pass(self.pair, which, most) for which, most in rows_of(spec(name)).items()}
        self.weights = TorchWeights(store)
        self.interpreter = Interpreter(self.weights, ENGINE)
        self.memory = Memory.allocate(pair_programs(spec(name)).states, capacity, ENGINE, store.kv_scale)

    @torch.inference_mode()
    def run(self, which, ids):
        """Logits [rows, V] and choices [rows] of one pass, rows as the head made them."""
        plan, rows = self.passes[which], len(ids)
        assert rows == plan.rows or which == "prefill"
        self.buffers = {
            "arena": np.full(plan.arena // 2, NAN, np.uint16),
            "logits": np.full(self.block * self.vocabulary, NAN, np.uint16),
            "ids": np.array(ids, np.int32),
            "choices": np.full(self.block, -1, np.int32),
        }
        for step in plan.schedule.steps:
            match step:
                case RunEngine():
                    self._plan(plan, step, rows)
                case State():
                    self._state(plan, step, rows)
                case Convolve() | RunExperts():
                    self._state(plan, step, rows)
                case Draft():
                    self._draft(plan, step, ids)
                case Last():
                    last = self._read(plan.address(step.reads[0]), rows, plan.schedule.widths[step.reads[0]])[-1:]
                    self._write(plan.address(step.writes[0]), np.repeat(last[:, ::-1], self.block, 0))  # garbage
                    self._write(plan.address(step.writes[0]), last)
        made = 1 if which == "prefill" else rows
        if which == "prefill":
            self.memory.length += rows
        logits = self.buffers["logits"][: made * self.vocabulary].reshape(made, self.vocabulary)
        return widened(logits), self.buffers["choices"][:made]

    def commit(self, rows):
        for memory in self.memory.delta.values():
            memory.commit(rows)
        self.memory.length += rows

    def _plan(self, plan, step, rows):
        bound, unit = plan.bound(step), self.pair.units[step.run.key]
        count = bound.rows or rows
        profile = unit.profiles[bound.profile]
        assert profile.low <= count <= profile.high
        addresses = dict(bound.addresses)
        inputs = {
            b.name: self.buffers["ids"]
            if b.columns is None
            else self._rows(addresses[b.name], min(rows, count), count, b.columns)
            for b in unit.inputs
        }
        found = interpret(tensorrt()[0], self.plans[unit.key].network, inputs, constants=self.constants[unit.key])
        for binding in unit.outputs:
            if binding.name == CHOICES:
                self.buffers["choices"][:count] = found[CHOICES]
            else:
                self._write(addresses[binding.name], found[binding.name])

    def _state(self, plan, step, rows):
        tensors = {
            name: pad(
                torch.from_numpy(self._read(plan.address(name), rows, plan.schedule.widths[name])), padded_rows(rows)
            )
            for name in step.op.inputs
        }
        start = self.memory.length
        run = _Pass(start, plan.schedule.program.commits, tensors, dict.fromkeys(tensors, rows), None)
        value, _ = self.interpreter._execute(step.op, run, self.memory, None)
        if not isinstance(step.op, KvAppend):
            self._write(plan.address(step.op.output), value.bfloat16().float().numpy()[:rows])

    def _draft(self, plan, step, ids):
        """The walk over the rows of drafts, whose tokens replace the head's."""
        hidden = self._read(plan.address(step.reads[0]), len(ids), plan.schedule.widths[step.reads[0]])[step.first :]
        logits = self._read(plan.address(step.op.inputs[1]), len(ids), self.vocabulary)[step.first :]
        rows = WalkRows(step.op, lambda name: self.weights.tensor(name).numpy(), hidden, logits, ids[0])
        self.buffers["choices"][step.first : len(ids)] = rows.argmax()

    def _rows(self, address, valid, rows, columns):
        """Rows of an input; behind the valid ones is garbage, which the head reads when a pass has fewer rows."""
        return np.pad(self._read(address, valid, columns), ((0, rows - valid), (0, 0)), constant_values=3)

    def _read(self, address, rows, columns):
        first = address.offset // 2
        values = widened(self.buffers[address.buffer][first : first + rows * columns].reshape(rows, columns))
        assert np.isfinite(values).all(), address
        return values

    def _write(self, address, values):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16  # values are BF16 already
        first = address.offset // 2
        self.buffers[address.buffer][first : first + values.size] = bits.astype(np.uint16).reshape(-1)


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)
