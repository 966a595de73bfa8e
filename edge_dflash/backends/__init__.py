"""Backends: everything that runs a Program. :func:`load` picks the one a bundle was built for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_dflash.backends.base import Backend
from edge_dflash.errors import BackendError

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
        from edge_dflash.backends.reference.backend import ReferenceBackend  # torch is heavy and optional
    except ModuleNotFoundError as error:
        raise BackendError(
            f"the reference backend needs {error.name}; install it with: pip install 'edge-dflash[build]'"
        ) from None
    return ReferenceBackend(
        bundle.pair,
        bundle,
        manifest.precision,
        max_context=manifest.max_context,
        prefill_chunk=manifest.prefill_chunk,
    )
