import pytest

from edge_dflash.checks import footprint
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.program import DeltaState, KvState, WeightSpec
from edge_dflash.model.specs import AttentionSpec, RopeSpec


@pytest.mark.parametrize(
    ("form", "size"),
    [
        ("bf16", 2 * 2048),
        ("tied", 2 * 2048),
        ("f32", 4 * 2048),
        ("fp8", 2048 + 4 * 32),
        ("nvfp4", 1024 + 128 + 4),
    ],
)
def test_weight_bytes_of_each_format(form, size):
    assert footprint.weight_bytes(WeightSpec((32, 64), "linear", "mlp"), form) == size


def test_state_bytes_by_hand():
    states = [KvState(2, 32), DeltaState(6, 32, 32, 320, 4), KvState(4, 16)]
    assert footprint.kv_bytes_per_token(states, "fp8") == 2 * 2 * 32 + 2 * 4 * 16
    assert footprint.kv_bytes_per_token(states, "bfloat16") == 2 * 256
    assert footprint.kv_bytes_per_token(states, "float32") == 4 * 256
    assert footprint.delta_bytes(states) == 4 * 6 * 32 * 32 + 2 * 320 * 3
    assert footprint.tape_bytes_per_row(states) == 2 * 320 + 8 * 6


def attention_program(window):
    spec = AttentionSpec(4, 2, 8, RopeSpec(1e4, 8), gated=False)
    g = GraphBuilder("verify", commits=False)
    x = g.embed("ids", "target.embed_tokens", 100, 32, "embedding")
    q = g.linear(x, "q", 32, "attention", "q")
    k = g.linear(x, "k", 16, "attention", "k")
    v = g.linear(x, "v", 16, "attention", "v")
    o = g.attend(q, k, v, "target.layers.0", spec, 1e-6, "o", plus_one=False, window=window)
    return g.program(logits=g.linear(o, "head", 100, "lm_head", "logits"))


@pytest.mark.parametrize(("window", "rows"), [(None, 1000), (64, 63), (5000, 1000)])
def test_a_window_limits_the_rows_that_are_read(window, rows):
    assert footprint.kv_read_bytes(attention_program(window), 1000, "fp8") == rows * 2 * 2 * 8


def test_scratch_is_the_peak_of_tensors_alive_at_once():
    # q, k and v are alive beside their input: 32 + 32 + 16 + 16 columns of BF16; then o, then 100 FP32 logits beside o
    assert footprint.scratch_bytes(attention_program(None), 10) == max(
        10 * 2 * (32 + 32 + 16 + 16), 10 * (2 * 32 + 400)
    )
    # one row of logits is FP32 even where the rest is small
    assert footprint.scratch_bytes(attention_program(None), 1) == 464
