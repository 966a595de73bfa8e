"""The run time on a fake TensorRT and a device without kernels: addresses, order, memory, refusals, bookkeeping."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
from control_gpu import ControlGpu
from fake_tensorrt import SCRATCH, FakeRuntime, FakeTensorrt, write_plans
from native_support import MIXED, NATIVE_PAIR, SIGHTED, formats_of, random_store
from pictures_support import noise
from store_weights import StoreWeights
from tensorrt_walk import address

from edge_dflash.backends.cuda import backend as native_backend
from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.backends.cuda.kernels.tower import UNIT as TOWER_UNIT
from edge_dflash.backends.cuda.kernels.tower import most_patches
from edge_dflash.backends.cuda.steps import Convolve, Draft, Gather, Last, Mix, State
from edge_dflash.backends.cuda.tensorrt import runtime
from edge_dflash.backends.cuda.tensorrt.dense import EngineOps, check_engines
from edge_dflash.backends.cuda.tensorrt.flavours import TENSORRT, TENSORRT_RTX
from edge_dflash.backends.cuda.tensorrt.units import HEAD, STATE_UNITS, TOWER, RunEngine, bundle_units, tower_unit
from edge_dflash.bench.device import profile
from edge_dflash.builder.decide import choose, find_backends
from edge_dflash.decode.backend import Asked, Backend, Precision
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import GroupedConvSpec, MarkovSpec, SelectorSpec
from edge_dflash.model.vision import patch_tables
from edge_dflash.weights.formats import WideWeight
from edge_dflash.weights.recipe import default_recipe

CONTEXT, CHUNK, STATE = 128, 16, Precision("bfloat16", "fp8")
UNITS = bundle_units(NATIVE_PAIR, formats_of(), CHUNK)
BLOCK = NATIVE_PAIR.drafter.block_size
ROWS = {"prefill": CHUNK, "verify": BLOCK, "propose": BLOCK}
WALKING = {
    "dflash2": {"kind": "dflash2", "conv": GroupedConvSpec(2, 16), "head": SelectorSpec(32, 16)},
    "vanilla": {"kind": "dspark", "anchor_drafts": True, "head": MarkovSpec("vanilla", 64, 32, "markov")},
    "gated": {"kind": "dspark", "anchor_drafts": True, "head": MarkovSpec("gated", 32)},
    "anchor": {"kind": "dspark", "anchor_drafts": True},
}
KERNELS = {"Attend": "attend_prepare_fp8", "KvAppend": "attend_append_fp8", "GatedDelta": "delta_prepare"}


def units_of(pair):
    return bundle_units(pair, formats_of(pair=pair), CHUNK)


def named(steps, kinds):
    """What a graph is asked for, of engines and of some kinds of our kernels: names of calls by the step's type."""
    for step in steps:
        if isinstance(step, RunEngine):
            yield step.key
        elif type(step) in kinds:
            found = kinds[type(step)]
            yield from found(step) if callable(found) else found


def called(graph):
    """Names of a graph's calls, of plans their keys."""
    return [call.key if name == "plan" else name for name, call in graph.calls]


class PlannedGpu(ControlGpu):
    stream = 7


def load(
    patch,
    folder,
    gpu=None,
    trt=None,
    flavour=TENSORRT,
    precision=STATE,
    pair=NATIVE_PAIR,
    cubin=lambda unit: b"",
    **changes,
):
    """A loaded backend; ``changes`` are of plans."""
    gpu = gpu or PlannedGpu()
    trt = trt or FakeTensorrt(gpu, rtx=flavour is TENSORRT_RTX)
    patch.setattr(native_backend, "Gpu", lambda: gpu)
    patch.setattr(runtime, "load", lambda flavour: trt)
    files, formats = write_plans(folder, units_of(pair).units, **changes), formats_of(pair=pair)
    weights = StoreWeights(random_store(formats, pair), formats)
    backend = NativeBackend(
        pair,
        weights,
        precision,
        cubin=cubin,
        max_context=CONTEXT,
        prefill_chunk=CHUNK,
        dense=EngineOps(flavour, files, weights, cubin),
    )
    return backend, gpu, trt


@pytest.fixture
def loaded(monkeypatch, tmp_path):
    return load(monkeypatch, tmp_path)


def test_the_kernels_of_a_bundle_are_those_that_are_loaded(monkeypatch, tmp_path):
    found = set()
    for made in (NATIVE_PAIR, walking("dflash2"), walking("gated")):
        load(monkeypatch, tmp_path, pair=made, cubin=lambda unit: found.add(unit) or b"")
    assert found == set(STATE_UNITS)
    load(monkeypatch, tmp_path, pair=SIGHTED, cubin=lambda unit: found.add(unit) or b"")
    assert found == {*STATE_UNITS, TOWER_UNIT}


def walking(kind):
    return replace(NATIVE_PAIR, drafter=replace(NATIVE_PAIR.drafter, **WALKING[kind]))


@pytest.mark.parametrize("kind", WALKING)
def test_convolutions_and_the_walk_are_our_kernels_in_the_cycles_graph(monkeypatch, tmp_path, kind):
    made = walking(kind)
    check_engines(made, formats_of(pair=made), "sm121")
    backend, gpu, trt = load(monkeypatch, tmp_path, pair=made)
    rows, block = made.verify_rows, made.block_size
    assert rows == block + (kind != "dflash2")
    shapes = {(context.key, shape[0]) for context in trt.contexts for shape in context.shapes.values()}
    assert {count for key, count in shapes if key.startswith("drafter-")} == {block}
    assert {count for key, count in shapes if key == HEAD} == {rows}
    calls = called(backend.graphs[1].greedy.of(rows))
    kinds = {Convolve: ["conv_rows"], Draft: ["walk_rows"] * (block if kind == "gated" else 1)}
    wanted = [name for which in ("propose", "verify") for name in named(units_of(made).schedules[which].steps, kinds)]
    assert ("conv_rows" in wanted, "walk_rows" in wanted) == (kind == "dflash2", kind != "anchor")
    assert [name for name in calls if name in {*wanted}] == wanted
    backend.prefill([1] * 5)
    gpu.accept = rows
    cycle = backend.cycle(Asked(3))
    assert (cycle.drafts, cycle.accepted) == (rows - 1, rows - 1)


class Wide:
    """A checkpoint in BF16."""

    def get(self, name):
        return WideWeight(np.zeros((1, 1), np.uint16))


MIXTURE = ("experts_route", "experts_choose", "experts_up_nvfp4", "experts_down_nvfp4", "experts_sum")


def test_mixtures_are_our_kernels_between_plans_in_the_cycles_graph(monkeypatch, tmp_path):
    check_engines(MIXED, formats_of(pair=MIXED), "sm121")
    backend, _, _ = load(monkeypatch, tmp_path, pair=MIXED)
    calls, units = called(backend.graphs[1].greedy.of(MIXED.verify_rows)), units_of(MIXED)
    kinds = {Mix: MIXTURE}
    wanted = [name for which in ("propose", "verify") for name in named(units.schedules[which].steps, kinds)]
    found = [name.rsplit("_", 1)[0] if name.startswith(("experts_up", "experts_down")) else name for name in calls]
    assert [name for name in found if name in {*wanted}] == wanted
    assert found.count("experts_route") == MIXED.target.num_layers
    assert backend.loaded.mixtures.layers == MIXED.target.num_layers
    assert backend.loaded.memory.bytes["experts"] > 0
    assert "target.layers.0.mlp_in" in {b.name for unit in units.units.values() for b in unit.outputs}


def test_a_bundle_of_plans_alone_with_experts_is_refused():
    recipe = default_recipe()
    with pytest.raises(BackendError, match="--backend native,tensorrt"):
        find_backends(choose("sm110", "tensorrt", recipe), recipe, MIXED, Wide(), CHUNK)


def runs_of(which):
    return [step for step in UNITS.schedules[which].steps if isinstance(step, RunEngine)]


@pytest.mark.parametrize("flavour", [TENSORRT, TENSORRT_RTX], ids=lambda flavour: flavour.module)
def test_each_plan_is_loaded_once_and_has_a_context_for_each_use(monkeypatch, tmp_path, flavour):
    _, _, trt = load(monkeypatch, tmp_path, flavour=flavour)
    assert sorted(trt.loaded) == sorted(UNITS.units)
    assert [c.key for c in trt.contexts] == [run.key for which in ROWS for run in runs_of(which)]
    assert len(trt.caches) == (flavour is TENSORRT_RTX)


def test_pages_of_plans_are_given_back_when_they_are_loaded(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(runtime.os, "posix_fadvise", lambda fd, *range_and_advice: given.append(range_and_advice))
    load(monkeypatch, tmp_path)
    assert given == [(0, 0, runtime.os.POSIX_FADV_DONTNEED)] * len(UNITS.units)


def test_contexts_share_one_scratch_block_of_the_largest_need(loaded):
    backend, _, trt = loaded
    (scratch,) = {context.scratch for context in trt.contexts}
    assert scratch
    assert backend.budget["plans' scratch"] == max(engine_scratch(c) for c in trt.contexts)
    assert backend.budget["plans' scratch"] > SCRATCH


def engine_scratch(context):
    return context.engine.device_memory_size_v2


def test_shapes_profiles_and_addresses_are_those_of_the_pass(loaded):
    backend, _, trt = loaded
    buffers = backend.loaded.common.buffers
    contexts = iter(trt.contexts)
    for which, rows in ROWS.items():
        each = backend.loaded.passes[which]
        places = {
            "arena": buffers.arena.address,
            "logits": buffers.logits.pointer.address,
            "choices": (buffers.drafts if which == "propose" else buffers.choices).address,
        }
        for step in runs_of(which):
            context, unit = next(contexts), UNITS.units[step.key]
            assert (context.key, context.profile) == (step.key, step.profile)
            for own, tensor in (*step.inputs, *step.outputs):
                buffer, offset = address(each.schedule, each.places, tensor)
                assert context.addresses[own] == places[buffer] + offset
            count = BLOCK if step.key == HEAD else rows
            assert context.shapes == {b.name: (count, b.columns) for b in unit.inputs}
    assert next(contexts, None) is None


def test_every_context_runs_once_before_anything_is_captured(monkeypatch, tmp_path):
    gpu, ran = PlannedGpu(), []
    trt = FakeTensorrt(gpu)
    capture = gpu.capture
    gpu.capture = lambda enqueue: (ran.append([c.ran for c in trt.contexts]), capture(enqueue))[1]
    load(monkeypatch, tmp_path, gpu, trt)
    assert set(ran[0]) == {1}


@pytest.mark.parametrize("which", ["prefill", "verify", "propose"])
def test_a_graph_holds_embedding_plans_and_state_kernels_in_the_order_of_the_schedule(loaded, which):
    backend, _, _ = loaded
    graph = backend.graphs[1].prefill if which == "prefill" else getattr(backend.graphs[1], which)
    kinds = {Gather: ["gather_rows"], State: lambda step: [KERNELS[type(step.op).__name__]], Last: ["last_row"]}
    wanted = list(named(UNITS.schedules[which].steps, kinds))
    assert [name for name in called(graph.of(1) if which == "verify" else graph) if name in {*wanted}] == wanted


def graphs_of(backend):
    """Every graph that is not of the host's walks."""
    return backend.graphs[1].every()


def test_a_cycle_is_one_graph_with_the_plans_of_both_passes(loaded):
    backend, _, _ = loaded
    keys = [a.key for name, a in backend.graphs[1].greedy.of(2).calls if name == "plan"]
    assert keys == [run.key for which in ("propose", "verify") for run in runs_of(which)]


def test_no_launch_of_the_native_linears_is_left(loaded):
    backend, _, _ = loaded
    names = {n for g in graphs_of(backend) for n, _ in g.calls}
    assert not any("linear" in name or "argmax" in name for name in names)
    assert backend.loaded.common.buffers.logits.stride == NATIVE_PAIR.target.vocab_size


def test_plans_count_in_the_budget_before_anything_is_loaded(monkeypatch, tmp_path):
    gpu = PlannedGpu()
    trt = FakeTensorrt(gpu)
    gpu.free = 1 << 28
    with pytest.raises(BackendError, match=r"the pair needs .* GB \(.*\), a device without kernels has 0.27 GB free"):
        load(monkeypatch, tmp_path, gpu, trt)
    assert (trt.loaded, gpu.allocations, gpu.closed) == ([], 0, 1)


def test_the_budget_names_the_plans_of_both_models(loaded, tmp_path):
    backend, _, _ = loaded
    sizes = {path.stem: path.stat().st_size for path in (tmp_path / "plans").iterdir()}
    assert backend.budget["drafter weights"] == sum(n for key, n in sizes.items() if key.startswith("drafter-"))
    assert backend.budget["target weights"] == sum(n for key, n in sizes.items() if not key.startswith("drafter-"))


def test_a_profile_names_the_plans(loaded):
    names = [step.name for step in profile(loaded[0])]
    assert [name for name in names if name.startswith("plan ")] == [
        f"plan {run.key}" for which in ("propose", "verify") for run in runs_of(which)
    ]


def test_it_is_a_backend_and_cycles(loaded):
    backend: Backend = loaded[0]
    backend.prefill([1] * 20)
    assert backend.cycle(Asked(3)).tokens
    assert len(backend.verify([1, 2])) == 2


REFUSALS = [
    (("Runtime", None), "TensorRT does not start here: .*Failed to open cuda driver"),
    (
        ("deserialize_cuda_engine", "head"),
        "plan .*head.plan cannot be loaded; build it again .* TensorRT 10.13",
    ),
    (("create_execution_context", "head"), "plan head gives no execution context"),
    (("profile", "target-001"), "plan target-001 does not take profile 1"),
    (("set_input_shape", "target-001"), f"plan target-001 does not take {CHUNK} rows of"),
    (("set_tensor_address", "head"), "plan head does not take an address for rows"),
    (("infer_shapes", "head"), "plan head lacks the shape or address of rows"),
    (("execute_async_v3", "head"), "plan head cannot be enqueued; .* says execute_async_v3: Error Code 4: no"),
]


@pytest.mark.parametrize(("refuse", "words"), REFUSALS, ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_what_tensorrt_refuses_names_the_plan_and_closes_the_device(monkeypatch, tmp_path, refuse, words):
    gpu = PlannedGpu()
    trt = FakeTensorrt(gpu)
    trt.refuse = refuse
    with pytest.raises(BackendError, match=words):
        load(monkeypatch, tmp_path, gpu, trt)
    assert gpu.closed == 1


def test_a_driver_that_is_missed_only_when_a_plan_is_read_is_named(monkeypatch, tmp_path):
    def no_driver(self, reader):
        raise RuntimeError("[ERROR] Failed to open cuda driver.")

    monkeypatch.setattr(FakeRuntime, "deserialize_cuda_engine", no_driver)
    gpu = PlannedGpu()
    with pytest.raises(BackendError, match=r"\.plan: TensorRT does not start here: .*cuda driver.*; check the driver"):
        load(monkeypatch, tmp_path, gpu)
    assert gpu.closed == 1


def test_closing_lets_go_of_every_context_and_plan_before_the_device_is_closed(loaded):
    backend, gpu, trt = loaded
    left = [weakref.ref(c) for c in trt.contexts] + [weakref.ref(c.engine) for c in trt.contexts]
    trt.contexts.clear()
    for graph in graphs_of(backend):
        graph.calls.clear()  # the device without kernels remembers what it is given
    assert all(ref() is not None for ref in left)
    there = []
    close = gpu.close
    gpu.close = lambda: (there.append([ref for ref in left if ref() is not None]), close())
    backend.close()
    assert there == [[]]
    backend.close()


@pytest.mark.parametrize("flavour", [TENSORRT, TENSORRT_RTX], ids=lambda flavour: flavour.module)
def test_what_points_at_another_goes_before_it(monkeypatch, tmp_path, flavour):
    backend, gpu, trt = load(monkeypatch, tmp_path, flavour=flavour)
    context, gone = trt.contexts[0], []
    held = {"engine": context.engine, "runtime": context.engine.runtime, "log": context.engine.runtime.log}
    if flavour is TENSORRT_RTX:
        held |= {"config": context.config, "cache": context.config.cache}
    for name, each in {"context": context, **held}.items():
        weakref.finalize(each, gone.append, name)
    trt.contexts.clear()
    gpu.close = lambda: gone.append("device")
    for graph in graphs_of(backend):
        graph.calls.clear()
    del context, held, each
    backend.close()
    order = ["context", *(["config", "cache"] if flavour is TENSORRT_RTX else []), "engine", "runtime", "device"]
    assert [name for name in gone if name != "log"] == order


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensors": {"rows": ["BF16", 32]}}, "plan head and this version disagree on choices"),
        ({"tensors": {"rows": ["BF16", 64], "logits": ["BF16", 48], "choices": ["INT32", None]}}, "head: rows is BF16"),
        ({"tensors": {"rows": ["FLOAT", 32], "logits": ["BF16", 48], "choices": ["INT32", None]}}, "rows is FLOAT"),
        ({"tensors": {"rows": ["BF16", 32], "logits": ["BF16", 48], "choices": ["INT32", 1]}}, "choices is INT32"),
        ({"profiles": 3}, "plan head has 3 profiles, wanted 1"),
    ],
)
def test_plans_of_another_pair_are_found(monkeypatch, tmp_path, change, words):
    with pytest.raises(BackendError, match=words):
        load(monkeypatch, tmp_path, head=change)


def test_a_missing_plan_is_named(monkeypatch, tmp_path):
    files = write_plans(tmp_path, {k: u for k, u in UNITS.units.items() if k != "target-002"})
    weights, cubin = StoreWeights(random_store(formats_of()), formats_of()), bytes
    with pytest.raises(BackendError, match=r"plans/target-002\.plan is missing; build the bundle again"):
        NativeBackend(
            *(NATIVE_PAIR, weights, STATE),
            cubin=cubin,
            max_context=CONTEXT,
            prefill_chunk=CHUNK,
            dense=EngineOps(TENSORRT, files, weights, cubin),
        )


def test_other_arithmetic_is_refused(monkeypatch, tmp_path):
    with pytest.raises(BackendError, match="activations are 'float32'; plans compute in bfloat16"):
        load(monkeypatch, tmp_path, precision=Precision("float32", "fp8"))


def sees(patch, folder, **changes):
    """A backend that sees, and the context of its tower."""
    backend, gpu, trt = load(patch, folder, pair=SIGHTED, **changes)
    (context,) = (context for context in trt.contexts if context.key == TOWER)
    return backend, gpu, trt, context


def test_a_tower_is_one_plan_over_a_pictures_patches(monkeypatch, tmp_path):
    backend, gpu, _, context = sees(monkeypatch, tmp_path)
    assert context.ran == 0  # corners of the table that nobody wrote would lie anywhere
    written, read, most = {}, [], most_patches(SIGHTED.target.vision)
    patches = min(most, 4 * backend.shape.usable_context)
    assert {shape[0] for shape in context.shapes.values()} == {patches}
    monkeypatch.setattr(gpu, "write", lambda pointer, array: written.update({pointer.address: array}))
    monkeypatch.setattr(gpu, "read", lambda pointer, shape, dtype: read.append(pointer) or np.ones(shape, dtype))
    for ran, grid in enumerate(((4, 4), (2, 8), (4, 4)), 1):
        picture = noise(ran, grid)
        written.clear()
        gpu.launches.clear()
        seen = backend.see(picture)
        assert (gpu.launches, context.ran) == (["tower_patches"], ran)
        assert {shape[0] for shape in context.shapes.values()} == {16}
        assert seen.host().shape == (4, SIGHTED.target.hidden_size)
        tables = vars(patch_tables(SIGHTED.target.vision, grid))
        for name, table in tables.items():
            assert np.array_equal(written[context.addresses[name]], table)
        assert read[-1].address == context.addresses["rows"]
        (levels,) = written.keys() - {context.addresses[name] for name in tables}
        assert np.array_equal(written[levels], picture.levels)
    places = sorted(context.addresses.values())
    assert len(set(places)) == 6
    at, rows = context.addresses["patches"], context.addresses["rows"]
    assert rows - at >= 2 * patches * SIGHTED.target.vision.patches.columns
    backend.close()


def test_what_the_towers_plan_does_not_take_is_said(monkeypatch, tmp_path):
    backend, _, trt, _ = sees(monkeypatch, tmp_path)
    with pytest.raises(BackendError, match=r"an image of 64 x 64 patches; this tower takes \d+ at most"):
        backend.see(noise(1, (64, 64)))
    for method, words in (
        ("set_input_shape", "plan vision does not take 16 rows of patches"),
        ("execute_async_v3", ""),
    ):
        trt.refuse = (method, TOWER)
        with pytest.raises(BackendError, match=words or "plan vision cannot be enqueued; TensorRT 10"):
            backend.see(noise(1))
    trt.refuse = None
    assert len(backend.see(noise(1))) == 4


def test_a_bundle_without_the_towers_plan_is_built_again(monkeypatch, tmp_path):
    monkeypatch.setitem(globals(), "units_of", lambda pair: UNITS)
    with pytest.raises(BackendError, match=r"plans/vision\.plan is missing; build the bundle again"):
        load(monkeypatch, tmp_path, pair=SIGHTED)


def test_a_tower_has_no_other_engine_in_its_passes():
    units = units_of(SIGHTED)
    assert units.units.keys() == UNITS.units.keys() | {TOWER}
    unit = units.units[TOWER]
    assert [(b.name, b.dtype) for b in unit.inputs] == [
        *(("patches", "bf16"), ("corners", "int32"), ("shares", "f32"), ("cos", "f32"), ("sin", "f32"))
    ]
    (rows,) = unit.profiles
    assert (rows.low, rows.high) == (4, most_patches(SIGHTED.target.vision))
    large = replace(SIGHTED.target.vision, patches=replace(SIGHTED.target.vision.patches, max_pixels=1 << 24))
    (rows,) = tower_unit(large, pair_programs(SIGHTED).see).profiles
    assert (rows.low, rows.best, rows.high) == (4, 1900, 16384)
