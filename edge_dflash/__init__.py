"""edge-dflash: lossless speculative decoding with DFlash drafters, for language models on robots.

The names here are the public API of the runtime; building is :mod:`edge_dflash.builder.write`. Importing them does
not import torch, and a name is imported when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edge_dflash.version import __version__

if TYPE_CHECKING:
    from edge_dflash.bundle.reader import Bundle
    from edge_dflash.client.planner import RemotePlanner, RemoteSession
    from edge_dflash.decode.accept import Relaxation
    from edge_dflash.decode.logprobs import TokenLogprob
    from edge_dflash.decode.options import PlanOptions
    from edge_dflash.errors import (
        BackendError,
        BuildError,
        BundleError,
        CheckpointError,
        ConfigError,
        ContextError,
        DeviceLostError,
        EdgeDflashError,
        EngineFailedError,
        ImageError,
        QueueFullError,
        RecipeError,
        RequestCancelledError,
        RequestError,
        ServiceError,
        StorageError,
        UnsupportedModelError,
        VerificationError,
    )
    from edge_dflash.planner import Planner
    from edge_dflash.result import Increment, Plan, PlanTimings, Score
    from edge_dflash.runner.astream import AsyncPlanStream
    from edge_dflash.runner.stream import PlanStream
    from edge_dflash.session import PlannerSession
    from edge_dflash.text.tool_calls import MalformedToolCall, ToolCall

__all__ = [
    "AsyncPlanStream",
    "BackendError",
    "BuildError",
    "Bundle",
    "BundleError",
    "CheckpointError",
    "ConfigError",
    "ContextError",
    "DeviceLostError",
    "EdgeDflashError",
    "EngineFailedError",
    "ImageError",
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
    "Score",
    "ServiceError",
    "StorageError",
    "TokenLogprob",
    "ToolCall",
    "UnsupportedModelError",
    "VerificationError",
    "__version__",
]

_MODULES = {
    "bundle.reader": ("Bundle",),
    "result": ("Increment", "Plan", "PlanTimings", "Score"),
    "planner": ("Planner",),
    "session": ("PlannerSession",),
    "client.planner": ("RemotePlanner", "RemoteSession"),
    "decode.options": ("PlanOptions",),
    "runner.astream": ("AsyncPlanStream",),
    "runner.stream": ("PlanStream",),
    "decode.logprobs": ("TokenLogprob",),
    "decode.accept": ("Relaxation",),
    "text.tool_calls": ("MalformedToolCall", "ToolCall"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF.get(name, 'errors')}"), name)
    globals()[name] = value
    return value
