"""What a camera's frames cost: Qwen3.6-27B with its vision tower, random weights, frames of 800 x 600; one GPU.

    python tests/gpu/bench_tower.py [--output FILE] [--cubins FOLDER] [--commit COMMIT]

Tables: the host's work on frames; passes of the tower, and its rate beside that of a BF16 product; first tokens of
plans from frames, and of a text with as many tokens; device memory. Times are medians after a warm-up; those of plans
run from the call to the first token. The tower is BF16, the language model NVFP4; one frame also with an FP8 tower.
"""

import argparse
import json
import os
import random
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken

from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.kernels.linear import LinearWeights
from edge_dflash.backends.cuda.memory import Allocator
from edge_dflash.backends.cuda.support import device_sm
from edge_dflash.backends.cuda.tower import Tower, TowerLayout
from edge_dflash.bench.device import CUBINS, probe_device
from edge_dflash.bench.provenance import ClockSample, describe
from edge_dflash.bench.random_pair import RandomWeights, synthetic_tokenizer
from edge_dflash.board.archs import arch_of_sm
from edge_dflash.checks.footprint import PICTURE, tower_operations
from edge_dflash.checks.inspect import default_chunk
from edge_dflash.decode.backend import Precision
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_pair
from edge_dflash.model.vision import TOWER
from edge_dflash.pictures.picture import pictures_of
from edge_dflash.planner import Planner
from edge_dflash.text.template import ChatTemplate
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.formats import Fp8Weight, WideWeight
from edge_dflash.weights.layout import repack

PAIR = Path(__file__).parents[1] / "configs" / "qwen3.6-27b-sees"
CONTEXT, COUNTS, RUNS = 8192, (1, 4, 12), 5
CONTROLS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")  # the last ids, in this order
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
ASKED = "Name the steps that bring the red mug to the table, and what stands in the way. " * 6
KINDS = ("text", "new", "known", "session")  # of prompts
say = partial(print, file=sys.stderr, flush=True)


class TowerWeights(RandomWeights):
    """Random weights of a pair that sees; the tower's are made on the host, for its widths are no whole units."""

    def __init__(self, pair, kind, cubin, tower="bf16"):
        super().__init__(pair, kind, cubin)
        linears = (name for name, spec in pair_programs(pair).see.weights.items() if spec.kind == "linear")
        self._formats |= dict.fromkeys(linears, tower)
        self._made = {}

    def stack(self, gpu, stack):
        if not stack.key.startswith(TOWER):
            return super().stack(gpu, stack)
        if (made := self._made.get(stack.layout)) is None:
            made = self._made[stack.layout] = repack([self._linear(n, stack.layout) for n in stack.layout.columns])
        return LinearWeights.of(gpu, made)

    def vector(self, name):
        found = super().vector(name)
        return 0 * found if name.startswith(TOWER) and name.endswith("bias") else found

    def _linear(self, n, layout):
        values = np.random.default_rng((n, layout.k)).standard_normal((n, layout.k), np.float32)
        scale = np.float32(layout.k**-0.5)
        if layout.format == "fp8":
            codes = torch.from_numpy(values * 64).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            return Fp8Weight(codes, np.array([scale / 64]))
        return WideWeight(((values * scale).view(np.uint32) >> 16).astype(np.uint16))


def seeing_pair(path=PAIR):
    """The pair with the control tokens of :func:`tokenizer`, and that."""
    pair = read_pair(path / "target", path / "drafter")
    first = pair.target.vocab_size - len(CONTROLS)
    ids = {"vision_start_token_id": first, "image_token_id": first + 1}
    ids |= {"vision_end_token_id": first + 2, "video_token_id": first + 3}
    vision = replace(pair.target.vision, **ids)
    return replace(pair, target=replace(pair.target, vision=vision)), tokenizer(first)


def tokenizer(size):
    """``size`` made-up ids, then the control tokens of images."""
    made = synthetic_tokenizer(size)
    words = made._tokenizer
    words.add_special_tokens([AddedToken(name, special=True) for name in CONTROLS])
    return Tokenizer(words, ChatTemplate(TEMPLATE, {}, "bench_tower"), made.eos_token_id)


def frame(seed):
    """Pixels of a frame: squares of 20 with noise."""
    rng, (height, width) = np.random.default_rng(seed), PICTURE
    squares = rng.integers(0, 240, (height // 20, width // 20, 3), np.uint8)
    return squares.repeat(20, 0).repeat(20, 1) + rng.integers(0, 16, (height, width, 3), np.uint8)


def encoded(pixels, kind):
    """A file's bytes, or the pixels themselves."""
    if kind == "array":
        return pixels
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def middle(work, runs=RUNS):
    """Median of seconds after a warm-up; ``work`` gives them, or is timed."""

    def once():
        began = time.perf_counter()
        given = work()
        return given if isinstance(given, float) else time.perf_counter() - began

    once()
    return median(once() for _ in range(runs))


def host_rows(patches):
    """Seconds from what a caller gives to patches: kinds and numbers of frames, on two cores and on all."""
    rows, cores = [], sorted(os.sched_getaffinity(0))
    for used in (cores[:2], cores):
        os.sched_setaffinity(0, used)
        try:
            for kind in ("array", "PNG", "JPEG"):
                given = [encoded(frame(seed), kind) for seed in range(max(COUNTS))]
                for count in COUNTS:
                    seconds = middle(partial(pictures_of, given[:count], patches))
                    rows.append({"cores": len(used), "given": kind, "frames": count, "ms": 1e3 * seconds})
        finally:
            os.sched_setaffinity(0, cores)
    return rows


def tower_row(gpu, tower, see, program, patches, count, form, rate):
    """A row for so many frames: wall time of their passes, device time of the kernels, operations a second."""
    pictures = pictures_of([frame(seed) for seed in range(count)], patches)
    wall = middle(lambda: [see(picture) for picture in pictures] and None)
    rows = len(pictures[0].levels)
    kernels = count * middle(lambda: gpu.seconds(partial(tower._compute, rows)))
    work = count * sum(tower_operations(program, rows))
    row = {"frames": count, "weights": form, "patches": rows, "tokens": count * pictures[0].tokens, "operations": work}
    row |= {"ms": 1e3 * wall, "kernels_ms": 1e3 * kernels, "operations_s": work / wall}
    return row | {"of_matmul": work / wall / rate if rate else None}


def eight_bit_row(pair, cubin, patches, rate):
    """A row for one frame and a tower with FP8 weights, loaded alone."""
    program = pair_programs(pair).see
    with closing(Gpu()) as gpu:
        layout = TowerLayout.of(pair.target.vision, program, CONTEXT)
        tower = Tower(gpu, layout, TowerWeights(pair, "nvfp4", cubin, "fp8"), cubin, Allocator(gpu))
        return tower_row(gpu, tower, tower.see, program, patches, 1, "fp8", rate)


class Asking:
    """First tokens of plans: every prompt is new to the planner, frames are as a kind of prompt says."""

    def __init__(self, planner):
        self._planner, self._number, self._kept = planner, 0, {}

    def _next(self):
        self._number += 1
        return self._number

    def _said(self, frames, text=ASKED):
        shown = [{"type": "image", "image": one} for one in frames]
        front = {"type": "text", "text": f"{self._next():05} is this run. "}
        return [{"role": "user", "content": [front, *shown, {"type": "text", "text": text}]}]

    def _fresh(self, count):
        return [frame(1000 + self._next()) for _ in range(count)]

    def text(self, count):
        """A text with as many tokens as there are with so many frames."""
        length = len(self._planner.encode(self._said(self._fresh(count))))
        draw, controls = random.Random(self._next()), self._planner.tokenizer.control_id(CONTROLS[0])
        return self._planner.plan([draw.randrange(256, controls) for _ in range(length)], max_new_tokens=1)

    def new(self, count):
        """Frames that were never seen."""
        return self._planner.plan(self._said(self._fresh(count)), max_new_tokens=1)

    def known(self, count):
        """Frames that were seen, behind another text: rows are there, the prompt is computed."""
        if count not in self._kept:
            self._kept[count] = self._fresh(count)
        return self._planner.plan(self._said(self._kept[count]), max_new_tokens=1)

    def session(self, count):
        """One more frame in a session that has the others."""
        with self._planner.session() as session:
            before = session.plan(self._said(self._fresh(count - 1)), max_new_tokens=1)
            found = session.plan(self._said(self._fresh(1)), max_new_tokens=1)
        assert found.reused_tokens >= before.prompt_tokens
        return found

    def row(self, count):
        """Each kind of prompt with so many frames; without frames a text and a message."""
        row = {"frames": count}
        for kind in KINDS if count else KINDS[:2]:
            before, plans = self._planner.pictures, [getattr(self, kind)(count) for _ in range(1 + RUNS)]
            after, timings = self._planner.pictures, [plan.timings for plan in plans[1:]]
            assert kind == "session" or not any(plan.reused_tokens for plan in plans)
            row[kind] = {
                "prompt_tokens": plans[-1].prompt_tokens,
                "reused_tokens": plans[-1].reused_tokens,
                "first_token_ms": 1e3 * median(one.first_token_seconds for one in timings),
                "prefill_ms": 1e3 * median(one.prefill_seconds for one in timings),
                "hits": after.hits - before.hits,
                "misses": after.misses - before.misses,
            }
        return row


def measure(keep, folder):
    """Everything in turn; ``keep`` is told the figures after each part, so that a run that is cut leaves some."""
    pair, words = seeing_pair()
    patches, programs, (device, cubin) = pair.target.vision.patches, pair_programs(pair), probe_device(folder, say)
    found = {"machine": {**describe(), **device.description}, "bandwidth": device.bandwidth}
    found |= {"matmul_rate": device.matmul_rate, "matmul_by": device.matmul_by}
    found["host"] = host_rows(patches)
    keep(found)
    found["tower"] = [eight_bit_row(pair, cubin, patches, device.matmul_rate)]
    keep(found)
    began, weights = time.perf_counter(), TowerWeights(pair, "nvfp4", cubin)
    chunk = default_chunk(arch_of_sm(device_sm()), programs, CONTEXT)
    backend = NativeBackend(pair, weights, Precision(), cubin=cubin, max_context=CONTEXT, prefill_chunk=chunk)
    found |= {"load_s": time.perf_counter() - began, "prefill_chunk": chunk, "memory": dict(backend.budget)}
    with Planner(backend, words, (words.eos_token_id,), vision=pair.target.vision, fallback=False) as planner:
        sample, rate = ClockSample(), device.matmul_rate
        found["tower"] += [
            tower_row(backend.gpu, backend.loaded.tower, backend.see, programs.see, patches, count, "bf16", rate)
            for count in COUNTS
        ]
        found["clocks"] = sample.result()
        keep(found)
        asking, found["plans"] = Asking(planner), []
        for count in (0, *COUNTS):
            found["plans"].append(asking.row(count))
            keep(found)
    return found


def table(found):
    """The figures for people."""
    rate = found["matmul_rate"]
    lines = [f"{found['machine'].get('device')}, BF16 product {rate / 1e12 if rate else 0:.0f} TFLOP/s"]
    for row in found["host"]:
        lines.append(f"host, {row['cores']:>3} cores  {row['given']:>5} x {row['frames']:>2}: {row['ms']:8.2f} ms")
    for row in found["tower"]:
        share = f", {row['of_matmul']:.1%} of the product's rate" if row["of_matmul"] else ""
        lines.append(
            f"tower {row['weights']} x {row['frames']:>2}: {row['ms']:8.2f} ms, kernels {row['kernels_ms']:8.2f} ms, "
            f"{row['operations_s'] / 1e12:.1f} TFLOP/s{share}"
        )
    for row in found["plans"]:
        cells = (f"{kind} {row[kind]['first_token_ms']:.1f}" for kind in KINDS if kind in row)
        tokens = row["new"]["prompt_tokens"]
        lines.append(f"first token, {row['frames']:>2} frames, {tokens:>5} tokens: {', '.join(cells)} ms")
    lines += [f"memory, {name}: {size / 2**20:,.0f} MiB" for name, size in found["memory"].items()]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cubins", type=Path, default=CUBINS)
    parser.add_argument("--commit", help="what to record where git does not know it")
    parser.add_argument("--output", type=Path, default=Path("bench_tower.json"))
    options, began = parser.parse_args(), time.perf_counter()

    def keep(found):
        if options.commit:
            found["machine"]["commit"] = options.commit
        found["seconds"] = time.perf_counter() - began
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    found = measure(keep, options.cubins)
    print(table(found))
    say(f"written: {options.output}, {found['seconds']:.0f} s")


if __name__ == "__main__":
    main()
