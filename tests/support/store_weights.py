"""A native backend's weights from any WeightStore, repacked one stack at a time."""

from dataclasses import replace

import numpy as np

from edge_dflash.backends.cuda.kernels.linear import LinearWeights
from edge_dflash.backends.cuda.weights import embedding_bits, vector
from edge_dflash.weights.layout import repack, shared_part
from edge_dflash.weights.stacks import ExpertStack


class StoreWeights:
    """NativeWeights of ``store``, whose weights have these formats."""

    def __init__(self, store, formats):
        self._store, self.formats = store, formats

    def stack(self, gpu, stack):
        if not isinstance(stack, ExpertStack):
            return LinearWeights.of(gpu, self._repacked(stack.names, stack.layout))
        members = [self._repacked(stack.expert(index), stack.layout) for index in range(stack.experts)]
        shared = tuple(self._store.get(name) for name in stack.expert(stack.experts))
        for part in range(stack.parts):
            members.append(repack(shared_part(shared, stack.layout, part), swiglu=stack.layout.swiglu))
        data, scale = (np.concatenate([getattr(one, name) for one in members]) for name in ("data", "scale"))
        return LinearWeights.of(gpu, replace(members[0], data=data, scale=scale))

    def _repacked(self, names, layout):
        return repack([self._store.get(name) for name in names], swiglu=layout.swiglu)

    def embedding(self, gpu, name):
        return gpu.upload(embedding_bits(self._store, name))

    def vector(self, name):
        return vector(self._store, name)

    def kv_scale(self, state):
        return self._store.kv_scale(state)
