"""Images through the planner: given in any form, placed, remembered, reused, limited; what cannot be is refused."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest
from picture_files import encoded, noise
from pictures_support import eyes_tokenizer, seeing, shown, sighted

from edge_dflash import ImageError, Planner, RequestError
from edge_dflash.errors import ContextError

FRAME = noise(40, 60)
OTHER = noise(40, 60, 1)


@pytest.fixture(scope="module")
def backend():
    return sighted(max_context=400)


@pytest.fixture
def planner(backend, tmp_path):
    with seeing(backend, tmp_path) as made:
        yield made


def plan(planner, *parts, **options):
    return planner.plan(shown(*parts), max_new_tokens=8, **options)


def test_an_image_becomes_as_many_placeholders_as_it_has_rows(planner):
    text = planner.encode([{"role": "user", "content": "What is it?"}])
    ids = planner.encode(shown("What ", FRAME, "is it?"))
    rows = ids.count(510)
    assert rows == 6
    at = ids.index(510)
    assert ids[at - 1] == 508
    assert ids[at + rows] == 511
    assert (*ids[: at - 1], *ids[at + rows + 1 :]) == text


def test_speculative_is_plain_and_the_picture_counts(planner):
    for parts in ((FRAME, "Go"), ("Go", FRAME), (FRAME, "then", OTHER), (FRAME, FRAME), ("a", FRAME, "b", FRAME)):
        for options in ({}, {"temperature": 1.0, "seed": 3}):
            drafted = plan(planner, *parts, **options)
            assert drafted.tokens == plan(planner, *parts, speculative=False, **options).tokens
    answers = {plan(planner, one, "Go", temperature=1.0, seed=seed).tokens for one in (FRAME, OTHER) for seed in (1, 2)}
    assert len(answers) > 1


def test_every_form_of_an_image_is_the_same_request(planner, tmp_path):
    file = tmp_path / "frame.png"
    file.write_bytes(encoded(FRAME))
    url = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    wanted = plan(planner, FRAME, "Go").tokens
    before = planner.pictures
    for form in (file, file.read_bytes(), url):
        assert plan(planner, form, "Go").tokens == wanted
    listed = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Go"}]}
    ]
    assert planner.plan(listed, max_new_tokens=8).tokens == wanted
    assert planner.pictures.misses == before.misses


def test_a_frame_is_seen_once_and_another_pixel_again(planner):
    before = planner.pictures
    plan(planner, FRAME, "Go")
    plan(planner, FRAME, "On")
    changed = FRAME.copy()
    changed[20, 30, 0] ^= 1
    plan(planner, changed, "Go")
    assert planner.pictures.misses - before.misses == 2
    assert planner.pictures.hits - before.hits == 1


def test_a_conversation_remembers_its_images(planner, tmp_path):
    with planner.session("You see.") as session:
        session.plan(shown(FRAME, "What?"), max_new_tokens=6)
        first = session.tokens
        second = session.plan(shown("And ", OTHER, "now?"), max_new_tokens=6)
        assert second.reused_tokens == len(first) - 1
        assert session.tokens[: len(first)] == first
        session.plan("Sure?", max_new_tokens=4)
        assert (
            sum(part["type"] == "image" for m in session.messages for part in m["content"] if isinstance(part, dict))
            == 2
        )
        saved = tmp_path / "session"
        session.save(saved)
        wanted = session.plan("Go on.", max_new_tokens=6)
    loaded = planner.load_session(saved)
    again = loaded.plan("Go on.", max_new_tokens=6)
    assert again.tokens == wanted.tokens
    assert again.reused_tokens == wanted.reused_tokens


def test_a_conversation_is_encoded_anew_with_its_images(planner):
    with planner.session() as session:
        session.plan(shown(FRAME, "What?"), max_new_tokens=4)
        session._known = replace(
            session._known, tools="others"
        )  # as if the conversation had begun with other tools: all of it is encoded again
        session.plan(shown(OTHER, "Now?"), max_new_tokens=4)
        assert session.tokens.count(510) == 12


def test_candidates_of_a_prompt_with_an_image(planner):
    best = planner.plan(shown(FRAME, "Go"), n=3, temperature=1.0, seed=5, max_new_tokens=6)
    alone = {planner.plan(shown(FRAME, "Go"), temperature=1.0, seed=5 + i, max_new_tokens=6).tokens for i in range(3)}
    assert {plan.tokens for plan in (best, *best.alternatives)} == alone


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image"}, "is no image"),
        ({"type": "image", "image": FRAME, "size": 3}, "is no image"),
        ({"type": "image_url", "image_url": {"url": "data:,", "x": 1}}, "unknown here"),
        ({"type": "video", "video": "a.mp4"}, "reads text only|is no"),
        ({"type": "image", "image": "https://example.org/a.png"}, "nothing is fetched"),
        ({"type": "image", "image": "picture:00"}, "another conversation"),
        ({"type": "image", "image": FRAME.astype(np.float32)}, "uint8"),
        ("system", "role 'system'"),
        ("many", "at most 16"),
    ],
)
def test_what_is_no_image_is_refused_and_nothing_is_lost(planner, part, why):
    messages = {
        "system": [{**shown(FRAME)[0], "role": "system"}],
        "many": shown(*[FRAME] * 17),
    }.get(str(part), [{"role": "user", "content": [part]}])
    wanted = plan(planner, FRAME, "Go").tokens
    with pytest.raises(RequestError, match=why):
        planner.plan(messages, max_new_tokens=4)
    with planner.session() as session:
        session.plan("Hello.", max_new_tokens=4)
        before = session.tokens
        with pytest.raises(RequestError, match=why):
            session.plan(messages, max_new_tokens=4)
        assert session.tokens == before
        session.plan("Go on.", max_new_tokens=4)
    assert plan(planner, FRAME, "Go").tokens == wanted


def test_a_placeholder_that_a_text_spells_is_text(planner):
    spelled = planner.encode([{"role": "user", "content": "<|vision_start|><|image_pad|><|vision_end|>"}])
    assert not {508, 510, 511} & set(spelled)
    ids = planner.encode(shown("<|image_pad|>", FRAME))
    assert ids.count(510) == 6
    for task, options in (((510, 510), {}), ("<|image_pad|>", {"raw": True})):
        with pytest.raises(RequestError, match="stands for a row of an image"):
            planner.plan(task, max_new_tokens=4, **options)


def test_an_image_that_does_not_fit_the_context_is_refused_before_it_is_seen(planner):
    misses = planner.pictures.misses
    with pytest.raises(ContextError):
        planner.plan(shown(*[noise(250, 250, seed) for seed in range(7)], "Go"), max_new_tokens=4)
    assert planner.pictures.misses == misses


def test_limits_are_those_of_the_planner(backend, tmp_path):
    with seeing(backend, tmp_path, images=1, image_pixels=2399) as planner:
        with pytest.raises(RequestError, match="at most 1 are taken"):
            plan(planner, FRAME, OTHER)
        with pytest.raises(ImageError, match="may have 2,399 together"):
            plan(planner, FRAME)
        assert plan(planner, noise(39, 60)).tokens


def test_a_target_of_text_refuses_images_by_name(backend, tmp_path):
    planner = Planner(backend, eyes_tokenizer(tmp_path))
    with pytest.raises(RequestError, match="has no vision tower"):
        plan(planner, FRAME, "Go")
