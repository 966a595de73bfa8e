import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_dflash.backends.reference import dense
from edge_dflash.backends.reference.attention import KvMemory, attend, rope_table, rotate
from edge_dflash.backends.reference.delta import DeltaMemory, DeltaWeights, gated_delta
from edge_dflash.backends.reference.dense import LinearWeight
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Attend, Concat, GatedDelta, GroupedConv, Linear, Op, Remap, RmsNorm, SwiGlu
from edge_dflash.model.program import DeltaState, KvState
from edge_dflash.model.specs import RopeSpec, YarnScaling
from edge_dflash.weights.quantize import quantize_activations

FLOAT32 = Precision("float32", "float32")


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("k", "n"), [(128, 6), (256, 768), (768, 256), (320, 20), (2560, 320)])
@pytest.mark.parametrize("function", ["linear", "rms_norm", "silu"])
def test_a_row_has_the_same_bits_wherever_it_lies(k, n, function):
    weight, row = LinearWeight(rand(n, k), None, None), rand(k, seed=1)
    run = {
        "linear": lambda x: dense.linear(x, weight),
        "rms_norm": lambda x: dense.rms_norm(x, weight.matrix[0], 1e-6, plus_one=True),
        "silu": dense.silu,
    }[function]
    expected = None
    for rows in (16, 32, 48):
        for place in range(rows):
            x = rand(rows, k, seed=place)
            x[place] = row
            y = run(x)[place]
            expected = y if expected is None else expected
            assert torch.equal(y, expected), (rows, place)


@given(st.integers(1, 200), st.integers(0, 3))
def test_pointwise_bits_do_not_depend_on_the_place(count, seed):
    x = rand(40_000, seed=seed)
    whole = dense.pointwise(torch.exp, x)
    start = 12_345 + count
    assert torch.equal(dense.pointwise(torch.exp, x[start : start + count]), whole[start : start + count])


def test_linear_applies_scales_after_the_product():
    x, matrix = rand(16, 32), rand(8, 32, seed=1)
    per_channel = torch.arange(1.0, 9.0)
    torch.testing.assert_close(
        dense.linear(x, LinearWeight(matrix, per_channel, None)), x @ (matrix * per_channel[:, None]).T
    )
    w4a4 = dense.linear(x, LinearWeight(matrix, torch.tensor(0.5), 1e-3))
    torch.testing.assert_close(w4a4, quantize_activations(x, 1e-3) @ matrix.T * 5e-4)


def attend_op(**changes):
    fields = {
        "inputs": ("q", "k", "v"),
        "output": "o",
        "state": "s",
        "q_norm": "qn",
        "k_norm": "kn",
        "eps": 1e-6,
        "plus_one": False,
        "rope": RopeSpec(1e4, 8),
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "gated": False,
        "bidirectional": False,
        "window": None,
    }
    return Attend(**(fields | changes))


def naive_attention(op, q, k, v, start):
    """q [rows, Hq, D] already normed and rotated, k and v [keys, Hkv, D]."""
    out = torch.zeros_like(q)
    for r in range(q.shape[0]):
        for h in range(op.heads):
            g = h // (op.heads // op.kv_heads)
            scores = []
            for j in range(k.shape[0]):
                distance = start + r - j
                seen = (op.bidirectional or distance >= 0) and (op.window is None or abs(distance) < op.window)
                scores.append(float(q[r, h] @ k[j, g]) / math.sqrt(op.head_dim) if seen else -math.inf)
            out[r, h] = torch.softmax(torch.tensor(scores), 0) @ v[:, g]
    return out


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize(("start", "rows"), [(0, 3), (60, 8), (130, 16)])
def test_attention_equals_the_definition(bidirectional, window, start, rows):
    op = attend_op(bidirectional=bidirectional, window=window)
    memory = KvMemory(KvState(2, 16), 200, FLOAT32, (1.0, 1.0))
    k, v = rand(start + rows, 2, 16, seed=1), rand(start + rows, 2, 16, seed=2)
    memory.append(0, k, v)
    for stored in memory.stored:
        stored[start + rows :] = 1e4  # rows past the length are garbage and must not be read
    q = rand(16, 64, seed=3)
    cos, sin = rope_table(op.rope, 256)
    table = cos[start : start + 16], sin[start : start + 16]
    got = attend(op, q, torch.ones(16), table, memory, start, rows)[:rows]
    normed = dense.rms_norm(q.view(16, 4, 16), torch.ones(16), 1e-6, plus_one=False)
    expected = naive_attention(op, rotate(normed, *table)[:rows], k, v, start)
    torch.testing.assert_close(got, expected.reshape(rows, -1), rtol=1e-5, atol=1e-5)


def test_attention_reads_keys_as_stored_in_fp8():
    memory = KvMemory(KvState(1, 4), 64, Precision("float32", "fp8"), (0.5, 2.0))
    memory.append(3, torch.tensor([[[0.3, -1.0, 500.0, 1e-5]]]), torch.tensor([[[7.3, 1.0, -3000.0, 0.0]]]))
    k, v = memory.read(4)
    assert k[3, 0].tolist() == [0.3125, -1.0, 224.0, 0.0]  # 0.6 -> 0.625; 1000 saturates at 448
    assert v[3, 0].tolist() == [7.5, 1.0, -896.0, 0.0]


def test_kv_append_past_the_context_is_refused():
    memory = KvMemory(KvState(1, 4), 10, FLOAT32, (1.0, 1.0))
    with pytest.raises(BackendError, match="context of 10 tokens"):
        memory.append(9, torch.zeros(2, 1, 4), torch.zeros(2, 1, 4))


def test_rope_rotates_the_leading_dims_by_halves():
    cos, sin = rope_table(RopeSpec(100.0, 4), 8)
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0, 9.0]]])
    y = rotate(x, cos[3:4], sin[3:4])[0, 0]
    f = 100.0**-0.5
    expected = [math.cos(3), -2 * math.sin(3 * f), math.sin(3), 2 * math.cos(3 * f), 9.0]
    torch.testing.assert_close(y, torch.tensor(expected))


def test_yarn_keeps_fast_dims_and_stretches_slow_ones():
    plain, _ = rope_table(RopeSpec(1e6, 64), 4096)
    yarn = RopeSpec(1e6, 64, YarnScaling(4.0, 1024, attention_factor=1.0))
    scaled, _ = rope_table(yarn, 4096)
    torch.testing.assert_close(scaled[:, 0], plain[:, 0])  # one rotation every 6 tokens: untouched
    torch.testing.assert_close(scaled[4 * 500, -1], plain[500, -1])  # slowest: four times slower
    default, _ = rope_table(RopeSpec(1e6, 64, YarnScaling(4.0, 1024)), 8)
    assert float(default[0, 0]) == pytest.approx(0.1 * math.log(4) + 1)


def delta_setup(rows, seed=0):
    op = GatedDelta(
        inputs=("qkv", "z", "a", "b"),
        output="o",
        state="s",
        conv="c",
        a_log="al",
        dt_bias="dt",
        norm="n",
        eps=1e-6,
        key_heads=2,
        value_heads=6,
        key_dim=8,
        value_dim=4,
        conv_kernel=4,
    )
    weights = DeltaWeights(rand(56, 4, seed=1), rand(6, seed=2), rand(6, seed=3), rand(4, seed=4))
    padded = dense.padded_rows(rows)
    inputs = tuple(rand(padded, width, seed=seed + i + 5) for i, width in enumerate((56, 24, 6, 6)))
    return op, weights, DeltaMemory(DeltaState(2, 6, 8, 4, 4)), inputs


def naive_delta(op, w, inputs, rows):
    """The equations in float64, token by token."""
    u, z, a, b = (x.double() for x in inputs)
    state, outputs = torch.zeros(6, 8, 4, dtype=torch.float64), []
    for t in range(rows):
        past = torch.stack([u[t - 3 + n] if t - 3 + n >= 0 else torch.zeros(56).double() for n in range(4)], 1)
        c = (past * w.conv.double()).sum(1)
        c = c / (1 + torch.exp(-c))
        q, k, v = c[:16].view(2, 8), c[16:32].view(2, 8), c[32:].view(6, 4)
        q = q / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6) / math.sqrt(8)
        k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        out = []
        for j in range(6):
            g = -torch.exp(w.a_log[j].double()) * torch.log1p(torch.exp(a[t, j] + w.dt_bias[j]))
            beta = 1 / (1 + torch.exp(-b[t, j]))
            state[j] = torch.exp(g) * state[j]
            state[j] += torch.outer(k[j // 3], beta * (v[j] - state[j].T @ k[j // 3]))
            o = state[j].T @ q[j // 3]
            o = w.norm * o / torch.sqrt((o * o).mean() + 1e-6)
            gate = z[t, 4 * j : 4 * j + 4]
            out.append(o * gate / (1 + torch.exp(-gate)))
        outputs.append(torch.cat(out))
    return torch.stack(outputs).float(), state.float()


def test_gated_delta_equals_the_definition():
    op, weights, memory, inputs = delta_setup(19)
    got = gated_delta(op, weights, memory, inputs, 19, commits=True)
    expected, state = naive_delta(op, weights, inputs, 19)
    torch.testing.assert_close(got[:19], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(memory.state, state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("committed", range(9))
def test_replay_gives_the_bits_of_token_by_token(committed):
    op, weights, memory, inputs = delta_setup(8)
    gated_delta(op, weights, memory, inputs, 8, commits=False)
    assert not memory.state.any()  # a verify never writes S
    memory.commit(committed)
    memory.replay(op, weights)
    _, _, single, _ = delta_setup(8)
    for r in range(committed):
        gated_delta(op, weights, single, tuple(dense.pad(x[r : r + 1], 16) for x in inputs), 1, commits=True)
    assert torch.equal(memory.state, single.state)
    assert torch.equal(memory.history, single.history)


class Plain:
    """Weights as they are; see Arithmetic."""

    def __init__(self, **tensors):
        self.tensor = tensors.__getitem__

    def linear(self, x, name):
        return x @ self.tensor(name).T

    silu = staticmethod(torch.nn.functional.silu)


@pytest.mark.parametrize(
    ("op", "widths"),
    [
        (Linear(inputs=("x",), output="y", weight="w"), (32,)),
        (RmsNorm(inputs=("x",), output="y", weight="v", eps=1e-6, plus_one=True), (32,)),
        (SwiGlu(inputs=("x", "z"), output="y"), (32, 32)),
        (Concat(inputs=("x", "z"), output="y"), (32, 8)),
        (Remap(inputs=("x",), output="y", weight="ids", vocab=40), (32,)),
        (GroupedConv(inputs=("x", "c"), output="y", base="b", side=1, taps=3, group_size=8), (32, 24)),
    ],
)
def test_dense_ops_take_sequences_and_blocks_of_rows_as_training_has_them(op, widths):
    how = Plain(w=rand(24, 32), v=rand(32), ids=torch.randperm(40)[:32].float(), b=rand(2, 3, 32))
    inputs = [rand(2, 3, 5, width, seed=width) for width in widths]
    whole = dense.dense(op, inputs, how)
    for place in itertools.product(range(2), range(3)):
        torch.testing.assert_close(whole[place], dense.dense(op, [x[place] for x in inputs], how))


def test_an_op_without_a_function_is_refused():
    with pytest.raises(TypeError, match="no function for op Op"):
        dense.dense(Op(inputs=("x",), output="y"), [rand(1, 1)], Plain())
