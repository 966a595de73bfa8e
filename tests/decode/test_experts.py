"""A target that is a mixture of experts: no drafter changes what it decodes, chunks of a prompt neither."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_pairs import ENGINE, EXPERTS, FLOAT32, golden, pair, same_bits, store
from verify_support import BACKENDS

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.checks.lossless import verify_lossless
from edge_dflash.decode.options import Options
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import ExpertsSpec
from edge_dflash.weights.formats import WideWeight

SAMPLED = Options(temperature=4.0, top_k=40, top_p=0.9, seed=7)


@pytest.mark.parametrize("kind", BACKENDS)
def test_chunks_of_a_prompt_leave_the_same_bits(kind):
    prompt = golden(EXPERTS)["p2.prompt"].tolist()
    whole = BACKENDS[kind](EXPERTS)
    logits = whole.prefill(prompt).logits()
    for chunk in (1, 5, 16):
        parts = BACKENDS[kind](EXPERTS, prefill_chunk=chunk)
        assert (parts.prefill(prompt).logits() == logits).all()
        assert same_bits(parts.snapshot(), whole.snapshot())


class Tied:
    """The golden Qwen3 pair with random mixtures for its MLPs: experts 1, 4 and 6 are always equally likely."""

    def __init__(self, spec):
        self.spec = replace(
            pair("qwen3"),
            target=replace(pair("qwen3").target, architecture="qwen3_moe", experts=spec, intermediate_size=0),
        )
        self.weights, self.base = pair_programs(self.spec).weights, store("qwen3")

    def get(self, name):
        if self.weights[name].module not in ("experts", "router"):
            return self.base.get(name)
        shape = self.weights[name].shape
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape) / np.sqrt(shape[1])
        if name.endswith(".mlp.gate"):
            values[[4, 6]] = values[1]
        return WideWeight(torch.tensor(values).bfloat16().view(torch.uint16).numpy())

    def kv_scale(self, state):
        return 1.0, 1.0


@pytest.mark.parametrize(
    ("spec", "precision"),
    [
        (ExpertsSpec(8, 3, 32, None, True), ENGINE),
        (ExpertsSpec(8, 2, 32, None, False), FLOAT32),
        (ExpertsSpec(8, 8, 32, 32, True), ENGINE),
    ],
)
def test_ties_between_experts_change_nothing_either(spec, precision):
    made = Tied(spec)
    backend = ReferenceBackend(made.spec, made, precision, max_context=160)
    prompt = golden("qwen3")["p2.prompt"].tolist()
    result = verify_lossless(backend, [prompt], max_new_tokens=28, sampled=SAMPLED)
    assert result.differences == ()
    assert set(range(1, made.spec.verify_rows + 1)) <= set(result.histogram["staircase"])
