import json
import re

import pytest
from builder_support import add_scalars, add_tokenizer, config_of, copy_target, recipe

from edge_dflash.builder.decide import decide
from edge_dflash.builder.scales import Scales, dump_scales, load_scales
from edge_dflash.builder.write import build
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import BuildError

W4A4 = """
schema: 1
name: w4a4
target: {attention: keep, gated_delta: keep, mlp: keep, lm_head: keep}
drafter: {attention: keep, mlp: keep, fc: keep}
activations: nvfp4
kv: KV
calibration: {tokens: 32}
"""
GATE = "model.language_model.layers.0.mlp.gate_proj"


def w4a4(directory, kv="fp8"):
    return recipe(directory, W4A4.replace("KV", kv))


def test_calibration_json_round_trip():
    scales = Scales({"a.kv": (0.1, 1 / 3)}, {"b": 1e-7}, ("a.kv",), 64, "0" * 64, 1.25)
    assert load_scales(dump_scales(scales)) == scales


def test_nvfp4_activations_are_calibrated_and_stored_with_the_weights(tmp_path):
    target = add_tokenizer(copy_target("modelopt", tmp_path / "target"), 512)
    add_scalars(target, {f"{GATE}.input_scale": 0.125})
    bundle = Bundle.open(build(config_of("modelopt", tmp_path / "out", target=target, recipe=w4a4(tmp_path))).bundle)
    scales = load_scales((bundle.path / "calibration.json").read_bytes())
    assert scales.stored == ("target.layers.0.mlp.gate_proj",)
    linears = {name for name, form in bundle.manifest.weights.items() if form == "nvfp4"}
    assert scales.inputs.keys() == linears
    assert all(bundle.get(name).input_scale == scale for name, scale in scales.inputs.items())
    assert scales.inputs["target.layers.0.mlp.gate_proj"] == 0.125


def test_stored_input_scales_are_dropped_when_activations_stay_wide(tmp_path):
    target = copy_target("modelopt", tmp_path / "target")
    add_scalars(target, {f"{GATE}.input_scale": 0.125})
    bundle = Bundle.open(build(config_of("modelopt", tmp_path / "out", target=target)).bundle)
    assert bundle.get("target.layers.0.mlp.gate_proj").input_scale is None


def test_nvfp4_activations_without_calibration_are_refused(tmp_path):
    config = config_of("modelopt", tmp_path / "out", recipe=w4a4(tmp_path))
    with pytest.raises(
        BuildError, match=r"measured scale for target.layers.0.*has no tokenizer.json; calibrate, or set"
    ):
        decide(config)
    target = add_tokenizer(copy_target("modelopt", tmp_path / "target"), 512)
    config = config_of("modelopt", tmp_path / "out", target=target, recipe=w4a4(tmp_path), calibrate=False)
    with pytest.raises(BuildError, match="but calibration is switched off"):
        decide(config)


def test_calibration_can_be_switched_off_and_is_not_run_without_need(tmp_path):
    target = add_tokenizer(copy_target("qwen3", tmp_path / "target"), 512)
    plan = decide(config_of("qwen3", tmp_path / "out", target=target, calibrate=False))
    assert plan.scales.ids == ()
    assert plan.warnings == ("FP8 scale 1.0 for the keys and values of 9 layers: calibration is switched off",)
    wide = recipe(tmp_path, "schema: 1\nname: x\nkv: bf16\nrounding: max\n")
    plan = decide(config_of("qwen3", tmp_path / "out", target=target, recipe=wide))
    assert (plan.scales.ids, plan.warnings) == ((), ())


def test_a_tokenizer_without_a_chat_template_calibrates_on_the_text(tmp_path):
    target = add_tokenizer(copy_target("qwen3", tmp_path / "target"), 512)
    plain = decide(config_of("qwen3", tmp_path / "out", target=target)).scales.ids
    (target / "tokenizer_config.json").write_text("{}")
    ids = decide(config_of("qwen3", tmp_path / "out", target=target)).scales.ids
    assert len(ids) == len(plain) == 1016
    assert ids != plain


def test_a_template_that_refuses_the_prompts_is_named(tmp_path):
    target = add_tokenizer(copy_target("qwen3", tmp_path / "target"), 512)
    (target / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    plan = decide(config_of("qwen3", tmp_path / "out", target=target))
    refused, plain = plan.warnings
    assert refused.startswith(f"{target}: the chat template refuses the messages: no system role: chats are refused")
    assert "prompts of robot_planning.jsonl calibrate as plain text" in plain
    assert len(plan.scales.ids) == 1016


SAYS_ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"
TO_USERS = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + SAYS_ALL


@pytest.mark.parametrize(
    ("files", "warned"),
    [
        ({"chat_template.jinja": TO_USERS}, r"calibrate as plain text, without turns: .*no system role"),
        ({"additional_chat_templates/tool_use.jinja": "x"}, r"has no chat template by default \(it has tool_use\)"),
        ({"chat_template.jinja": "{% generation %}" + SAYS_ALL + "{% endgeneration %}{{ strftime_now('%Y') }}"}, None),
        ({"chat_template.json": json.dumps({"chat_template": SAYS_ALL})}, None),
        ({}, "has no chat template: chats are refused"),
    ],
)
def test_what_a_build_says_of_templates_and_keeps_of_them(tmp_path, files, warned):
    target = add_tokenizer(copy_target("qwen3", tmp_path / "target"), 512)
    (target / "tokenizer_config.json").write_text("{}")
    for name, text in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(text)
    plan = decide(config_of("qwen3", tmp_path / "out", target=target))
    assert len(plan.scales.ids) > 100
    assert [warned] * (warned is not None) == [warned for text in plan.warnings if re.search(warned or "^", text)]
    kept = {path.relative_to(target).as_posix() for path in plan.tokenizer_files}
    assert kept == {"tokenizer.json", "tokenizer_config.json", *files}
    assert set(files) <= {source.file for source in plan.manifest.sources}
