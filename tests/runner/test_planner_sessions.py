"""Conversations: the same tokens as in one run, whatever happens between the turns."""

from __future__ import annotations

import dataclasses

import pytest
from fakes import SHAPE, FakeBackend
from planner_support import Gate
from text_support import thinking_tokenizer, write_tokenizer

from edge_dflash.backends import load
from edge_dflash.bundle.reader import Bundle
from edge_dflash.errors import BackendError, BundleError, ContextError, RequestError
from edge_dflash.planner import Planner
from edge_dflash.text.tokenizer import Tokenizer

TEXT_SHAPE = dataclasses.replace(SHAPE, vocab_size=258, max_context=512, mask_token_id=257, prefill_chunk=64)
SYSTEM = "You are the planner of a service robot. Answer with one JSON plan."
TURNS = ("Bring the mug to the kitchen.", "Close the fridge.", "Go to the hall and wait there.")
NEW = 24


@pytest.fixture(scope="module")
def planner(demo_bundle, opened_once):
    with Planner.open(demo_bundle, fallback=False) as planner:
        yield planner


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.open(write_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture
def texts(tokenizer):
    """A planner of the fake, with a tokenizer."""
    return Planner(FakeBackend(TEXT_SHAPE), tokenizer, [tokenizer.eos_token_id], fallback=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_turns_equal_runs_from_nothing(planner, temperature):
    session = planner.session(SYSTEM)
    for index, text in enumerate(TURNS):
        before = session.tokens
        plan = session.plan(text, max_new_tokens=NEW, temperature=temperature, seed=3)
        prompt = session.tokens[: len(session.tokens) - len(plan.tokens)]
        assert prompt[: len(before)] == before
        assert plan.prompt_tokens == len(prompt)
        assert plan.reused_tokens == len(before) - 1 if index else plan.reused_tokens >= 0
        alone = planner.plan(prompt, max_new_tokens=NEW, temperature=temperature, seed=3)
        assert (alone.tokens, alone.accept_lengths) == (plan.tokens, plan.accept_lengths)
    assert [message["role"] for message in session.messages] == ["system", *["user", "assistant"] * 3]
    assert [message["content"] for message in session.messages[1::2]] == list(TURNS)


def test_a_turn_is_written_as_the_template_writes_it(texts, tokenizer):
    session = texts.session("be brief")
    first = session.plan("one", max_new_tokens=5)
    session.plan("two", max_new_tokens=5)
    start = tokenizer.encode("<|start|>system\nbe brief<|end|><|start|>user\none<|end|><|start|>assistant\n")
    between = tokenizer.encode("<|end|><|start|>user\ntwo<|end|><|start|>assistant\n")
    assert session.tokens[: len(start) + 5 + len(between)] == (*start, *first.tokens, *between)


def test_an_end_of_turn_is_not_written_twice(tokenizer):
    start = tokenizer.encode("<|start|>user\none<|end|><|start|>assistant\n")
    answer = [*tokenizer.encode("ok"), tokenizer.eos_token_id]
    backend = FakeBackend(TEXT_SHAPE, script=answer, script_at=len(start))
    session = Planner(backend, tokenizer, [tokenizer.eos_token_id]).session()
    assert session.plan("one").finish_reason == "stop"
    session.plan("two", max_new_tokens=1)
    assert session.tokens[:-1] == (*start, *answer, *tokenizer.encode("<|start|>user\ntwo<|end|><|start|>assistant\n"))


def thinker(directory, answer):
    """A planner whose model, asked to think about "one", answers this, and the prompt."""
    tokenizer = thinking_tokenizer(directory)
    start = tokenizer.encode_chat([{"role": "user", "content": "one"}], enable_thinking=True)
    script = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    shape = dataclasses.replace(TEXT_SHAPE, vocab_size=262)
    backend = FakeBackend(shape, script=script, script_at=len(start))
    return Planner(backend, tokenizer, [tokenizer.eos_token_id], fallback=False), start


def test_raw_is_refused_with_messages_in_any_turn(texts):
    session = texts.session("be brief")
    for _ in range(2):  # the second one goes on from tokens
        with pytest.raises(RequestError, match="raw is given with messages"):
            session.plan([{"role": "user", "content": "one"}], raw=True)
        session.plan("one", max_new_tokens=3)


def test_thinking_is_remembered_apart_from_the_answer(tmp_path):
    planner, _ = thinker(tmp_path, "hm</think>Done.")
    session = planner.session()
    assert session.plan("one", thinking=True).finish_reason == "stop"
    assert session.messages[1:] == ({"role": "assistant", "content": "Done.", "reasoning_content": "hm"},)


def test_thinking_that_was_cut_is_closed_before_the_next_turn(tmp_path):
    planner, start = thinker(tmp_path, "a long thought</think>Done.")
    session = planner.session()
    first = session.plan("one", thinking=True, max_new_tokens=6)
    assert (first.thinking, first.text, first.finish_reason) == ("a long", "", "length")
    session.plan("two", max_new_tokens=3)
    between = planner.tokenizer.encode("\n</think>\n\n<|end|><|start|>user\ntwo<|end|><|start|>assistant\n")
    assert session.tokens[:-3] == (*start, *first.tokens, *between)


def test_a_model_without_a_template_converses_in_text_as_it_is(tmp_path):
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path, template=None))
    session = Planner(FakeBackend(TEXT_SHAPE), tokenizer, [tokenizer.eos_token_id]).session()
    first = session.plan("one", max_new_tokens=5)
    session.plan(" two", max_new_tokens=5)
    assert session.tokens[:-5] == (*tokenizer.encode("one"), *first.tokens, *tokenizer.encode(" two"))


def test_a_conversation_whose_template_cuts_answers_is_encoded_anew(tmp_path):
    template = "{% for m in messages %}{{ m.role + ':' + m.content[:2] + ';' }}{% endfor %}"
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path, template=template))
    session = Planner(FakeBackend(TEXT_SHAPE), tokenizer, [tokenizer.eos_token_id]).session()
    first = session.plan("one", max_new_tokens=5)
    second = session.plan("two", max_new_tokens=5)
    said = f"user:on;assistant:{first.text[:2]};user:tw;"
    assert second.prompt_tokens == len(tokenizer.encode(said))


def test_a_saved_conversation_goes_on_in_another_process(demo_bundle, planner, tmp_path):
    session = planner.session(SYSTEM)
    session.plan(TURNS[0], max_new_tokens=NEW)
    size = session.save(tmp_path / "s")
    assert size == (tmp_path / "s").stat().st_size
    wanted = session.plan(TURNS[1], max_new_tokens=NEW)
    with Planner.open(demo_bundle, fallback=False) as other:
        loaded = other.load_session(tmp_path / "s")
        assert loaded.messages == session.messages[:-2]
        plan = loaded.plan(TURNS[1], max_new_tokens=NEW)
        assert (plan.tokens, plan.accept_lengths) == (wanted.tokens, wanted.accept_lengths)
        assert plan.reused_tokens == wanted.reused_tokens > 0
        assert loaded.tokens == session.tokens
    backend = load(Bundle.open(demo_bundle))
    with (
        Planner(backend, planner.tokenizer, planner.stop_token_ids, bundle="another") as stranger,
        pytest.raises(BundleError, match="another"),
    ):
        stranger.load_session(tmp_path / "s")


def test_zeros_in_a_message_survive_the_file(texts, tmp_path):
    session = texts.session("0" * 64)
    session.plan("0" * 70, max_new_tokens=2)
    session.save(tmp_path / "s")
    assert texts.load_session(tmp_path / "s").messages == session.messages


def test_system_prompts_are_computed_once(planner):
    system = f"{SYSTEM} Be careful with glass."
    first = planner.session(system).plan("Go to the hall.", max_new_tokens=4)
    again = planner.session(system).plan("Open the door.", max_new_tokens=4)
    alone = planner.plan(
        [{"role": "system", "content": system}, {"role": "user", "content": "Wait."}], max_new_tokens=4
    )
    assert first.reused_tokens == 0
    assert again.reused_tokens == alone.reused_tokens > 15
    assert planner.prefixes.hits >= 2


# turns that end badly ------------------------------------------------------------------------------------------------


def test_a_cancelled_turn_stays_as_far_as_it_came(tokenizer):
    gate = Gate(FakeBackend(TEXT_SHAPE, right=lambda position: 0), free=3)
    planner = Planner(gate, tokenizer, fallback=False)
    session = planner.session()
    stream = session.stream("one")
    assert gate.reached.wait(60)
    with pytest.raises(RequestError, match="still running"):
        session.plan("two")
    stream.cancel()
    gate.open.set()
    plan = session.plan("two", max_new_tokens=4)  # waits for the turn to let go
    cut = stream.plan
    assert (cut.finish_reason, len(cut.tokens)) == ("cancelled", 4)
    assert session.messages[1] == {"role": "assistant", "content": cut.text}
    prompt = session.tokens[: len(session.tokens) - len(plan.tokens)]
    assert planner.plan(prompt, max_new_tokens=4).tokens == plan.tokens


def test_a_turn_without_a_commit_leaves_no_trace(texts):
    session = texts.session("be brief")
    assert session.plan("never", deadline=0.0).finish_reason == "deadline"
    assert (session.tokens, len(session.messages)) == ((), 1)
    session.plan("one", max_new_tokens=4)
    before = session.tokens, session.messages
    assert session.plan("never", deadline=-1.0).finish_reason == "deadline"
    with pytest.raises(ContextError):
        session.plan("x" * 600)
    with pytest.raises(RequestError):
        session.plan("")
    assert (session.tokens, session.messages) == before
    assert session.plan("two", max_new_tokens=4).reused_tokens == len(before[0]) - 1


class Breaking(FakeBackend):
    """Fails in the third verify."""

    fail = True

    def verify(self, ids, lane=0, parents=None):
        if self.fail and self.passes.count("verify") == 2:
            self.fail = False
            raise BackendError("the device is gone; restart")
        return super().verify(ids, lane)


def test_an_error_leaves_the_session_at_the_last_commit(tokenizer):
    planner = Planner(Breaking(TEXT_SHAPE), tokenizer, fallback=False)
    session = planner.session()
    stream = session.stream("one", max_new_tokens=30)
    with pytest.raises(BackendError, match="device is gone"):
        list(stream)
    with pytest.raises(BackendError, match="device is gone"):
        _ = stream.plan
    assert len(session.messages) == 2
    wanted = Planner(FakeBackend(TEXT_SHAPE), tokenizer).plan("one", max_new_tokens=9)
    assert session.tokens[-9:] == wanted.tokens
    plan = session.plan("two", max_new_tokens=4)
    prompt = session.tokens[: len(session.tokens) - 4]
    assert planner.plan(prompt, max_new_tokens=4).tokens == plan.tokens


def test_sessions_end_and_do_not_wander(texts, tmp_path):
    with texts.session() as session:
        with pytest.raises(RequestError, match="nothing to save"):
            session.save(tmp_path / "s")
        session.plan("one", max_new_tokens=2)
        with pytest.raises(RequestError, match="another planner"):
            Planner(FakeBackend(), None).plan("x", session=session)
        assert texts.plan("two", session=session, max_new_tokens=2).reused_tokens > 0
    session.close()
    for use in (lambda: session.plan("two"), session.fork, lambda: session.save(tmp_path / "s")):
        with pytest.raises(RequestError, match="session is closed"):
            use()
