"""Drafters with a walk never change what is decoded, and are compared with their goldens."""

from dataclasses import replace

import pytest
from golden_pairs import WALKS, golden, pair, programs, store

from edge_dflash.bench.golden import check_golden
from edge_dflash.model.program import PairPrograms


def failing(report):
    return {result.key.split(".", 1)[1] for result in report.failures}


@pytest.mark.parametrize("name", WALKS)
def test_rows_read_by_the_other_rule_are_found(name):
    spec = pair(name)
    keys = {key: value for key, value in golden(name).items() if key.startswith("p0.") and "short" not in key}
    other = replace(spec, drafter=replace(spec.drafter, anchor_drafts=not spec.drafter.anchor_drafts))
    assert {"cycle_accepted", "cycle_draft_tokens"} <= failing(check_golden(other, store(name), keys))


def without(name, role):
    """Programs of a pair whose propose pass lacks one part."""
    whole = programs(name)
    ops = tuple(role(op) for op in whole.propose.ops)
    return PairPrograms(whole.prefill, whole.verify, replace(whole.propose, ops=tuple(op for op in ops if op)))


def dropped(field, value):
    return lambda op: replace(op, **{field: value}) if hasattr(op, field) else op


def no_walk(op):
    return None if op.output == "walk" else op


FAULTS = [
    ("qwen3_5-dflash2", no_walk, "cycle_draft_tokens"),
    ("qwen3_5-dflash2", dropped("side", 0), "cycle0_conv.0.attention.after"),
    ("qwen3_5-dflash2", dropped("top_k", 4), "cycle_candidates"),
    *((name, no_walk, "cycle_draft_tokens") for name in WALKS[:3]),
    ("qwen3-dspark-vanilla", dropped("top_k", 1), "cycle_draft_tokens"),
]


@pytest.mark.parametrize(("name", "fault", "key"), FAULTS)
def test_a_part_that_is_ignored_fails_its_golden(name, fault, key):
    keys = {k: v for k, v in golden(name).items() if k.startswith("p0.") and "short" not in k}
    report = check_golden(pair(name), store(name), keys, without(name, fault))
    assert not report.ok
    assert key in failing(report) or f"p0.{key}" in report.unknown
