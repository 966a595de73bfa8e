"""Bundles on the reference backend with planted faults, and their self-tests."""

from dataclasses import replace

import numpy as np

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.backends.selftest import run_selftest
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, WideWeight


class Damaged:
    """A bundle whose weights or KV scales are changed on the way."""

    def __init__(self, bundle, weight=lambda name, weight: weight, scale=lambda state, scales: scales):
        self._bundle, self._weight, self._scale = bundle, weight, scale

    def get(self, name):
        return self._weight(name, self._bundle.get(name))

    def kv_scale(self, state):
        return self._scale(state, self._bundle.kv_scale(state))


def backend_of(bundle, spec=None, store=None, precision=None):
    manifest = bundle.manifest
    return ReferenceBackend(
        spec or bundle.pair,
        store or bundle,
        precision or manifest.precision,
        max_context=manifest.max_context,
        prefill_chunk=manifest.prefill_chunk,
    )


def shuffled(wanted):
    """Rows of one matrix, or values of one vector, in another order."""

    def change(name, weight):
        if name != wanted:
            return weight
        order = np.random.default_rng(0).permutation(weight.shape[0])
        if isinstance(weight, Nvfp4Weight):
            return replace(weight, packed=weight.packed[order], block_scale=weight.block_scale[order])
        if isinstance(weight, Fp8Weight):
            return replace(weight, data=weight.data[order])
        return WideWeight(weight.data[order])

    return change


TARGET_STORES = {
    "rows of a down projection shuffled": {"weight": shuffled("target.layers.7.mlp.down_proj")},
    "rows of a value projection shuffled": {"weight": shuffled("target.layers.3.self_attn.v_proj")},
    "rows of the head shuffled": {"weight": shuffled("target.lm_head")},
}


def outcome(bundle, selftest, **changes):
    """Results with and without the promise of bits; the passes are the same."""
    exact = run_selftest(backend_of(bundle, **changes), selftest, exact=True)
    return exact, replace(exact, exact=False)
