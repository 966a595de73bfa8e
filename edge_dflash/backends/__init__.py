"""Backends: everything that runs a Program. :func:`load` picks the active one of a bundle.

A backend is a folder here, a row of ``LOADERS``, and one of :data:`edge_dflash.board.archs.RUNS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from edge_dflash.board.linux import drop_page_cache
from edge_dflash.decode.backend import Backend
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs

SMALL_MODEL = 1024  # hidden size up to which torch runs on one thread: more would mostly wait for each other

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.loading import Launches
    from edge_dflash.bundle.reader import Bundle
    from edge_dflash.model.specs import PairSpec


def load(bundle: Bundle, backend: str | None = None, *, drafter: bool = True, lanes: int = 1) -> Backend:
    """Load an open bundle for ``lanes`` sequences, on its active backend or (``backend``) on another that is aboard.

    ``drafter`` False: the target alone. Raises BackendError when the backend is not aboard or cannot run here.
    """
    manifest = bundle.manifest
    pair = bundle.pair if drafter else replace(bundle.pair, drafter=None)
    backend = backend or manifest.backend
    if backend not in manifest.backends:
        raise BackendError(
            f"{bundle.path} was built for {', '.join(manifest.backends)}, not for {backend}; "
            f"build it again with --backend {backend}"
        )
    return LOADERS[backend](bundle, backend, pair, lanes)


def _reference(bundle: Bundle, name: str, pair: PairSpec, lanes: int) -> Backend:
    try:
        import torch  # heavy and optional

        from edge_dflash.backends.reference.backend import ReferenceBackend
    except ModuleNotFoundError as error:
        raise BackendError(
            f"the {name} backend needs {error.name}; install it with: pip install 'edge-dflash[build]'"
        ) from None
    manifest = bundle.manifest
    needed = 4 * sum(prod(weight.shape) for weight in pair_programs(pair).weights.values())
    if needed > (held := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise BackendError(
            f"{bundle.path}: the reference backend holds weights as float32, {needed / 1e9:,.1f} GB, this machine has "
            f"{held / 1e9:,.1f} GB; build the bundle for a GPU, or run it on a larger machine"
        )
    if bundle.pair.target.hidden_size <= SMALL_MODEL:
        torch.set_num_threads(1)
    return ReferenceBackend(
        pair,
        bundle,
        manifest.precision,
        max_context=manifest.max_context,
        prefill_chunk=manifest.prefill_chunk,
        lanes=lanes,
    )


def _device(bundle: Bundle, name: str, pair: PairSpec, lanes: int) -> Backend:
    """Check that bundle, this version and this device belong together, then load. Never imports torch."""
    from edge_dflash.backends.cuda.support import check_arch, device_sm, shares_memory

    manifest = bundle.manifest
    try:
        sm = device_sm()
    except BackendError as error:
        raise BackendError(
            f"{bundle.path} was built for {manifest.arch}: {error}; to run it on a CPU, build it with "
            "--backend reference --arch cpu"
        ) from None
    check_arch(manifest.arch, sm, str(bundle.path), name)
    from edge_dflash.backends.cuda.backend import NativeBackend
    from edge_dflash.backends.cuda.compile import kernels_digest
    from edge_dflash.backends.cuda.support import check_native
    from edge_dflash.backends.cuda.weights import BundleWeights

    if (found := manifest.tools.get("kernels")) != (wanted := kernels_digest()):
        raise BackendError(
            f"{bundle.path} holds kernels {found} of {manifest.created_by}, this version launches {wanted}; "
            f"build it again with {manifest.options}"
        )
    dense: Launches | None = None  # the native backend's own
    if name == "tensorrt":
        from edge_dflash.backends.cuda.tensorrt.dense import bundle_ops

        if pair != bundle.pair:
            raise BackendError(
                f"the plans of {bundle.path} compute the drafter's context with the target; decode plainly with "
                "speculative=False, or build a bundle without a drafter"
            )
        dense = bundle_ops(bundle)
    else:
        check_native(pair, manifest.weights, arch=manifest.arch)
    backend = NativeBackend(
        pair,
        BundleWeights(bundle),
        manifest.precision,
        cubin=bundle.cubin,
        max_context=manifest.max_context,
        prefill_chunk=manifest.prefill_chunk,
        lanes=lanes,
        dense=dense,
    )
    if shares_memory():  # the files' pages lie in the memory that the engine shares with everything else
        drop_page_cache(bundle.path)
    return backend


LOADERS: Mapping[str, Callable[[Bundle, str, PairSpec, int], Backend]] = {
    "reference": _reference,
    "native": _device,
    "tensorrt": _device,
}
"""By name: (bundle, name, pair, lanes) -> the backend."""
