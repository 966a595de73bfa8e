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
    ConfigError,
    ContextError,
    EdgeDflashError,
    EngineFailedError,
    QueueFullError,
    RecipeError,
    RequestCancelledError,
    RequestError,
    ServiceError,
    UnsupportedModelError,
    VerificationError,
)
from edge_dflash.plan import Increment, Plan, PlanTimings
from edge_dflash.planner import Planner
from edge_dflash.planner_session import PlannerSession
from edge_dflash.remote.planner import RemotePlanner
from edge_dflash.remote.session import RemoteSession
from edge_dflash.request.options import PlanOptions
from edge_dflash.request.stream import AsyncPlanStream, PlanStream
from edge_dflash.spec.relaxed import Relaxation
from edge_dflash.tool_calls import MalformedToolCall, ToolCall

__all__ = [
    "AsyncPlanStream",
    "BackendError",
    "BuildError",
    "Bundle",
    "BundleError",
    "CheckpointError",
    "ConfigError",
    "ContextError",
    "EdgeDflashError",
    "EngineFailedError",
    "Increment",
    "MalformedToolCall",
    "Plan",
    "PlanOptions",
    "PlanStream",
    "PlanTimings",
    "Planner",
    "PlannerSession",
    "QueueFullError",
    "RecipeError",
    "Relaxation",
    "RemotePlanner",
    "RemoteSession",
    "RequestCancelledError",
    "RequestError",
    "ServiceError",
    "ToolCall",
    "UnsupportedModelError",
    "VerificationError",
    "__version__",
]
