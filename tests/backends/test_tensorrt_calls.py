"""Every TensorRT name that the package uses, with the release that has it: as in the source, and in the API."""

import ast
import inspect
from pathlib import Path

import pytest

from edge_dflash.backends.cuda import tensorrt
from edge_dflash.backends.cuda.tensorrt.flavours import TENSORRT, TENSORRT_RTX, load

SINCE = {  # the earliest whose public header, reference or release notes have it; it may be older
    name: release
    for release, _, names in (
        (
            "8.2",
            "NvInfer.h of 8.2.3",
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


def names_of(tree):
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


def used():
    """Every attribute and word in the package's source."""
    paths = Path(tensorrt.__file__).parent.glob("*.py")
    return {name for path in paths for name in names_of(ast.parse(path.read_text(encoding="utf-8")))}


def number(release):
    return tuple(int(part) for part in release.split("."))


def test_every_name_of_the_table_is_used():
    assert {name.rpartition(".")[2] for name in SINCE} <= used()


def test_nothing_is_newer_than_the_first_version_that_we_run_on():
    releases = set(SINCE.values())
    assert max(number(r) for r in releases if not r.startswith("RTX")) == number(TENSORRT.first)
    rtx = [number(r.removeprefix("RTX ")) for r in releases if r.startswith("RTX")]
    assert max(rtx) == number(TENSORRT_RTX.first)
    newer = {name for name, release in SINCE.items() if release.startswith("RTX")}
    never = ("ompute", "untime", "KernelSpecialization")  # what the other flavour is not asked
    assert all(any(part in name for part in never) for name in newer)


def members(trt):
    """Names of the API: members of the module, and of its classes and enumerations, each with its class."""
    found = {name: {name} for name in dir(trt)}
    for name, kind in inspect.getmembers(trt, inspect.isclass):
        for member in dir(kind):
            if not member.startswith("_"):
                found.setdefault(member, set()).add(f"{name}.{member}")
    return found


@pytest.mark.tensorrt
def test_every_name_of_the_table_exists():
    there = set().union(*members(load(TENSORRT_RTX)).values())
    assert set(SINCE) <= there


@pytest.mark.tensorrt
def test_every_name_of_the_api_in_the_source_is_in_the_table():
    listed = {name.rpartition(".")[2] for name in SINCE}
    ours = {  # names of ours, of Python or of NumPy that TensorRT has too
        *(
            "tensorrt_rtx",
            "clear",
            "append",
            "count",
            "constant",
            "data",
            "fp8",
            "op",
            "scale",
            "weights",
            "__name__",
            "format",
        ),
        *("float32", "int32", "uint8", "ctypes", "dtype", "nbytes", "shape", "size", "stride"),
        *("start", "bias", "block_size", "bfloat16", "engine", "enqueue"),
    }
    assert sorted(name for name in used() if name in members(load(TENSORRT_RTX)) and name not in listed | ours) == []
