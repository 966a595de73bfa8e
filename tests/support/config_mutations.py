"""One-key mutations of the configurations of targets and drafters, and what the parser makes of each.

A mutation drops a key, or gives it null, another type, another value, a negative or a huge one, or moves it into or out
of a nested object. Its outcome is one of

    read             the specs change, or the value means what the old one did
    overridden       a key that is read, beside another that the table says wins
    refused          a CheckpointError that names the key, or the one that it no longer agrees with
    without effect   the table says so, and why
"""

import copy
import json
from dataclasses import dataclass

from golden_pairs import GOLDEN

from edge_dflash.errors import CheckpointError
from edge_dflash.model import config, vision
from edge_dflash.model.fields import ANY, REQUIRED
from edge_dflash.model.registry import DRAFTERS, TARGETS, read_drafter_spec, read_target_spec
from edge_dflash.weights import declared
from edge_dflash.weights.declared import check_quantization

DROP = object()
OUTCOMES = ("read", "overridden", "refused", "without effect")
CHANGED = "read, and it changes the outcome"
CONFIG, HF_QUANT, GENERATION = "config.json", "hf_quant_config.json", "generation_config.json"
IMAGES, PROCESSOR = vision.FLAT_FILE, vision.FILE
MIXED = "model.layers.0.mlp.down_proj"
CHECKED = ("quantization_config", "quantization")  # objects that may refuse a checkpoint, and change nothing
# A key that no longer agrees with another is refused by the name of either.
PARTNERS = {
    "num_hidden_layers": ("layer_types",),
    "num_attention_heads": ("num_key_value_heads",),
    "head_dim": ("partial_rotary_factor", "mrope_section"),
    "linear_num_key_heads": ("linear_num_value_heads",),
    "vocab_size": ("eos_token_id",),
    "layer_types": ("sliding_window", "use_sliding_window", "full_attention_interval", "linear_"),
    "text_config": ("architectures", "lacks the field"),
    "rope_type": ("rope_type",),
    "type": ("rope_type", "rope_scaling"),
    "rope_parameters": ("rope_theta", "rope_scaling"),
    "rope_scaling": ("rope_theta", "rope_parameters"),
    "beta_slow": ("beta_fast",),
    "use_swa": ("sliding_window", "swa_window_size"),
    "swa_window_size": ("sliding_window",),
    "dflash_config": ("mask_token_id",),
    "use_sliding_window": ("sliding_window",),
    "num_experts": ("num_local_experts",),
    "num_local_experts": ("num_experts",),
    "out_hidden_size": ("hidden_size",),
    "hidden_size": ("out_hidden_size", "num_heads"),
    "spatial_merge_size": ("merge_size",),
    "size": ("min_pixels",),
    "min_pixels": ("max_pixels", "shortest_edge"),
    "shortest_edge": ("max_pixels",),
    "longest_edge": ("max_pixels",),
    "max_pixels": ("longest_edge",),
    "image_token_id": ("another token than image_token_id",),
    "partial_rotary_factor": ("mrope_section",),
    "image_processor": ("no such setting",),
}


@dataclass(frozen=True)
class Base:
    """The JSON files of a checkpoint, before one key changes."""

    name: str
    files: dict
    drafter: bool = False

    def outcome(self, directory, files=None):
        """What the parser makes of these files: the spec, where it takes what is said of quantization."""
        for name, content in (files or self.files).items():
            (directory / name).write_text(json.dumps(content))
        spec = (read_drafter_spec if self.drafter else read_target_spec)(directory)
        check_quantization(directory)
        for name in files or self.files:
            (directory / name).unlink()
        return spec


@dataclass(frozen=True)
class Mutation:
    """One key of one file of a base changed; ``into``: the path that the key moves to."""

    base: Base
    file: str
    path: tuple
    how: str
    new: object = DROP
    into: tuple | None = None

    @property
    def key(self):
        return self.path[-1]

    @property
    def label(self):
        where = "" if self.into is None else f" to {'.'.join(self.into) or 'the top'}"
        return f"{self.base.name}: {'.'.join(self.path)} {self.how}{where}"

    def files(self):
        """The files with the key changed."""
        files = self.base.files | {self.file: copy.deepcopy(self.base.files[self.file])}
        old = at(files[self.file], self.path[:-1])
        value = old.pop(self.key, None)
        if self.into is not None:
            at(files[self.file], self.into)[self.key] = value
        elif self.new is not DROP:
            old[self.key] = copy.deepcopy(self.new)
        return files

    def declared(self, files, path):
        """The table's entry of a path of the mutated files; None: an unknown key."""
        table = root(self.base, self.file, files)
        for step in path:
            key = (table or {}).get(step, (table or {}).get(ANY))
            if key is None:
                return None
            table = key.keys
            if step == "quantization_config":
                table = dialect(self.base.files[self.file].get(step))
        return key


def root(base, file, files):
    """The table of a whole file."""
    if file == GENERATION:
        return config.GENERATION
    if file == HF_QUANT:
        return declared.HF_QUANT
    if file in (IMAGES, PROCESSOR):
        return vision.IMAGES if file == IMAGES else vision.PROCESSOR
    if base.drafter:
        return next(kind.table for kind in DRAFTERS.values() if base.files[file]["architectures"][0] in kind.classes)
    (name,) = base.files[CONFIG]["architectures"]
    target = next(target for target in TARGETS.values() if name in target.classes)
    if files[CONFIG].get("text_config") is None:
        return target.table
    return vision.pictured(target.nested) if base.files.keys() & {IMAGES, PROCESSOR} else target.nested


def dialect(quantization):
    """The table of a quantization_config."""
    compressed = (quantization or {}).get("quant_method") == "compressed-tensors"
    return declared.COMPRESSED_TENSORS if compressed else declared.MODELOPT


def at(content, path):
    for step in path:
        content = content[step]
    return content


def bases():
    """Every form of target and drafter configuration that this version reads."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32.0}
    qwen3 = load("qwen3-tiny")
    old = {k: v for k, v in qwen3.items() if k not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}, "use_sliding_window": False}
    flat = load("qwen3_5-tiny")
    nested = load("qwen3_5-tiny-nvfp4-ct")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    nested["quantization_config"] |= {"kv_cache_scheme": scheme, "transform_config": {}, "version": "0.12"}
    interval = load("qwen3_5-tiny-nvfp4-modelopt")
    text = {k: v for k, v in interval["text_config"].items() if k not in ("layer_types", "rope_parameters")}
    text |= {"full_attention_interval": 4, "rope_theta": 1e7, "partial_rotary_factor": 0.125, "eos_token_id": [9, 4]}
    interval["text_config"] = text | {"rope_scaling": yarn, "attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "quantized_layers": {"lm_head": {"quant_algo": "FP8"}, MIXED: {"quant_algo": "NVFP4", "group_size": 16}},
        "producer": {"name": "modelopt"},
    }
    hf_quant = json.loads((GOLDEN / "qwen3_5-tiny-nvfp4-modelopt" / HF_QUANT).read_text())
    drafter = load("qwen3-tiny-dflash")
    sliding = load("qwen3_5-tiny-dflash") | {"is_causal": True}
    window = {k: v for k, v in load("qwen3_5-tiny-dflash").items() if k not in ("layer_types", "block_size")}
    window["dflash_config"] = window["dflash_config"] | {"block_size": 8, "causal": True}
    window |= {"max_window_layers": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    swa = load("qwen3-tiny-dflash")
    swa["dflash_config"] |= {"use_swa": True, "swa_window_size": 16}
    gated, twins = load("qwen3-tiny-dspark-gated"), ("sample_from_anchor", "enable_confidence_head")
    other = {key: value for key, value in gated.items() if key not in twins}
    other |= {"shift_label": True, "use_confidence_head": True}
    anchored = load("qwen3-tiny-dspark-rnn") | {"sample_from_anchor": False, "dspark_draft_topk": 8}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    experts |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": []}
    sees = load("vision-tiny")
    sees["vision_config"] |= {"hidden_size": 32, "rope_parameters": {"rope_type": "axial", "rope_theta": 5000.0}}
    images = json.loads((GOLDEN / "vision-tiny" / IMAGES).read_text())
    older = {key: value for key, value in images.items() if key != "size"} | {"min_pixels": 4096, "max_pixels": 65536}
    return [
        Base("qwen3", {CONFIG: qwen3, GENERATION: {"eos_token_id": [7, 8], "temperature": 0.6}}),
        Base("qwen3 with flat rotary keys", {CONFIG: old}),
        Base("qwen3_5", {CONFIG: flat}),
        Base("qwen3_5 nested, compressed-tensors", {CONFIG: nested}),
        Base("qwen3_5 nested, ModelOpt, no layer_types", {CONFIG: interval, HF_QUANT: hf_quant}),
        Base("qwen3_5, ModelOpt mixed", {CONFIG: flat | {"quantization_config": mixed}}),
        Base("qwen3_moe", {CONFIG: qwen3 | experts | {"decoder_sparse_step": 1}}),
        Base("qwen3_5_moe", {CONFIG: load("qwen3_5_moe-tiny")}),
        Base("qwen3_5_moe nested", {CONFIG: load("qwen3_5_moe-tiny-perexpert")}),
        Base("qwen3_5 that sees", {CONFIG: sees, IMAGES: images}),
        Base("qwen3_5 that sees, in newer words", {CONFIG: sees, PROCESSOR: {"image_processor": older}}),
        Base("drafter", {CONFIG: drafter}, drafter=True),
        Base("drafter with sliding layers", {CONFIG: sliding}, drafter=True),
        Base("drafter without layer_types", {CONFIG: window}, drafter=True),
        Base("drafter with use_swa", {CONFIG: swa}, drafter=True),
        Base("DFlash2", {CONFIG: load("qwen3_5-tiny-dflash2")}, drafter=True),
        Base("DSpark", {CONFIG: load("qwen3-tiny-dspark-vanilla")}, drafter=True),
        Base("DSpark in a trainer's words", {CONFIG: other}, drafter=True),
        Base("DSpark with DFlash's rows", {CONFIG: anchored}, drafter=True),
    ]


def load(name):
    return json.loads((GOLDEN / name / CONFIG).read_text())


def mutations(base):
    """Every mutation of a base: of its own keys, of known keys that it lacks, and of unknown ones."""
    for file, content in base.files.items():
        table = root(base, file, base.files)
        objects = list(_objects(content, table, ()))
        for path, values, known in objects:
            for key, value in values.items():
                yield Mutation(base, file, (*path, key), "dropped")
                for how, new in _changes(value):
                    yield Mutation(base, file, (*path, key), how, new)
                for other, target, _ in objects:
                    near = other == path[:-1] or other[:-1] == path
                    if near and key not in target and (*path, key) != other:
                        yield Mutation(base, file, (*path, key), "moved", into=other)
            for key in known:
                if key not in values and key != ANY:
                    for how, new in _added(known[key]):
                        yield Mutation(base, file, (*path, key), how, new)
            yield Mutation(base, file, (*path, "no_such_key"), "added", 1)


def _objects(content, table, path):
    """Every object of a file, with its path and table."""
    yield path, content, table or {}
    for key, value in content.items():
        entry = (table or {}).get(key, (table or {}).get(ANY))
        inner = entry.keys if entry is not None else None
        if key == "quantization_config" and value:
            inner = dialect(value)
        if isinstance(value, dict) and entry is not None and entry.kind == "object":
            yield from _objects(value, inner, (*path, key))


def _changes(value):
    """Other values of a key, by what it holds."""
    yield "null", None
    yield "a string", "x"
    yield "a list", [[]]
    if isinstance(value, bool):
        yield "the other", not value
        yield "an integer", int(value)
    elif isinstance(value, int | float):
        for how, new in (
            ("another", value * 2), ("more", value + 1), ("negative", -value), ("zero", 0), ("huge", 10**40),
            ("endless", 1e308), ("true", True), ("a float", float(value)), ("as text", str(value)),
        ):  # fmt: skip
            if type(new) is not type(value) or new != value:
                yield how, new
    elif isinstance(value, str):
        yield "true", True
        yield "a number", 3
        yield "empty", ""
    elif isinstance(value, list):
        yield "empty", []
        yield "shorter", value[:-1]
        yield "reversed", value[::-1]
        yield "true", True
    elif isinstance(value, dict):
        yield "empty", {}
        yield "true", True
    else:
        yield "a number", 3
        yield "true", True


def _added(key):
    """Values of a known key that a file lacks."""
    for new in {"integer": (1, 3, -1), "number": (0.5, 3.0, -1), "flag": (True, False)}.get(key.kind, (True, 3, "x")):
        yield f"added {new!r}", new
    if key.accepted:
        yield f"added {key.accepted[0]!r}", key.accepted[0]


def judge(mutation, directory, before):
    """One of the four outcomes, or a sentence that says what is wrong; ``before``: the base's own outcome."""
    files = mutation.files()
    try:
        after = mutation.base.outcome(directory, files)
    except CheckpointError as error:
        named = (mutation.key, *PARTNERS.get(mutation.key, ()))
        return "refused" if any(name in str(error) for name in named) else f"refused without its name: {error}"
    place = mutation.path if mutation.into is None else (*mutation.into, mutation.key)
    entry = mutation.declared(files, place)
    if entry is None:
        return "an unknown key is accepted"
    if entry.use == "without effect":
        return "without effect" if after == before else "has an effect, though the table says that it has none"
    if after != before:
        return CHANGED if entry.use == "read" else "has an effect, though the table does not read it"
    new = at(files[mutation.file], place[:-1]).get(mutation.key)
    old = at(mutation.base.files[mutation.file], mutation.path[:-1]).get(mutation.key)
    if entry.use == "refused unless" or (entry.kind == "object" and entry.accepted and isinstance(new, str)):
        return "read" if new is None or new in entry.accepted else "is accepted with a value that is not"
    if _meaning(entry, new) == _meaning(entry, old):
        return "read"
    if mutation.key in CHECKED:
        return "without effect"
    if entry.beside:
        return "overridden"
    return "read, and missing or null it means the same" if new is None else "is read and changes nothing"


def _meaning(entry, value):
    """What a value of a key that is read means: its default where it is null or missing; names have no order."""
    if value in (None, [], {}):
        value = entry.default
    if value is REQUIRED or value in (None, "", [], {}):
        return None
    return sorted(value) if entry.kind == "names" and not entry.accepted else value


def verdicts(base, directory):
    """Every mutation of a base with its outcome: one of OUTCOMES, or a sentence that says what is wrong.

    A missing or null key that changes nothing is read if another value of it, in the same place, is not the same.
    """
    before = base.outcome(directory)
    found = []
    for mutation in mutations(base):
        found.append((mutation, judge(mutation, directory, before)))
        for file in directory.iterdir():
            file.unlink()
    seen = {(m.file, m.path) for m, outcome in found if m.into is None and outcome in (CHANGED, "refused")}
    for mutation, outcome in found:
        proved = outcome == CHANGED or (outcome.startswith("read, and") and (mutation.file, mutation.path) in seen)
        yield mutation, "read" if proved else outcome
