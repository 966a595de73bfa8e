import pytest

from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.specs import AttentionSpec, LayerSpec, RopeSpec

ATTENTION = AttentionSpec(4, 2, 8, RopeSpec(1e4, 8), gated=False)


def started():
    g = GraphBuilder("test", commits=False)
    return g, g.embed("ids", "target.embed_tokens", 10, 32, "x")


def test_reading_a_tensor_that_does_not_exist_fails():
    g, _ = started()
    with pytest.raises(KeyError, match="nowhere"):
        g.linear("nowhere", "target.w", 4, "mlp", "y")
    with pytest.raises(ValueError, match="no earlier op"):
        g.embed("nowhere", "target.other", 10, 32, "z")


def test_producing_a_tensor_twice_fails():
    g, x = started()
    g.linear(x, "target.w", 12, "mlp", "y")
    with pytest.raises(ValueError, match="produced twice"):
        g.linear(x, "target.v", 12, "mlp", "y")


def test_columns_must_agree():
    g, x = started()
    y = g.linear(x, "target.w", 12, "mlp", "y")
    with pytest.raises(ValueError, match="12 columns, 32 wanted"):
        g.add(x, y, "z")
    k = g.linear(x, "target.k", 16, "attention", "k")
    with pytest.raises(ValueError, match="32 wanted"):
        g.attend(y, k, k, "target.layers.0", ATTENTION, LayerSpec(ATTENTION, 8, 1e-6))


def test_a_weight_has_one_shape():
    g, x = started()
    g.linear(x, "target.w", 12, "mlp", "y")
    with pytest.raises(ValueError, match="is used as"):
        g.linear(x, "target.w", 13, "mlp", "z")
