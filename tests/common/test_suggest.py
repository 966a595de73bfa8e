"""What "did you mean" may say: slips of a pen, never another setting."""

import pytest

from edge_dflash.common import rules
from edge_dflash.common.slips import SAME, slip_of
from edge_dflash.decode.grammar.keywords import KNOWN
from edge_dflash.decode.options import RULES

KEYS = ("attention_factor", "rope_theta", "top_k", "hidden_size", "minLength", "beta_slow", "layer_types", "conv1_size")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rope_thetaa", "rope_theta"), ("rope_teta", "rope_theta"), ("rope_thefa", "rope_theta"),
        ("rope_hteta", "rope_theta"), ("ropetheta", "rope_theta"), ("Rope_Theta", "rope_theta"),
        ("rope-theta", "rope_theta"), ("minLenght", "minLength"), ("minlength", "minLength"),
        ("layers_types", "layer_types"), ("topk", "top_k"),
    ],
)  # fmt: skip
def test_a_slip_is_known(name, meant):
    assert slip_of(name, KEYS) == meant


@pytest.mark.parametrize(
    "name",
    [
        "attn_factor",
        "top_p",
        "top_a",
        "min_p",
        "conv2_size",
        "rope_beta",
        "maxLength",
        "beta_fast",
        "hidden",
        "size",
        "",
    ],
)
def test_another_setting_is_no_slip(name):
    assert slip_of(name, KEYS) is None


def test_a_slip_of_two_names_says_none():
    assert slip_of("heads", ("head", "headss")) is None


OTHERS = (  # options of other engines for a request, which mean something else than any of ours
    "min_p", "top_a", "top_n", "typical_p", "min_tokens", "max_length", "max_prompt_tokens",
    "presence_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "best_of", "n", "stop_token_ids",
    "include_stop_str_in_output", "temperature_last", "dynatemp_range", "seed_strategy", "guided_grammar",
)  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_options_of_others_that_mean_something_else_are_not_answered_with_one_of_ours(name):
    with pytest.raises(rules.RequestError, match=f"^{name} is unknown; known are"):
        rules.refuse_unknown(RULES, [name])


@pytest.mark.parametrize("name", [name for name, ours in SAME.items() if ours in RULES])
def test_other_names_of_the_same_option_are_answered(name):
    with pytest.raises(rules.RequestError, match=rf"^{name} is unknown; did you mean {SAME[name]}\? known are"):
        rules.refuse_unknown(RULES, [name])


@pytest.mark.parametrize("name", ["minContain", "maxContain", "definition", "const_", "nullable", "optional", "any_of"])
def test_keywords_of_schemas(name):
    meant = {"minContain": "minContains", "maxContain": "maxContains", "definition": "definitions"}
    meant |= {"const_": "const", "any_of": "anyOf"}
    found = slip_of(name, KNOWN)
    assert found == (meant.get(name) if meant.get(name) in KNOWN else None)
