"""Each trap, set on purpose, must turn the golden comparison or the losslessness check red."""

import mutations as m
import pytest
from golden_pairs import ENGINE, NAMES, golden, pair, programs, store
from verify_support import engine, nvfp4_store, short_golden

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.bench.golden import check_golden
from edge_dflash.checks.lossless import SAMPLED, verify_lossless
from edge_dflash.model import pair_programs


def failing(name, spec=None, changed=None, prompt="p2"):
    """Keys, without the prompt, that differ from the golden file."""
    spec = spec or pair(name)
    report = check_golden(spec, store(name), short_golden(name, prompt, 6), changed or pair_programs(spec))
    return {result.key.split(".", 1)[1] for result in report.failures}


def lossless(backend, sampled=None):
    prompts = [golden("qwen3_5")["p0.prompt"].tolist()]
    return verify_lossless(backend, prompts, max_new_tokens=12, sampled=sampled)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_mutation_all_checks_are_green(name):
    assert failing(name) == set()
    assert failing(name, prompt="p1") == set()
    assert lossless(engine(name), SAMPLED).ok


SPECS = {
    "taps one layer up": (m.taps(lambda i: i + 1), "prefill_taps"),
    "taps one layer down": (m.taps(lambda i: i - 1), "prefill_taps"),
    "taps in another order": (m.drafter(target_layer_ids=lambda ids: ids[::-1]), "prefill_taps"),
    "mask id one down": (m.drafter(mask_token_id=lambda i: i - 1), "cycle_draft_logits"),
    "mask id zero": (m.drafter(mask_token_id=0), "cycle_draft_logits"),
    "causal and bidirectional swapped": (m.masks(bidirectional=m.flip), "cycle_draft_logits"),
    "drafter theta of another model": (m.rope("drafter", theta=lambda t: t * 10), "draft_ctx_k.0"),
    "drafter rotates half of the head": (m.rope("drafter", dims=lambda d: d // 2), "draft_ctx_k.0"),
    "target theta of another model": (m.rope("target", theta=lambda t: t * 10), "prefill_logits"),
    "target rotates half as many dims": (m.rope("target", dims=lambda d: d // 2), "prefill_logits"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trap", SPECS)
def test_a_config_read_wrongly(name, trap):
    mutate, key = SPECS[trap]
    assert key in failing(name, spec=mutate(pair(name)))


WINDOWS = {
    "window one wider": m.masks(window=lambda s: s + 1),
    "window one narrower": m.masks(window=lambda s: s - 1),
    "window ignored": m.masks(window=lambda s: None),
    "sliding layers see ahead": m.masks(bidirectional=lambda b: True),
    "full layers are causal": m.masks(bidirectional=lambda b: False),
}


@pytest.mark.parametrize("trap", WINDOWS)
def test_a_sliding_window_read_wrongly(trap):
    assert "cycle_draft_logits" in failing("qwen3_5", spec=WINDOWS[trap](pair("qwen3_5")))


def test_the_target_rotates_its_whole_head():
    wide = m.rope("target", dims=lambda d: 64)(pair("qwen3_5"))
    assert "prefill_logits" in failing("qwen3_5", spec=wide)


NORMS = {
    "input norm": (m.reads(".input_layernorm"), "prefill_logits"),
    "query and key norms": (m.reads(".q_norm"), "prefill_logits"),
    "final norm": (m.reads("target.norm"), "prefill_logits"),
    "drafter feature norm": (m.reads("hidden_norm", "drafter."), "draft_ctx_feature"),
    "drafter key norm": (m.reads(".k_norm", "drafter."), "draft_ctx_k.0"),
    "drafter block norms": (m.reads("_layernorm", "drafter."), "cycle_draft_logits"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm", NORMS)
def test_w_and_one_plus_w_exchanged(name, norm):
    condition, key = NORMS[norm]
    assert key in failing(name, changed=m.ops(condition, plus_one=m.flip)(programs(name)))


@pytest.mark.parametrize("name", NAMES)
def test_a_bidirectional_target(name):
    changed = m.ops(m.attends("target."), bidirectional=m.flip)(programs(name))
    assert "teacher_forced_logits" in failing(name, changed=changed)


KERNELS = {
    "target positions one up": (m.positions(1, 16), "kv.3.k"),
    "target positions one down": (m.positions(-1, 16), "kv.3.k"),
    "drafter positions one up": (m.positions(1, 32), "draft_ctx_k.0"),
    "drafter positions one down": (m.positions(-1, 32), "draft_ctx_k.0"),
    "block starts one up": (m.pass_starts_at("propose", 1), "cycle_draft_logits"),
    "block starts one down": (m.pass_starts_at("propose", -1), "cycle_draft_logits"),
    "verify starts one up": (m.pass_starts_at("verify", 1), "cycle0_verify_logits"),
    "verify starts one down": (m.pass_starts_at("verify", -1), "cycle0_verify_logits"),
    "context appended in reverse": (m.context_rows(lambda n: [*range(n)][::-1]), "draft_ctx_v.0"),
    "context appended one row late": (m.context_rows(lambda n: [0, *range(n - 1)]), "draft_ctx_v.0"),
    "last context rows exchanged": (m.context_rows(lambda n: [*range(n - 2), n - 1, n - 2][-n:]), "draft_ctx_v.0"),
    "row 0 is a draft": (m.row_zero_is_a_draft, "cycle_draft_tokens"),
    "gate before query": (m.gate_layout(m.gate_first), "prefill_logits"),
    "gates in the second half": (m.gate_layout(m.gate_in_second_half), "prefill_logits"),
    "gated delta norm is 1 + w": (m.delta_norm_is_one_plus_w, "prefill_logits"),
    "rows see the rows behind them": (m.softmax_over_the_block, "teacher_forced_logits"),
}


@pytest.mark.parametrize("trap", KERNELS)
def test_a_kernel_written_wrongly(monkeypatch, trap):
    apply, key = KERNELS[trap]
    apply(monkeypatch)
    assert key in failing("qwen3_5")


REPLAYS = {
    "one row too few": m.commits(lambda rows, flight: rows - 1),
    "one row too many": m.commits(lambda rows, flight: rows + 1),
    "all rows, no rollback": m.commits(lambda rows, flight: flight),
    "no replay": m.commits(lambda rows, flight: 0),
    "conv history stays": m.conv_history_stays,
}


@pytest.mark.parametrize("trap", REPLAYS)
def test_a_replay_off_by_one_is_seen_by_both_checks(monkeypatch, trap):
    REPLAYS[trap](monkeypatch)
    part = "conv" if trap == "conv history stays" else "state"
    assert any(key.startswith("gdn.") and part in key for key in failing("qwen3_5", prompt="p1"))
    if trap != "no replay":  # plain decoding would then stand still in the same way
        assert not lossless(engine("qwen3_5")).ok


LOOPS = {
    "block keys and values are seen before rounding": m.block_keys_are_not_rounded,
    "activations of all rows share a scale": m.activations_share_a_scale,
    "one draft too many is accepted": m.one_draft_too_many,
    "noise depends on the row": m.noise_by_row,
}


@pytest.mark.parametrize("trap", LOOPS)
def test_a_loss_that_only_the_losslessness_check_can_see(monkeypatch, trap):
    LOOPS[trap](monkeypatch)
    assert not lossless(engine("qwen3_5"), SAMPLED if trap == "noise depends on the row" else None).ok


def test_a_verify_that_writes_the_state_is_not_lossless():
    changed = programs("qwen3_5")
    changed = type(changed)(changed.prefill, m.replace(changed.verify, commits=True), changed.propose)
    backend = ReferenceBackend(pair("qwen3_5"), nvfp4_store("qwen3_5"), ENGINE, max_context=96, programs=changed)
    assert not lossless(backend).ok
