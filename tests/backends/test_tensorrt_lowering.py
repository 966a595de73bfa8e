"""Every plan of the demo pair and of both golden pairs, interpreted: the reference's tensors within BF16 rounding."""

from dataclasses import replace

import numpy as np
import pytest
from tensorrt_support import (
    KINDS,
    PAIRS,
    PAIRS_AND_KINDS,
    evaluate,
    judge,
    lowered,
    plan_tensors,
    programs_of,
    reference,
    runs_of,
    tensorrt,
    unit_network,
    units,
)
from trt_interpreter import outputs, run

from edge_dflash.backends.cuda.tensorrt.units import CHOICES, HEAD, HEAD_INPUT, LOGITS
from edge_dflash.model.ops import DenseOp, Embed, Experts, GroupedConv, Linear, SelectRows, Walk

pytestmark = pytest.mark.tensorrt

# Relative L2 distance of a plan's tensors from the reference's when nothing is put right on the way, in BF16 half
# units (2^-8). A scale behind a BF16 product is a second rounding in each linear; a rounding in front of a 4-bit
# quantization moves some codes by a whole step, and the next matrix sums that.
FREE = {"bf16": 1, "fp8": 4, "fp8-channel": 4, "w4a16": 4, "w4a4": 48}


@pytest.mark.parametrize(("name", "kind"), PAIRS_AND_KINDS)
def test_each_op_is_the_references_within_one_bf16_step(name, kind):
    checked = 0
    for which, key in runs_of(name):
        for finding in judge(unit_network(name, kind, key).network, name, kind, which, key):
            assert not finding.wrong, finding
            checked += 1
    ops = [op for program in programs_of(name).values() for op in program.ops if isinstance(op, DenseOp)]
    assert checked == len([op for op in ops if not isinstance(op, SelectRows | Embed | Experts | GroupedConv | Walk)])


@pytest.mark.parametrize(("name", "kind"), PAIRS_AND_KINDS)
def test_whole_plans_stay_near_the_reference(name, kind):
    for which, key in runs_of(name):
        found = evaluate(unit_network(name, kind, key).network, name, kind, which, key, forced=False)
        for tensor, wanted in plan_tensors(name, kind, which, key).items():
            if tensor in found:
                distance = np.linalg.norm(found[tensor] - wanted) / np.linalg.norm(wanted)
                assert distance * 256 <= FREE[kind], (which, key, tensor, distance * 256)


@pytest.mark.parametrize("name", PAIRS)
def test_networks_have_the_inputs_and_outputs_that_their_units_say(name):
    wanted = {"bf16": "BF16", "int32": "INT32"}
    for unit in units(name).units.values():
        network = unit_network(name, "w4a16", unit.key).network
        found = {n: (t, s[1:]) for n, (t, s) in outputs(network).items()}
        assert found == {b.name: (wanted[b.dtype], () if b.columns is None else (b.columns,)) for b in unit.outputs}
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        assert [(t.name, t.dtype.name, tuple(t.shape)) for t in inputs] == [
            (b.name, wanted[b.dtype], (-1,) if b.columns is None else (-1, b.columns)) for b in unit.inputs
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_reads_each_weight_once_where_the_store_has_it(kind):
    store = reference("demo", kind).store
    for unit in units("demo").units.values():
        held = unit_network("demo", kind, unit.key).net.held
        for name in unit.weights:
            for array in (a for a in vars(store.get(name)).values() if isinstance(a, np.ndarray) and a.ndim == 2):
                places = sum(np.shares_memory(array, other) for other in held)
                if places == 0 and kind == "w4a4":  # copied below weights that multiply the same activations
                    places = sum(array.tobytes() in other.tobytes() for other in held if other.nbytes > array.nbytes)
                assert places == 1, name
        small = max(8 * b.columns for b in (*unit.inputs, *unit.outputs) if b.columns)
        matrices = [a for a in held if a.nbytes > small]  # else norms, scales, ids
        arrays = [a for n in unit.weights for a in vars(store.get(n)).values() if isinstance(a, np.ndarray)]
        assert sum(a.nbytes for a in matrices) <= sum(a.nbytes for a in arrays)


def products(network):
    kinds = [tensorrt()[0].ILayer.type.__get__(network.get_layer(i)).name for i in range(network.num_layers)]
    return kinds.count("MATRIX_MULTIPLY"), kinds.count("DYNAMIC_QUANTIZE")


def test_weights_of_the_same_4_bit_activations_are_one_product():
    unit, store = units("demo").units["target-001"], reference("demo", "w4a4").store
    linears = [op for op in unit.ops if isinstance(op, Linear)]
    assert len(linears) == 8  # out, gate, up, down, qkv, z, a, b
    assert products(unit_network("demo", "w4a4", unit.key).network) == (6, 4)  # gate with up, qkv with z; a and b BF16
    for kind in ("w4a16", "fp8", "fp8-channel", "bf16"):
        assert products(unit_network("demo", kind, unit.key).network) == (8, 0)

    class Another:
        def get(self, name):
            weight = store.get(name)
            return replace(weight, input_scale=0.5) if name.endswith("up_proj") else weight

    other = lowered(unit, Another())  # owns the memory of the network's constants
    assert products(other.network) == (7, 5)


def test_choices_are_the_lowest_ids_of_the_largest_logits():
    network = unit_network("demo", "w4a16", HEAD).network
    found = evaluate(network, "demo", "w4a16", "verify", HEAD, forced=False)
    assert found[CHOICES].shape == (16,)
    assert (found[CHOICES] == found[LOGITS].argmax(-1)).all()  # numpy takes the first of equals
    zeros = np.zeros((3, 256), np.float32)
    tied = run(tensorrt()[0], network, {HEAD_INPUT: zeros})
    assert list(tied[CHOICES]) == [0, 0, 0]
