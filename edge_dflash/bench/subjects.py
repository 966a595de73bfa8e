"""What can be benchmarked: a published pair with random weights, or a bundle. Probes the device, loads, hands over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_dflash.backends.cuda.support import device_sm
from edge_dflash.bench.device import CUBINS, Device, force_experts, probe_device
from edge_dflash.bench.random_pair import RandomWeights, synthetic_pair, synthetic_tokenizer
from edge_dflash.bench.result import BenchResult
from edge_dflash.bench.run import run
from edge_dflash.bench.workload import Form, Say, Subject, Workload, routing, tiled
from edge_dflash.board.archs import arch_of_sm
from edge_dflash.bundle.reader import read_manifest
from edge_dflash.checks.footprint import Costs
from edge_dflash.checks.inspect import default_chunk
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError, BuildError, RequestError
from edge_dflash.model import pair_programs
from edge_dflash.planner import Planner, Task
from edge_dflash.weights.layout import Format

_PROMPTS = 4  # that a bundle is timed with
_ACCEPT_LENGTH = 5.0  # of synthetic pairs, whose drafts are never right
ACTIONS = ("navigate", "open", "close", "pick", "place", "inspect", "announce", "wait")
_COLOURS = ("red", "blue", "green", "grey")
_THINGS = ("mug", "toolbox", "helmet", "sensor", "wrench", "cable")
WORDS = ("steps", "action", "target", *ACTIONS, *_COLOURS, *(f"_{thing}" for thing in _THINGS))
_ENDLESS = 4096  # steps, more than are ever generated


def _steps(target: Mapping[str, Any], **items: int) -> dict[str, Any]:
    step = {
        "type": "object",
        "properties": {"action": {"enum": list(ACTIONS)}, "target": target},
        "required": ["action", "target"],
        "additionalProperties": False,
    }
    steps = {"type": "array", "items": step, **items}
    return {"type": "object", "properties": {"steps": steps}, "required": ["steps"], "additionalProperties": False}


STEPS = Form(
    f"steps of an action ({len(ACTIONS)}) and a target (text)",
    _steps({"type": "string", "maxLength": 64}, minItems=1, maxItems=16),
)
# For random weights. Targets are the names of a scene: text would always run to its longest, where masks cost most.
# It never ends, so that as many tokens come as were asked for.
SCENE_STEPS = Form(
    f"endless steps of an action ({len(ACTIONS)}) and a target ({len(_COLOURS) * len(_THINGS)} names)",
    _steps({"enum": [f"{colour}_{thing}" for colour in _COLOURS for thing in _THINGS]}, minItems=_ENDLESS),
)


def bench_synthetic(
    name: str, kind: Format, work: Workload, cubin_folder: Path = CUBINS, say: Say = print
) -> BenchResult:
    """Benchmark a published pair with random weights. ``accept_length`` None takes 5.

    Raises RequestError for an unknown name or a bad accept length, BackendError without an NVIDIA GPU.
    """
    pair = synthetic_pair(name)
    if work.accept_length is None and work.acceptance is None:
        work = replace(work, accept_length=_ACCEPT_LENGTH)
    work.pattern(pair.verify_rows)
    if work.correlation is not None and pair.target.experts is None:
        raise RequestError(f"{name} has no experts; --routing-correlation belongs to a pair that has")
    try:
        device, cubin = probe_device(cubin_folder, say)
    except BackendError as error:
        raise BackendError(f"edge-dflash bench --synthetic needs an NVIDIA GPU: {error}") from None
    with synthetic_subject(name, kind, work, cubin, say) as subject:
        return run(subject, device, work, say)


@contextmanager
def synthetic_subject(
    name: str, kind: Format, work: Workload, cubin: Callable[[str], bytes], say: Say = print
) -> Iterator[Subject]:
    """A published pair with random weights on the GPU, room for ``work``, and a tokenizer of its vocabulary's size."""
    from edge_dflash.backends.cuda.backend import NativeBackend

    pair = synthetic_pair(name)
    tokenizer = synthetic_tokenizer(pair.target.vocab_size, WORDS)
    say(f"loading {name} with random {kind} weights")
    began = time.perf_counter()
    weights = RandomWeights(pair, kind, cubin)
    precision, context = Precision(), work.rows(pair.verify_rows)
    chunk = default_chunk(arch_of_sm(device_sm()), pair_programs(pair), context)
    lanes = max(work.lanes, default=1)
    backend = NativeBackend(
        pair, weights, precision, cubin=cubin, max_context=context, prefill_chunk=chunk, lanes=lanes
    )
    if work.correlation is not None and (experts := pair.target.experts) is not None:
        force_experts(backend, routing(experts.count, experts.chosen, work.correlation))
    loaded = time.perf_counter() - began
    filler = np.random.default_rng(0).integers(0, pair.target.vocab_size, 1 << 16).tolist()
    with Planner(backend, tokenizer, (pair.target.vocab_size - 1,), fallback=False) as planner:
        yield Subject(
            title=f"{name}, random weights",
            kind="native",
            weights=kind,
            kv=precision.kv,
            planner=planner,
            costs=Costs(pair_programs(pair), weights.formats, precision.kv, pair),
            source=f"{work.context} random ids",
            prompts=(tiled(filler, work.context),),
            form=SCENE_STEPS,
            filler=filler,
            load_seconds=loaded,
        )


@dataclass(frozen=True)
class Prompts:
    """What a bundle is asked."""

    source: str  # in words
    tasks: Sequence[Task]
    form: Form = STEPS


def bench_bundle(
    path: Path,
    prompts: Callable[[Planner], Prompts],
    work: Workload,
    cubin_folder: Path = CUBINS,
    say: Say = print,
    *,
    drafter: bool = True,
) -> BenchResult:
    """Benchmark a bundle on its own backend with the first of ``prompts``; ``drafter`` False: without its drafter.

    Without NVRTC the device's read bandwidth, and with it every floor, is left out. Raises BundleError and BackendError
    as :meth:`Planner.open` does, RequestError for a forced accept length on the reference backend.
    """
    manifest = read_manifest(path)
    device = Device()
    work.pattern(manifest.pair.verify_rows if drafter else 1)
    on_device, forced = manifest.on_device, work.accept_length is not None or work.acceptance is not None
    if not on_device and (forced or work.profile):
        raise RequestError(
            f"{path} was built for the {manifest.backend!r} backend; --accept-length and --profile need a GPU: "
            "leave them out, or build it again with --backend native"
        )
    if on_device:
        try:
            device, _ = probe_device(cubin_folder, say)
        except BuildError as error:
            say(f"no floors: the device's read bandwidth cannot be measured: {error}")
        except BackendError as error:
            raise BackendError(f"{path} was built for {manifest.arch}: {error}") from None
    else:
        say(f"the {manifest.backend} backend is timed as it is: no read bandwidth, no floors, no device memory")
    with bundle_subject(path, prompts, say, drafter=drafter, lanes=max(work.lanes, default=None)) as subject:
        return run(subject, device, work, say)


@contextmanager
def bundle_subject(
    path: Path,
    prompts: Callable[[Planner], Prompts],
    say: Say = print,
    *,
    drafter: bool = True,
    lanes: int | None = None,
) -> Iterator[Subject]:
    """An open bundle, which drafts whether it pays or not; ``drafter`` False: never. ``lanes``: else the bundle's."""
    manifest = read_manifest(path)
    pair = manifest.pair if drafter else replace(manifest.pair, drafter=None)
    say(f"loading {path}")
    began = time.perf_counter()
    with Planner.open(path, self_test="off", fallback=False, drafter=drafter, lanes=lanes) as planner:
        loaded = time.perf_counter() - began
        asked = prompts(planner)
        ids = [planner.encode(task) for task in asked.tasks[:_PROMPTS]]
        costs = Costs(pair_programs(pair), manifest.weights, manifest.precision.kv, pair)
        yield Subject(
            title=str(path),
            kind=manifest.backend,
            weights=", ".join(f"{count} {name}" for name, count in manifest.weight_summary.items()),
            kv=manifest.precision.kv,
            planner=planner,
            costs=costs if manifest.on_device else None,
            source=f"{len(ids)} of {asked.source}",
            prompts=ids,
            form=asked.form if planner.tokenizer is not None else None,
            filler=[token for prompt in ids for token in prompt],
            load_seconds=loaded,
        )
