"""Forecast of a cycle, a prompt's pass or a picture on boards with few multiprocessors, from a large GPU.

    python tests/scripts/few_multiprocessors.py [--pair qwen3.6-27b] [--board T5000] [--output FILE]
    python tests/scripts/few_multiprocessors.py --pair qwen3.6-27b --board T5000 --rows 16,32,64,128
    python tests/scripts/few_multiprocessors.py --pair qwen3.6-27b --board T5000 --work prompt --rows 64,128,512
    python tests/scripts/few_multiprocessors.py --board T5000 --work frame
    python tests/scripts/few_multiprocessors.py --pair qwen3.6-35b-a3b --rows 1,5,9,16 --correlation 0

Sleeping blocks hold all multiprocessors but a set that looks like the board's; its kernels and plans run on those.
Each kind of step is timed alone (weights rotate through more than the L2 cache holds), scaled by the clocks, and
counts as the slower of that and of its bytes at the board's read rate. ``--rows``: of a cycle's passes; of joint ones
(above 16) linears and heads alone are timed. Of a target with experts they choose experts at random, ``--correlation``
of them alike; all else takes at least a full block's time. Prompts: linears of many rows. Frames: the vision tower of
Qwen3.6-27B, 1,900 patches. Prints tables with their caveats and one JSON line last: ``products_ms`` and
``flops_a_clock`` (a multiprocessor) are what rates in board/archs.py are made of.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from statistics import median

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "support"))

from delta_bytes import pass_bytes
from forecast import BOARDS, CAVEATS, Kind, picked, summary, table
from occupied import Occupied, Sleepers

from edge_dflash.backends.cuda.compile import cached_cubin
from edge_dflash.backends.cuda.kernels.attend import AttendTensors, Attention
from edge_dflash.backends.cuda.kernels.cycle import CycleKernels
from edge_dflash.backends.cuda.kernels.delta import DeltaKernels, DeltaScratch, DeltaTensors
from edge_dflash.backends.cuda.kernels.experts import ExpertKernels, ExpertsBuffers, ExpertWeights, Forced
from edge_dflash.backends.cuda.kernels.linear import Linears, LinearWeights
from edge_dflash.backends.cuda.kernels.small import Small
from edge_dflash.backends.cuda.memory import (
    CONTROL_BYTES,
    NULL,
    Allocator,
    Control,
    Matrix,
    Norm,
    Words,
    control_word,
)
from edge_dflash.backends.cuda.mixtures import mixes, shape_of
from edge_dflash.backends.cuda.schedule import schedule
from edge_dflash.backends.cuda.states import Sizes, States
from edge_dflash.backends.cuda.steps import Copy, Gather, Head, Mix, Multiply, Normalise, Project, State
from edge_dflash.backends.cuda.tower import Looked, Product, Tower, TowerLayout
from edge_dflash.bench.random_pair import RandomWeights, synthetic_pair
from edge_dflash.bench.workload import routing
from edge_dflash.checks.footprint import picture_patches
from edge_dflash.decode.backend import Precision
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Attend, GatedDelta
from edge_dflash.model.registry import read_pair

CACHE = Path(__file__).parents[2] / "build" / "cubins"
PAIRS = ("qwen3.6-27b", "qwen3.5-4b")
FRAME = "qwen3.6-27b-sees"
SEES = Path(__file__).parents[1] / "configs" / FRAME
MIXTURES = ("qwen3.6-35b-a3b", "qwen3-coder-30b-a3b")
ARENA, PERIOD = 1 << 31, 2304  # bytes; a stack starts where the NVFP4 pattern of bench_fill starts
ROWS, MOST_ROWS, CONTEXT, PENDING = 16, 128, 570, 5
PROMPT_ROWS = 512
NAMES = {"in_proj_qkv": "qkv", "in_proj_z": "z", "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"}
NAMES |= {"out_proj": "out", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def label(step):
    """The kind of a step: those of one name and one shape are timed once."""
    names = step.stack.names if hasattr(step, "stack") else ()
    own = "drafter " if (names or (*step.reads, ""))[0].startswith("drafter.") else ""
    if isinstance(step, State):
        return own + type(step.op).__name__
    if not names:
        return type(step).__name__
    short = [NAMES.get(n.rsplit(".", 1)[-1], n.rsplit(".", 1)[-1]) for n in names]
    return own + (" ".join(short) if len(short) < 4 else f"{short[0]} {short[1]} x {len(short) // 2}")


def stack_bytes(step):
    """Bytes of a step's weights."""
    side = getattr(step, "side", None)
    return step.stack.layout.nbytes + (side.layout.nbytes if side else 0)


def weights_of(step):
    """Weights that a row is multiplied with."""
    side = getattr(step, "side", None)
    return sum(sum(stack.layout.columns) * stack.layout.k for stack in (step.stack, side) if stack)


def by_label(steps):
    """(kind, how many, steps of it) of (plan, step) in order."""
    found = {}
    for plan, step in steps:
        found.setdefault(label(step), []).append((plan, step))
    return [(name, len(same), same) for name, same in found.items()]


class Frame:
    """The vision tower of a pair over one picture. Its weights are read where the arena's are."""

    def __init__(self, gpu, cubin):
        self.gpu, self.cubin = gpu, cubin
        self.pair = read_pair(SEES / "target", SEES / "drafter")
        self.program = pair_programs(self.pair).see
        self.patches = picture_patches(self.pair.target.vision)
        self.formats = dict.fromkeys(self.program.weights, "bf16")
        self.arena = gpu.allocate(max(2 * prod(spec.shape) for spec in self.program.weights.values()) << 1)
        gpu.fill(self.arena)

    def stack(self, gpu, stack):
        return LinearWeights(stack.layout, self.arena.at(0, stack.layout.nbytes), self.arena)

    def embedding(self, gpu, name):
        return self.arena

    def vector(self, name):
        return np.zeros(self.program.weights[name].shape, np.float32)

    def load(self):
        """The tower for what the device now says it is."""
        layout = TowerLayout.of(self.pair.target.vision, self.program, 1024)
        self.tower = Tower(self.gpu, layout, self, self.cubin, Allocator(self.gpu))
        self.steps = layout.schedule.steps

    def kinds(self):
        """See :meth:`Proxy.kinds`: linears by shape, attention, and the rest by what they are."""
        found = {}
        for step in self.steps:
            rows = self.patches // self.tower._schedule.folds[step.writes[0]]
            shape = self.program.weights[step.weight].shape if isinstance(step, Product) else ()
            found.setdefault((type(step).__name__, *shape, rows), []).append(step)
        for (name, *shape, rows), steps in found.items():
            flops, nbytes = (2 * rows * prod(shape), 2 * prod(shape)) if shape else (0, 0)
            if isinstance(steps[0], Looked):
                flops = 4 * rows**2 * steps[0].op.heads * steps[0].op.head_dim
            calls = [partial(self.tower._run, step, self.patches) for step in steps[:4]]
            yield Kind(" x ".join(map(str, [name, *shape])), len(steps), nbytes, 0.0, False, flops), calls


class Proxy:
    """Buffers and states of one pair, and its steps."""

    def __init__(self, gpu, name, cubin, correlation=0.0):
        self.gpu, self.cubin, self.pass_rows = gpu, cubin, ROWS
        pair = synthetic_pair(name)
        programs = pair_programs(pair)
        weights = RandomWeights(pair, "nvfp4", self.cubin)
        passes = [schedule(p, weights.formats, wide=False) for p in (programs.verify, programs.propose)]
        self.steps = [(plan, step) for plan in passes for step in plan.steps if not isinstance(step, Gather)]
        prompt = schedule(programs.prefill, weights.formats, wide=True)
        self.prompt = [(prompt, step) for step in prompt.steps if isinstance(step, Multiply | Project)]
        sizes = Sizes(rows=ROWS, prefill_rows=64, max_context=1024)
        self.states = States(programs, Precision(), sizes, weights.vector, weights.kv_scale, Allocator(gpu))
        for layer in self.states.delta.values():
            for pointer in (layer.state, layer.history, layer.tape_u, layer.tape_g, layer.tape_beta):
                gpu.fill(pointer)
        floats, counters = (gpu.allocate(n) for n in self.states.delta_scratch)
        gpu.fill(counters)
        self.delta_scratch = DeltaScratch(floats, counters)
        self.attention_scratch, self.scratch = gpu.allocate(self.states.attention_scratch), gpu.allocate(64 << 20)
        self.control = gpu.allocate(CONTROL_BYTES)
        gpu.fill(self.control)
        for word, value in ((Control.LENGTH, CONTEXT), (Control.PENDING, PENDING)):
            gpu.write(control_word(self.control, word), np.array([value], np.int32))
        self.words = Words(self.control)
        self.arena = gpu.allocate(ARENA)
        fill = gpu.load(self.cubin("bench")).kernel("bench_fill")
        gpu.launch(fill, (1024, 1, 1), 512, (self.arena, ctypes.c_longlong(ARENA // 4), 7))
        self.scale = gpu.upload(np.full(600_000, 1e-3, np.float32))
        rng = np.random.default_rng(0)
        x = rng.standard_normal((PROMPT_ROWS, 32768), dtype=np.float32)
        self.x = gpu.upload((x.view(np.uint32) >> 16).astype(np.uint16))
        self.y = gpu.allocate(2 * MOST_ROWS * 300_000)
        self.mixes = mixes(passes)
        if self.mixes:
            self.take_experts(correlation)

    def take_experts(self, correlation):
        """Buffers, a router and choices of all mixtures."""
        gpu, shape = self.gpu, shape_of(next(iter(self.mixes.values())))
        self.buffers = ExpertsBuffers.take(Allocator(gpu), shape, MOST_ROWS)
        gpu.fill(self.buffers.distinct)
        self.router = gpu.allocate(2 * (shape.experts + 1) * shape.hidden)
        gpu.fill(self.router)
        table = routing(shape.experts, shape.chosen, correlation)
        length = control_word(self.control, Control.LENGTH)
        self.forced = Forced(gpu.upload(table), len(table), length)
        self.table, self.shared = table, shape.shared
        self.take_rows(ROWS)

    def take_rows(self, rows):
        """Let passes have so many rows; of a mixture they choose experts, all else has a full block at least."""
        self.pass_rows = max(ROWS, rows)
        if not self.mixes:
            return
        lines = (CONTEXT + np.arange(rows)) % len(self.table)
        self.rows, self.read = rows, len(np.unique(self.table[lines])) + self.shared

    def load(self):
        """Kernels for what the device now says it is."""
        gpu, modules = self.gpu, {}

        def module(unit):
            if unit not in modules:
                modules[unit] = gpu.load(self.cubin(unit))
            return modules[unit]

        self.linears = Linears(gpu, self.cubin, most_rows=ROWS, joint=MOST_ROWS)
        self.experts = ExpertKernels(gpu, self.cubin) if self.mixes else None
        self.small, self.cycle = Small(gpu, module("small")), CycleKernels(gpu, module("cycle"))
        self.attention = {n: Attention(gpu, module("attend"), s) for n, s in self.states.shapes.items()}
        self.delta = {n: DeltaKernels(gpu, module("delta"), s) for n, s in self.states.delta_shapes.items()}

    def kinds(self):
        """(kind, enqueue several, how many they are): kinds without their times. Of joint passes linears alone."""
        joint = self.pass_rows > ROWS
        for name, times, steps in by_label(self.steps):
            plan, step = steps[0]
            if joint and not hasattr(step, "stack"):
                continue
            if hasattr(step, "stack"):
                nbytes, calls = self.rotating(step, partial(self.linear, plan, step))
            elif isinstance(step, Mix):
                nbytes = self.read * (step.up.layout.nbytes + step.down.layout.nbytes)
                nbytes += 2 * step.up.layout.k * step.up.experts
                span = -(-(step.up.nbytes + step.down.nbytes) // PERIOD) * PERIOD
                calls = [partial(self.mix, plan, step, i * span) for i in range(ARENA // span)]
            else:
                nbytes = self.state_bytes(step) if isinstance(step, State) else 0
                calls = [partial(self.other, *found) for found in steps[:16]]
                calls *= 1 if len(calls) > 4 else 4
            stack = step.up if isinstance(step, Mix) else getattr(step, "stack", None)
            nvfp4 = stack is not None and stack.layout.format == "nvfp4"
            flops = 2 * self.pass_rows * weights_of(step) if hasattr(step, "stack") else 0
            yield Kind(name, times, nbytes, 0.0, nvfp4, flops), calls

    def prompt_kinds(self, rows):
        """The same of the linears of a prompt's pass of so many rows."""
        for name, times, steps in by_label(self.prompt):
            plan, step = steps[0]
            nbytes, calls = self.rotating(step, partial(self.tile, plan, step, rows))
            nvfp4 = step.stack.layout.format == "nvfp4"
            yield Kind(name, times, nbytes, 0.0, nvfp4, 2 * rows * weights_of(step)), calls

    @staticmethod
    def rotating(step, call):
        """Bytes of a step's weights, and calls that go through copies of them."""
        nbytes = stack_bytes(step)
        span = -(-nbytes // PERIOD) * PERIOD
        copies = max(1, min(12, ARENA // span))
        return nbytes, [partial(call, i * span) for i in range(copies)] * max(1, 3 // copies)

    def state_bytes(self, step):
        op = step.op
        if isinstance(op, GatedDelta):
            return pass_bytes(self.states.delta_shapes[op.state], PENDING, ROWS)
        size = self.states.shapes[op.state]
        read = min(CONTEXT, size.window or CONTEXT) if isinstance(op, Attend) else 0
        return 2 * size.kv_heads * size.head_dim * (read + ROWS)

    def matrix(self, plan, name, buffer):
        root, column = plan.place(name)
        return Matrix(buffer.at(2 * column, buffer.nbytes - 2 * column), plan.columns.get(root, plan.widths[root]))

    def tile(self, plan, step, rows, offset):
        layout = step.stack.layout
        weights = LinearWeights(layout, self.arena.at(offset, layout.nbytes), self.scale)
        out = [self.matrix(plan, name, self.y) for name in step.writes]
        out = out[:1] if isinstance(step, Project) else out
        residual = out[0] if isinstance(step, Project) and len(step.reads) > 1 else None
        self.linears.tiles(weights, self.matrix(plan, step.reads[0], self.x), out, rows, residual=residual)

    def linear(self, plan, step, offset):
        rows, layout = self.pass_rows, step.stack.layout
        weights = LinearWeights(layout, self.arena.at(offset, layout.nbytes), self.scale)
        x = self.matrix(plan, step.reads[0], self.x)
        if isinstance(step, Head):
            self.linears.greedy(weights, x, self.y, rows, self.scratch)
            return
        out = [self.matrix(plan, name, self.y) for name in step.writes]
        if isinstance(step, Project):
            residual = out[0] if len(step.reads) > 1 else None
            norm = Norm(self.scale, 1e-6, replace(out[1], pointer=self.x)) if step.norm else None
            self.linears.split_linear(weights, x, out[0], rows, self.scratch, residual=residual, norm=norm)
            return
        side, count = None, len(out) - step.side_outputs
        if step.side:
            side = LinearWeights(step.side.layout, self.arena.at(offset, step.side.layout.nbytes), self.scale)
        self.linears.linear(weights, x, out[:count], rows, side=side, side_out=out[count:])

    def mix(self, plan, step, offset):
        up = self.arena.at(offset, step.up.nbytes)
        down = self.arena.at(offset + step.up.nbytes, step.down.nbytes)
        judge = self.router if step.op.shared else NULL
        weights = ExpertWeights(self.router, judge, up, self.scale, down, self.scale)
        x, out = self.matrix(plan, step.reads[0], self.x), self.matrix(plan, step.writes[0], self.y)
        norm = Norm(self.scale, 1e-6, replace(out, pointer=self.x)) if step.norm else None
        self.experts.run(
            shape_of(step), weights, self.buffers, x, out, self.rows, residual=out, norm=norm, forced=self.forced
        )

    def other(self, plan, step):
        if isinstance(step, State):
            tensors = [self.matrix(plan, name, at) for names, at in self.sides(step) for name in names]
            state = step.op.state
            if isinstance(step.op, GatedDelta):
                self.delta[state].run(DeltaTensors(*tensors), self.states.delta[state], self.delta_scratch, self.words)
            elif isinstance(step.op, Attend):
                memory = self.states.kv[state]
                self.attention[state].attend(AttendTensors(*tensors), memory, self.attention_scratch, self.words)
            else:
                self.attention[state].append([(*tensors[:2], self.states.kv[state])], self.words)
        elif isinstance(step, Copy):
            inputs, outs = ([self.matrix(plan, n, at) for n in names] for names, at in self.sides(step))
            self.cycle.copy(inputs, outs, [plan.widths[name] for name in step.writes], ROWS)
        elif isinstance(step, Normalise):
            x, y = self.matrix(plan, step.reads[0], self.x), self.matrix(plan, step.writes[0], self.y)
            self.small.rms_norm(x, self.scale, y, ROWS, plan.widths[step.writes[0]], step.op.eps)
        else:
            raise TypeError(f"no call for step {type(step).__name__}")

    def sides(self, step):
        return (step.reads, self.x), (step.writes, self.y)


def measure(gpu, sleepers, kinds, free):
    """``kinds`` with the seconds that they take on ``free``."""
    prepared = []
    for kind, calls in kinds:
        prepared.append((kind, len(calls), gpu.capture(lambda calls=calls: [call() for call in calls])))
    gpu.synchronize()
    found = []
    with sleepers.leaving(free):
        for kind, count, graph in prepared:
            graph.launch()
            seconds = median(gpu.seconds(graph.launch) for _ in range(3))
            found.append(replace(kind, seconds=seconds / count))
    return found


def kinds_of(proxy, work, rows):
    """Load what the device now says it is, and its kinds of steps."""
    proxy.load()
    if work == "prompt":
        return proxy.prompt_kinds(rows)
    if work == "cycle":
        proxy.take_rows(rows)
    return proxy.kinds()


def rows_of(text):
    """Numbers of rows between commas."""
    rows = [int(part) for part in text.split(",")]
    if not all(1 <= each <= PROMPT_ROWS for each in rows):
        raise argparse.ArgumentTypeError(f"rows are {text}; wanted 1 to {PROMPT_ROWS}, of a cycle to {MOST_ROWS}")
    return rows


def asked():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", action="append", choices=(*PAIRS, *MIXTURES))
    parser.add_argument("--work", choices=("cycle", "prompt", "frame"), default="cycle")
    parser.add_argument("--rows", type=rows_of)
    parser.add_argument("--correlation", type=float, default=0.0)
    parser.add_argument("--board", action="append", choices=[b.name for b in BOARDS])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.rows = args.rows or {"cycle": [ROWS], "prompt": [64, 128, PROMPT_ROWS], "frame": [0]}[args.work]
    if args.work == "cycle" and max(args.rows) > MOST_ROWS:
        parser.error(f"a cycle's pass has {max(args.rows)} rows; {MOST_ROWS} at most are accepted")
    return args


def forecast(gpu, sleepers, gpcs, proxy, row, board, work):
    """A row of results for one layout of multiprocessors, with tables for people."""
    layout = tuple(map(int, row["layout"].split("/")))
    gpu.become(board.sm, layout)
    said = f"{row['pair']} on {board.name} as {row['layout']}, {work} of {row['rows']} rows"
    try:
        kinds = measure(gpu, sleepers, kinds_of(proxy, work, row["rows"]), picked(gpcs, layout))
    except Exception as error:  # a plan that does not fit is a result
        print(f"\n{said}: {type(error).__name__}: {error}")
        return row | {"error": str(error)}
    print(f"\n{said}, {board.clock} GHz; proxy {sleepers.clock:.2f} GHz; ms")
    print(table(kinds, board, sleepers.clock), flush=True)
    row |= {"clock_ghz": board.clock, "proxy_ghz": sleepers.clock, **summary(kinds, board, sleepers.clock)}
    return row | {"kinds": [asdict(k) for k in kinds]}


def main():
    args, gpu = asked(), Occupied()
    here, whole = gpu.name, gpu.sm_count
    cubin = partial(cached_cubin, arch="sm90a", cache=CACHE)
    sleepers = Sleepers(cubin("bench"))
    gpcs = sleepers.gpcs()
    print(f"{here}: GPCs of {sorted(map(len, gpcs), reverse=True)} multiprocessors")
    results = []
    for name in [FRAME] if args.work == "frame" else args.pair or PAIRS:
        proxy = Frame(gpu, cubin) if args.work == "frame" else Proxy(gpu, name, cubin, args.correlation)
        for board, rows in product(BOARDS, args.rows):
            for layout in board.layouts if not args.board or board.name in args.board else ():
                row = {"pair": name, "board": board.name, "work": args.work, "rows": rows}
                row["layout"] = "/".join(map(str, layout))
                results.append(forecast(gpu, sleepers, gpcs, proxy, row, board, args.work))
    print("\n" + "\n".join(CAVEATS) + "\n")
    for r in results:
        said = "compute {compute_ms:6.1f} ms, memory {memory_ms:6.1f}, forecast {forecast_ms:6.1f}"
        said += ", converted {converted_ms:6.1f}; products {products_ms:6.1f}, {flops_a_clock:.0f} FLOP a clock"
        print(f"{r['pair']:12s} {r['board']:14s} {r['rows']:3d} {r['layout']:6s} {r.get('error') or said.format(**r)}")
    text = json.dumps({"device": here, "multiprocessors": whole, "gpcs": gpcs, "results": results})
    if args.output:
        args.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
