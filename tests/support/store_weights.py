"""A native backend's weights from any WeightStore, repacked one stack at a time."""

from edge_dflash.backends.cuda.linear import LinearWeights
from edge_dflash.backends.cuda.weights import embedding_bits, vector
from edge_dflash.weights.layout import repack


class StoreWeights:
    """NativeWeights of ``store``, whose weights have these formats."""

    def __init__(self, store, formats):
        self._store, self.formats = store, formats

    def stack(self, gpu, stack):
        return LinearWeights.of(
            gpu, repack([self._store.get(name) for name in stack.names], swiglu=stack.layout.swiglu)
        )

    def embedding(self, gpu, name):
        return gpu.upload(embedding_bits(self._store, name))

    def vector(self, name):
        return vector(self._store, name)

    def kv_scale(self, state):
        return self._store.kv_scale(state)
