"""What a checkpoint's configuration says about the storage of each module, to be compared with the tensors.

Two dialects: ModelOpt (hf_quant_config.json, or quantization_config with quant_method "modelopt") with shell globs,
and compressed-tensors (quantization_config) with exact names and ``re:`` patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from edge_dflash.common.files import is_there
from edge_dflash.common.processes import matching
from edge_dflash.common.tables import read_json
from edge_dflash.errors import CheckpointError
from edge_dflash.model.fields import ANY, Fields, Table, free, inner, integer, names, only, text
from edge_dflash.weights.formats import QUANTIZED
from edge_dflash.weights.stored import INT4, INT4_BITS, INT4_KIND, INT4_SPELLED, in_groups

WIDE = "wide"
Declared = Callable[[str], str | None]
"""Module path as in the checkpoint -> WIDE or the declared format; None when the configuration does not say."""

_SCALES: Table = {
    **free("how the scales were found", "observer observer_kwargs scale_dtype zp_dtype"),
    **only("symmetric", True, None, why="zero points"),
    **only("dynamic", False, None, why="scales that are not stored"),
    # "static" and "weight" are the order in which weights were rounded; they are stored in their own
    **only("actorder", False, None, "static", "weight", why="reordered groups"),
    **only("block_structure", None, why="scales of another shape"),
}
_KV_CACHE: Table = {
    **_SCALES,
    **only("num_bits", 8, why="a KV cache of another format", required=True),
    **only("type", "float", why="a KV cache of another format", required=True),
    **only("strategy", "tensor", None, why="not one scale a tensor"),
    **only("group_size", None, why="not one scale a tensor"),
}
_WEIGHTS: Table = {
    **_SCALES,
    "num_bits": integer(),
    "type": text(),
    "group_size": integer(16, null=True),
    **only("strategy", "tensor", "channel", "tensor_group", "group", None, why="scales of another shape"),
}
_ACTIVATIONS: Table = {
    **only("num_bits", 4, 8, why="another format of activations"),
    **only("type", "float", why="another format of activations"),
    **only("symmetric", True, None, why="zero points"),
    **free("the recipe and the stored input scales say how activations are rounded", ANY),
}
_FORMAT = only(
    "format",
    *("nvfp4-pack-quantized", "float-quantized", "naive-quantized", "mixed-precision", "pack-quantized", "dense", None),
    why="another format of weights",
)
_GROUP: Table = {
    **_FORMAT,
    "targets": names(),
    "weights": inner(_WEIGHTS, late=True),  # of a group of modules that are not used, such as mtp.*, nothing counts
    "input_activations": inner(_ACTIVATIONS),
    **only("output_activations", None, why="quantized outputs"),
}
COMPRESSED_TENSORS: Table = {
    **_FORMAT,
    **only("quant_method", "compressed-tensors", why="another format"),
    "config_groups": inner({ANY: inner(_GROUP)}),
    "ignore": names(),
    "kv_cache_scheme": inner(_KV_CACHE),
    **only("transform_config", None, {}, {"config_groups": {}}, why="weights in another basis"),
    "sparsity_config": inner({**only("format", "dense", None, why="sparse weights"), **free("dense weights", ANY)}),
    **free("the tensors show it", "quantization_status global_compression_ratio version run_compressed"),
}
"""quantization_config of compressed-tensors."""

_ALGORITHM: Table = {
    "quant_algo": text(default="", null=True),
    **only("group_size", 16, None, why="NVFP4 has groups of 16"),
    **only("has_zero_point", False, None, why="zero points"),
    **free("such scales are tensors, which are refused", "pre_quant_scale awq_block_size"),
}
MODELOPT: Table = {
    **_ALGORITHM,
    **only("quant_method", "modelopt", why="another format"),
    "kv_cache_quant_algo": text("FP8", default="FP8", null=True),
    "kv_cache_scheme": inner(_KV_CACHE, "FP8"),  # the text: ModelOpt before 0.33
    "ignore": names(),
    "exclude_modules": names(),
    "quantized_layers": inner({ANY: inner(_ALGORITHM)}),
    **free("quant_algo and quantized_layers say the same", "config_groups"),
    **free("a note of the tool that wrote the file", "producer"),
}
"""quantization_config of ModelOpt, and ``quantization`` of hf_quant_config.json."""

HF_QUANT: Table = {
    "quantization": inner(MODELOPT),
    **only("quant_method", "modelopt", None, why="another format"),
    **free("a note of the tool that wrote the file", "producer"),
}
"""hf_quant_config.json, and quantization_config of drafters that ModelOpt writes."""

MAX_PATTERNS, MAX_PATTERN = 512, 4096  # of a config, characters of one; published ones have a handful
MAX_GROUPS = 64
_RE = "re:"

_OTHER = {
    "fp8": "FP8 with a scale for each block of 128 x 128 is not read: take the checkpoint in BF16 or NVFP4",
    "gptq": "its 4-bit integers are not read: take the checkpoint in BF16 or NVFP4",
    "awq": "its 4-bit integers are not read: take the checkpoint in BF16 or NVFP4",
}
"""What to use in the place of other methods."""

_MODELOPT = {word: form.name for form in reversed(QUANTIZED) for word in form.modelopt}


def read_declared(directory: Path, modules: Sequence[str]) -> Declared:
    """Declared storage of these modules of the checkpoint in ``directory``. Raises CheckpointError.

    That is for an unknown scheme, and for patterns that are none or take too long.
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
    by_modelopt = isinstance(producer, dict) and producer.get("name") == "modelopt"
    if values and method is None and not nested and not by_modelopt:
        raise CheckpointError(f"{file} lacks the field {where}.quant_method; the checkpoint is incomplete")
    if method == "compressed-tensors":
        return _compressed_tensors(Fields(file, values, COMPRESSED_TENSORS, f"{where}."), modules)
    if method not in (None, "modelopt"):
        known = f"; {_OTHER[method]}" if isinstance(method, str) and method in _OTHER else ""
        raise CheckpointError(
            f"{file}: {where}.quant_method is {method!r}, wanted 'modelopt' or 'compressed-tensors'{known}"
        )
    mirror = Fields(file, values, HF_QUANT if nested else MODELOPT, f"{where}.")
    mirror = mirror.child("quantization") if nested else mirror
    own = directory / "hf_quant_config.json"
    if is_there(own):
        scheme = Fields(own, read_json(own), HF_QUANT).child("quantization")
        for key in ("quant_algo", "kv_cache_quant_algo"):
            if mirror.has(key) and mirror.text(key) != scheme.text(key):
                raise mirror.error(key, mirror.text(key), f"the same as in {own.name} ({scheme.text(key)!r})")
        return _modelopt(scheme, "exclude_modules")
    return _modelopt(mirror, "exclude_modules" if nested else "ignore")


def _modelopt(fields: Fields, exclude: str) -> Declared:
    algorithm = fields.text("quant_algo")
    ignored = _excluded(fields, exclude)
    layers = fields.child("quantized_layers")
    storages = {name: _modelopt_storage(layers.child(name)) for name in layers.values}
    if not algorithm:
        return lambda module: None
    if algorithm == "MIXED_PRECISION":
        if not storages:  # config.json mirrors the scheme without the list
            return lambda module: None
        return lambda module: next((storages[path] for path in _paths(module) if path in storages), WIDE)
    default = _modelopt_storage(fields)
    return lambda module: WIDE if ignored(module) else default


def _paths(module: str) -> Iterator[str]:
    """A module and what it is in: all experts of a layer may be listed as one."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _modelopt_storage(fields: Fields) -> str:
    algorithm = fields.text("quant_algo")
    if algorithm not in _MODELOPT:
        raise fields.error("quant_algo", algorithm, f"one of {', '.join(_MODELOPT)}")
    return _MODELOPT[algorithm]


def _excluded(fields: Fields, name: str) -> Callable[[str], bool]:
    """What ModelOpt excludes: a module and everything below it, by path or by shell glob."""
    listed = fields.names(name)
    globs = [pattern for pattern in listed if any(sign in pattern for sign in "*?[")]
    whole = frozenset(listed).difference(globs)
    _check_patterns(fields, name, globs)

    def match(module: str) -> bool:
        if any(path in whole for path in _paths(module)):
            return True
        return any(fnmatchcase(module, glob) or fnmatchcase(module, f"{glob}.*") for glob in globs)

    return match


def _named(items: Sequence[str], matched: Mapping[str, frozenset[str]]) -> Callable[[str], bool]:
    """What compressed-tensors names: by the end of a path, or by ``re:`` and a pattern of its beginning.

    "Linear" is a class, and no module is called so.
    """
    found = frozenset[str]().union(*(matched.get(item, ()) for item in items))
    ends = frozenset(item for item in items if not item.startswith(_RE))

    def match(module: str) -> bool:
        parts = module.split(".")
        return module in found or any(".".join(parts[at:]) in ends for at in range(len(parts)))

    return match


def _compressed_tensors(fields: Fields, modules: Sequence[str]) -> Declared:
    groups = fields.child("config_groups")
    if len(groups.values) > MAX_GROUPS:
        raise fields.error("config_groups", f"{len(groups.values)} groups", f"at most {MAX_GROUPS}")
    members = [groups.child(name) for name in groups.values]
    lists = [fields.names("ignore"), *(group.names("targets") for group in members)]
    matched = _matched(fields, [item for names in lists for item in names if item.startswith(_RE)], modules)
    ignored = _named(lists[0], matched)
    rules = []
    default = WIDE if members else None
    for group, listed in zip(members, lists[1:], strict=True):
        targets, linear = _named(listed, matched), "Linear" in listed
        if not listed or linear or any(map(targets, modules)):  # the others are of parts that are not used
            rules.append((targets, _ct_storage(group.child("weights")), linear))

    def declared(module: str) -> str | None:
        if ignored(module):
            return WIDE
        named = (storage for targets, storage, _ in rules if targets(module))
        every = (storage for _, storage, linear in rules if linear)  # "Linear" is every linear module
        return next(named, next(every, default))

    return declared


def _ct_storage(weights: Fields) -> str:
    if not weights.values:  # a group that quantizes activations or the KV cache alone
        return WIDE
    bits, kind = weights.integer("num_bits"), weights.text("type")
    if (bits, kind) == (INT4_BITS, INT4_KIND):
        channel = weights.values.get("strategy") == "channel"
        return INT4 if channel else in_groups(weights.integer("group_size"))
    for form in QUANTIZED:
        if (bits, kind) == form.compressed[:2] and form.compressed[2] in (None, weights.integer("group_size")):
            if weights.values.get("strategy") == "group":
                raise weights.error("strategy", "group", f"tensor, channel or tensor_group with type {kind!r}")
            return form.name
    raise CheckpointError(
        f"{weights.file}: weights of {bits} bits and type {kind!r} are not supported, "
        f"wanted {', or '.join((*(form.spelled for form in reversed(QUANTIZED)), INT4_SPELLED))}"
    )


def _matched(fields: Fields, patterns: Sequence[str], modules: Sequence[str]) -> dict[str, frozenset[str]]:
    """The modules that each ``re:`` pattern of ``ignore`` and ``config_groups`` matches."""
    _check_patterns(fields, "ignore and config_groups", patterns)
    try:
        found = matching([pattern.removeprefix(_RE) for pattern in patterns], modules)
    except ValueError as error:
        pattern, wanted = error.args
        raise fields.error("ignore or config_groups", f"{_RE}{pattern}", wanted) from None
    return {f"{_RE}{pattern}": names for pattern, names in found.items()}


def _check_patterns(fields: Fields, name: str, patterns: Sequence[str]) -> None:
    """Every pattern meets every module: what grows with both is bounded."""
    if len(patterns) > MAX_PATTERNS:
        raise fields.error(name, f"{len(patterns)} patterns", f"at most {MAX_PATTERNS} beside plain names")
    if long := [pattern for pattern in patterns if len(pattern) > MAX_PATTERN]:
        raise fields.error(name, long[0], f"patterns of at most {MAX_PATTERN} characters")
