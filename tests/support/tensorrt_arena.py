"""Runs the TensorRT backend's schedule on a CPU: plans interpreted, other ops by the reference, tensors in one arena.

Everything that a device would do is done on bytes at the addresses that the schedule binds; memory starts as NaN, so
that what is read before it is written shows.
"""

import numpy as np
import torch
from golden_pairs import ENGINE
from tensorrt_support import Formatted, cut, lowered, spec, tensorrt
from tensorrt_walk import address
from trt_interpreter import run as interpret

from edge_dflash.backends.cuda.steps import Convolve, Draft, Gather, Last, Mix, State
from edge_dflash.backends.cuda.tensorrt.units import CHOICES, HEAD, RunEngine
from edge_dflash.backends.reference.dense import TorchWeights, pad, padded_rows
from edge_dflash.backends.reference.interpreter import Interpreter, Memory, _Pass
from edge_dflash.decode.walk import WalkRows
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import KvAppend

NAN = 0x7FFF  # BF16


class ArenaBackend:
    """One sequence of a pair on interpreted plans."""

    def __init__(self, name: str, store: Formatted, capacity: int = 128):
        (self.pair, self.layout), self.vocabulary = cut(spec(name)), spec(name).target.vocab_size
        self.drafter, self.block = spec(name).drafter, spec(name).verify_rows  # rows of the head
        self.plans = {key: lowered(unit, store) for key, unit in self.pair.units.items()}
        self.constants = {key: {} for key in self.plans}
        self.weights = TorchWeights(store)
        self.interpreter = Interpreter(self.weights, ENGINE)
        self.memory = Memory.allocate(pair_programs(spec(name)).states, capacity, ENGINE, store.kv_scale)

    @torch.inference_mode()
    def run(self, which, ids):
        """Logits [rows, V] and choices [rows] of one pass, rows as the head made them."""
        self.schedule, self.places, rows = self.layout.schedules[which], self.layout.places[which], len(ids)
        assert rows == self.layout.sizes.of_pass(which) or which == "prefill"
        self.buffers = {
            "arena": np.full(self.layout.arena_bytes // 2, NAN, np.uint16),
            "logits": np.full(self.block * self.vocabulary, NAN, np.uint16),
            "choices": np.full(self.block, -1, np.int32),
        }
        for step in self.schedule.steps:
            match step:
                case RunEngine():
                    self._plan(step, rows)
                case Gather():
                    self._write(step.writes[0], self.weights.tensor(step.weight)[ids].float().numpy())
                case State() | Convolve() | Mix():
                    self._state(step, rows)
                case Draft():
                    self._draft(step, ids)
                case Last():
                    last = self._read(step.reads[0], rows)[-1:]
                    self._write(step.writes[0], np.repeat(last[:, ::-1], self.block, 0))  # garbage
                    self._write(step.writes[0], last)
        made = 1 if which == "prefill" else rows
        if which == "prefill":
            self.memory.length += rows
        logits = self.buffers["logits"][: made * self.vocabulary].reshape(made, self.vocabulary)
        return widened(logits), self.buffers["choices"][:made]

    def commit(self, rows):
        for memory in self.memory.delta.values():
            memory.commit(rows)
        self.memory.length += rows

    def _plan(self, step, rows):
        unit, bound = self.pair.units[step.key], dict((*step.inputs, *step.outputs))
        count = self.block if step.key == HEAD else rows
        profile = unit.profiles[step.profile]
        assert profile.low <= count <= profile.high
        # behind the valid rows is garbage, which the head reads when a pass has fewer
        inputs = {
            b.name: np.pad(read, ((0, count - len(read)), (0, 0)), constant_values=3)
            for b in unit.inputs
            if (read := self._read(bound[b.name], min(rows, count))) is not None
        }
        found = interpret(tensorrt()[0], self.plans[unit.key].network, inputs, constants=self.constants[unit.key])
        for binding in unit.outputs:
            if binding.name == CHOICES:
                self.buffers["choices"][:count] = found[CHOICES]
            else:
                self._write(bound[binding.name], found[binding.name])

    def _state(self, step, rows):
        tensors = {name: pad(torch.from_numpy(self._read(name, rows)), padded_rows(rows)) for name in step.op.inputs}
        start, commits = self.memory.length, self.schedule.program.commits
        run = _Pass(start, commits, tensors, dict.fromkeys(tensors, rows), None)
        value, _ = self.interpreter._execute(step.op, run, self.memory, None)
        if not isinstance(step.op, KvAppend):
            self._write(step.op.output, value.bfloat16().float().numpy()[:rows])

    def _draft(self, step, ids):
        """The walk over the rows of drafts, whose tokens replace the head's."""
        hidden, logits = (self._read(name, len(ids))[step.first :] for name in (*step.reads, step.op.inputs[1]))
        rows = WalkRows(step.op, lambda name: self.weights.tensor(name).numpy(), hidden, logits, ids[0])
        self.buffers["choices"][step.first : len(ids)] = rows.argmax()

    def _at(self, tensor):
        """The words of a tensor's buffer, from its first."""
        buffer, offset = address(self.schedule, self.places, tensor)
        return self.buffers[buffer][offset // 2 :]

    def _read(self, tensor, rows):
        columns = self.schedule.widths[tensor]
        values = widened(self._at(tensor)[: rows * columns].reshape(rows, columns))
        assert np.isfinite(values).all(), tensor
        return values

    def _write(self, tensor, values):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16  # values are BF16 already
        self._at(tensor)[: values.size] = bits.astype(np.uint16).reshape(-1)


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)
