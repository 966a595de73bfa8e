"""Every TensorRT name that the package uses, found in its source, with the release that has it.

    python tests/scripts/tensorrt_calls.py

prints a table in Markdown. A name's release is the earliest whose public header, reference or release notes we have
seen it in; it may be older. Needs no TensorRT.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "edge_dflash" / "backends" / "cuda" / "tensorrt"
HEADER = "NvInfer.h of 8.2.3"
SINCE: dict[str, tuple[str, str]] = {
    name: (release, source)
    for release, source, names in (
        (
            "8.2",
            HEADER,
            "Builder Builder.build_serialized_network Builder.create_builder_config Builder.create_network "
            "Builder.create_optimization_profile IBuilderConfig.add_optimization_profile "
            "IOptimizationProfile.set_shape ILogger ILogger.log "
            "ILogger.ERROR ILogger.INTERNAL_ERROR NetworkDefinitionCreationFlag DataType Weights "
            "DataType.FLOAT DataType.INT32 INetworkDefinition.add_input INetworkDefinition.mark_output "
            "INetworkDefinition.num_layers ITensor.name ILayer.name ILayer.get_output ILayer.set_input "
            "INetworkDefinition.add_slice "
            "INetworkDefinition.add_activation ActivationType ActivationType.SIGMOID "
            "INetworkDefinition.add_concatenation IConcatenationLayer.axis INetworkDefinition.add_constant "
            "INetworkDefinition.add_elementwise ElementWiseOperation ElementWiseOperation.SUM ElementWiseOperation.SUB "
            "ElementWiseOperation.PROD ElementWiseOperation.EQUAL INetworkDefinition.add_gather "
            "INetworkDefinition.add_matrix_multiply MatrixOperation MatrixOperation.NONE MatrixOperation.TRANSPOSE "
            "INetworkDefinition.add_reduce ReduceOperation ReduceOperation.AVG ReduceOperation.MAX ReduceOperation.MIN "
            "ReduceOperation.SUM INetworkDefinition.add_softmax ISoftMaxLayer.axes INetworkDefinition.add_shuffle "
            "IShuffleLayer.first_transpose IShuffleLayer.reshape_dims IShuffleLayer.second_transpose "
            "INetworkDefinition.add_select INetworkDefinition.add_unary UnaryOperation UnaryOperation.RECIP "
            "UnaryOperation.SQRT IDequantizeLayer.axis __version__ IBuilderConfig.create_timing_cache "
            "IBuilderConfig.set_timing_cache ITimingCache.serialize Runtime Runtime.deserialize_cuda_engine "
            "ICudaEngine.create_execution_context ICudaEngine.num_optimization_profiles "
            "IExecutionContext.set_optimization_profile_async",
        ),
        (
            "8.5",
            "added and deprecated APIs of 8.5.1",
            "ICudaEngine.num_io_tensors ICudaEngine.get_tensor_name ICudaEngine.get_tensor_dtype "
            "ICudaEngine.get_tensor_shape IExecutionContext.set_input_shape IExecutionContext.set_tensor_address "
            "IExecutionContext.infer_shapes IExecutionContext.execute_async_v3",
        ),
        ("8.6", "reference of 8.6; not in that of 8.5", "INetworkDefinition.add_cast DataType.FP8"),
        ("8.6", "trtexec --maxAuxStreams of 8.6", "IBuilderConfig.max_aux_streams"),
        ("9.0", "deprecation of the two-argument form", "INetworkDefinition.add_dequantize"),
        ("9.2", "release notes of 9.2", "NetworkDefinitionCreationFlag.STRONGLY_TYPED"),
        (
            "10.0",
            "reference of 10.0",
            "DataType.BF16 IBuilderConfig.progress_monitor IProgressMonitor IProgressMonitor.phase_start "
            "IProgressMonitor.phase_finish IProgressMonitor.step_complete ExecutionContextAllocationStrategy "
            "ExecutionContextAllocationStrategy.USER_MANAGED",
        ),
        ("10.0", "tests of MLIR-TensorRT: from 10.0, not 8.6", "ActivationType.GELU_ERF ActivationType.GELU_TANH"),
        (
            "10.1",
            "deprecation of the forms before",
            "IExecutionContext.set_device_memory ICudaEngine.device_memory_size_v2",
        ),
        ("10.3", "reference of 10.3; not in that of 10.2", "ISliceLayer.axes"),
        (
            "10.7",
            "release notes of 10.7",
            "IStreamReaderV2 IStreamReaderV2.read IStreamReaderV2.seek SeekPosition SeekPosition.SET SeekPosition.CUR "
            "SeekPosition.END",
        ),
        ("10.8", "release notes of 10.8", "DataType.FP4 INetworkDefinition.add_dynamic_quantize"),
        (
            "RTX 1.0",
            "reference of RTX 1.0; only that flavour",
            "ICudaEngine.create_runtime_config IRuntimeConfig.set_execution_context_allocation_strategy "
            "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy IRuntimeConfig.create_runtime_cache "
            "IRuntimeConfig.set_runtime_cache DynamicShapesKernelSpecializationStrategy "
            "DynamicShapesKernelSpecializationStrategy.EAGER",
        ),
        (
            "RTX 1.3",
            "reference of RTX 1.3; only that flavour",
            "ComputeCapability IBuilderConfig.num_compute_capabilities IBuilderConfig.set_compute_capability",
        ),
    )
    for name in names.split()
}


@dataclass(frozen=True)
class Call:
    """A name of the API and the files that use it."""

    name: str
    since: str
    source: str
    files: tuple[str, ...]


def used() -> dict[str, set[str]]:
    """Every attribute and word in the package's source, with the files that have it."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.glob("*.py")):
        for name in _names(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(name, set()).add(path.name)
    return found


def calls() -> list[Call]:
    """The table: names of SINCE that the package uses, oldest first."""
    files = used()
    return [
        Call(name, since, source, tuple(sorted(files[name.rpartition(".")[2]])))
        for name, (since, source) in SINCE.items()
        if name.rpartition(".")[2] in files
    ]


def _names(tree: ast.AST) -> Iterator[str]:
    """Attributes, keywords, methods that TensorRT calls, and single words, which may be members of an enumeration."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def main() -> None:
    """Print the table."""
    print("| TensorRT | since | source | used in |\n|---|---|---|---|")
    for call in calls():
        print(f"| {call.name} | {call.since} | {call.source} | {', '.join(call.files)} |")


if __name__ == "__main__":
    main()
