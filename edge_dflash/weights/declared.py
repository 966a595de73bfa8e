"""What a checkpoint's configuration says of its quantization: refused where its tensors alone would be misread.

The tensors say how each module is stored, by their names, types and shapes (:mod:`edge_dflash.weights.stored`); which
modules a configuration lists, by globs and patterns, adds nothing to that and is not read. What tensors do not show is
checked here: the method, a basis in which weights were turned, sparsity, and the scheme of keys and values. Two
dialects: ModelOpt (hf_quant_config.json, or quantization_config) and compressed-tensors (quantization_config).
"""

from __future__ import annotations

from pathlib import Path

from edge_dflash.common.files import is_there
from edge_dflash.common.tables import read_json
from edge_dflash.errors import CheckpointError
from edge_dflash.model.fields import ANY, Fields, Table, free, inner, only
from edge_dflash.weights.formats import QUANTIZED

_KV_CACHE: Table = {
    **free("how the scales were found", "observer observer_kwargs scale_dtype zp_dtype actorder"),
    **only("symmetric", True, None, why="zero points"),
    **only("dynamic", False, None, why="scales that are not stored"),
    **only("block_structure group_size", None, why="not one scale a tensor"),
    **only("num_bits", 8, why="a KV cache of another format", required=True),
    **only("type", "float", why="a KV cache of another format", required=True),
    **only("strategy", "tensor", None, why="not one scale a tensor"),
}
COMPRESSED_TENSORS: Table = {
    **only("quant_method", "compressed-tensors", why="another format"),
    "kv_cache_scheme": inner(_KV_CACHE),
    **only("transform_config", None, {}, {"config_groups": {}}, why="weights in another basis"),
    "sparsity_config": inner({**only("format", "dense", None, why="sparse weights"), **free("dense weights", ANY)}),
    **free(
        "the tensors show it",
        "format config_groups ignore quantization_status global_compression_ratio version run_compressed",
    ),
}
"""quantization_config of compressed-tensors."""

_ALGORITHMS = tuple(word for form in reversed(QUANTIZED) for word in form.modelopt)
MODELOPT: Table = {
    **only("quant_algo", *_ALGORITHMS, "MIXED_PRECISION", None, "", why="another format of weights"),
    **only("quant_method", "modelopt", why="another format"),
    **only("kv_cache_quant_algo", "FP8", None, why="a KV cache of another format"),
    "kv_cache_scheme": inner(_KV_CACHE, "FP8"),  # the text: ModelOpt before 0.33
    **only("has_zero_point", False, None, why="zero points"),
    **free(
        "the tensors show it",
        "group_size pre_quant_scale awq_block_size ignore exclude_modules quantized_layers config_groups",
    ),
    **free("a note of the tool that wrote the file", "producer"),
}
"""quantization_config of ModelOpt, and ``quantization`` of hf_quant_config.json."""

HF_QUANT: Table = {
    "quantization": inner(MODELOPT),
    **only("quant_method", "modelopt", None, why="another format"),
    **free("a note of the tool that wrote the file", "producer"),
}
"""hf_quant_config.json, and quantization_config of drafters that ModelOpt writes."""


def check_quantization(directory: Path) -> None:
    """Refuse what the checkpoint in ``directory`` says of its quantization where this version reads no such thing.

    Raises CheckpointError, naming file, key, found and wanted.
    """
    file = directory / "config.json"
    config = read_json(file)
    places = [(path, part) for path, part in (("", config), ("text_config.", config.get("text_config"))) if part]
    found = [(path, part["quantization_config"]) for path, part in places if part.get("quantization_config")]
    path, values = found[0] if found else ("", {})
    where = f"{path}quantization_config"
    if any(other != values for _, other in found) or not isinstance(values, dict):
        raise CheckpointError(f"{file}: {where} is {values!r:.60}, wanted one object, in one place")
    method, nested = values.get("quant_method"), "quantization" in values  # as hf_quant_config.json has it
    producer = values.get("producer")  # ModelOpt before 0.33 says its name here alone
    by_modelopt = nested or method == "modelopt" or (isinstance(producer, dict) and producer.get("name") == "modelopt")
    if method == "compressed-tensors":
        Fields(file, values, COMPRESSED_TENSORS, f"{where}.")
    elif by_modelopt and method in (None, "modelopt"):
        Fields(file, values, HF_QUANT if nested else MODELOPT, f"{where}.")
    elif values:
        raise CheckpointError(
            f"{file}: {where}.quant_method is {method!r:.60}, wanted 'modelopt' or 'compressed-tensors': "
            "take the checkpoint in BF16, or in the FP8 or NVFP4 of one of them"
        )
    if is_there(own := directory / "hf_quant_config.json"):
        Fields(own, read_json(own), HF_QUANT)
