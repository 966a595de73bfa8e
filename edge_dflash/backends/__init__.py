"""Backends: everything that runs a Program. :func:`load` picks the one a bundle was built for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_dflash.backends.base import Backend
from edge_dflash.errors import BackendError

SMALL_MODEL = 1024  # hidden size up to which torch runs on one thread: more would mostly wait for each other

if TYPE_CHECKING:
    from edge_dflash.bundle.reader import Bundle


def load(bundle: Bundle) -> Backend:
    """Load an open bundle for one sequence. Raises BackendError when its backend cannot run here."""
    manifest = bundle.manifest
    if manifest.backend != "reference":
        raise BackendError(
            f"{bundle.path} was built for the {manifest.backend!r} backend, this version runs 'reference'; "
            "build again with --arch cpu --backend reference"
        )
    try:
        import torch  # heavy and optional

        from edge_dflash.backends.reference.backend import ReferenceBackend
    except ModuleNotFoundError as error:
        raise BackendError(
            f"the reference backend needs {error.name}; install it with: pip install 'edge-dflash[build]'"
        ) from None
    if bundle.pair.target.hidden_size <= SMALL_MODEL:
        torch.set_num_threads(1)
    return ReferenceBackend(
        bundle.pair,
        bundle,
        manifest.precision,
        max_context=manifest.max_context,
        prefill_chunk=manifest.prefill_chunk,
    )
