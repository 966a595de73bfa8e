"""edge-dflash: lossless speculative decoding with DFlash drafters, for language models on robots.

The names here are the public API of the runtime; building is :mod:`edge_dflash.build.builder`. Importing them does
not import torch.
"""

from edge_dflash.version import __version__

# isort: split
# (what follows may import the version from here)

from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import (
    BackendError,
    BuildError,
    BundleError,
    CheckpointError,
    ContextError,
    EdgeDflashError,
    QueueFullError,
    RecipeError,
    RequestCancelledError,
    RequestError,
    UnsupportedModelError,
    VerificationError,
)
from edge_dflash.plan import Increment, Plan, PlanTimings
from edge_dflash.planner import Planner, PlanStream

__all__ = [
    "BackendError",
    "BuildError",
    "Bundle",
    "BundleError",
    "CheckpointError",
    "ContextError",
    "EdgeDflashError",
    "Increment",
    "Plan",
    "PlanStream",
    "PlanTimings",
    "Planner",
    "QueueFullError",
    "RecipeError",
    "RequestCancelledError",
    "RequestError",
    "UnsupportedModelError",
    "VerificationError",
    "__version__",
]
