"""What the driver decides about blocks on a multiprocessor: how many clusters fit, and how memory is divided there."""

from __future__ import annotations

from cuda.bindings import driver as cu

from edge_dflash.backends.cuda.driver import Kernel
from edge_dflash.errors import BackendError


def most_clusters(kernel: Kernel, blocks: int, threads: int, shared_bytes: int) -> int:
    """Clusters of ``blocks`` blocks of ``kernel`` that run at the same time; 0: not even one.

    ``threads`` and ``shared_bytes`` (dynamic) are a block's. Raises BackendError when the driver refuses to say.
    """
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = blocks, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    status, count = cu.cuOccupancyMaxActiveClusters(kernel.handle, config)
    if status != cu.CUresult.CUDA_SUCCESS:
        raise BackendError(f"asking how many clusters of {blocks} blocks of {kernel.name} fit failed: {status.name}")
    return int(count)


def prefer_shared(kernel: Kernel) -> None:
    """Run ``kernel`` with as much of the L1 cache as possible made shared memory.

    A multiprocessor must be empty to change that division: kernels that ask for the same one can overlap.
    """
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    (status,) = cu.cuFuncSetAttribute(kernel.handle, attribute, 100)
    if status != cu.CUresult.CUDA_SUCCESS:
        raise BackendError(f"asking for shared memory for {kernel.name} failed: {status.name}")
