"""Images through the service: data URLs alone, counted, bounded; what is none is refused and nothing is lost."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from picture_files import encoded, noise
from pictures_support import eyes_tokenizer, seeing, sighted
from service_support import client_of, config_for, live

from edge_dflash import Planner, RequestError
from edge_dflash.serve.service import Service

FRAME = noise(40, 60)
PNG = encoded(FRAME)


def url(data=PNG, kind="image/png"):
    return f"data:{kind};base64," + base64.b64encode(data).decode()


def body(*parts, **more):
    content = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith(("data:", "http", "file", "/"))
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 6, **more}


@pytest.fixture(scope="module")
def backend():
    return sighted(max_context=400)


@pytest.fixture
def service(backend, tmp_path):
    made = Service(config_for(tmp_path))
    made.take(seeing(backend, tmp_path, queue=4, observer=made.observer))
    made.open_doors()
    return made


def ask(service, given):
    with client_of(service) as client:
        return client.post("/v1/chat/completions", json=given)


def test_an_image_is_answered_as_the_planner_answers_it(service, backend, tmp_path):
    with client_of(service) as client:
        answer = client.post("/v1/chat/completions", json=body(url(), "What is it?")).json()
        assert client.post("/v1/chat/completions", json=body(url(), "Go on")).is_success
        for rows in ("made", "kept"):
            assert f'edge_dflash_pictures{{rows="{rows}"}} 1.0' in client.get("/metrics").text
    messages = [
        {"role": "user", "content": [{"type": "image", "image": FRAME}, {"type": "text", "text": "What is it?"}]}
    ]
    with seeing(backend, tmp_path / "other") as planner:
        plan = planner.plan(messages, max_new_tokens=6)
    assert answer["choices"][0]["message"]["content"] == plan.text
    assert answer["usage"]["prompt_tokens"] == plan.prompt_tokens


def test_detail_has_no_effect(service):
    given = body(url(), "Go")
    wanted = ask(service, given).json()["choices"]
    for detail in ("auto", "low", "high"):
        given["messages"][0]["content"][0]["image_url"]["detail"] = detail
        assert ask(service, given).json()["choices"] == wanted


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (body("https://example.org/frame.png", "Go"), "nothing is fetched"),
        (body("http://169.254.169.254/latest", "Go"), "nothing is fetched"),
        (body("file:///etc/passwd", "Go"), "nothing is fetched"),
        (body("/etc/passwd", "Go"), "nothing is fetched"),
        (body("data:image/png;base64,@@", "Go"), "base64"),
        (body(url(b"no picture"), "Go"), "no PNG or JPEG"),
        (body(url(PNG[:100]), "Go"), "cannot be decoded"),
        (body(*[url()] * 17), "at most 16"),
        *(
            ({"messages": [{"role": role, "content": [{"type": "image_url", **image}]}]}, why)
            for role, image, why in (
                ("user", {"image_url": url()}, "is no image"),
                ("user", {}, "is no image"),
                ("user", {"image_url": {"url": url(), "x": 1}}, "unknown here"),
                ("user", {"image_url": {"url": url(), "detail": 3}}, "detail"),
                ("system", {"image_url": {"url": url()}}, "a user shows images"),
            )
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}, {"type": "image_url"}]}]}, "give parts"),
    ],
)
def test_what_is_no_image_is_refused_by_name(service, given, why):
    answer = ask(service, given)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
    assert ask(service, body(url(), "Go")).status_code == 200


def test_a_planner_elsewhere_takes_arrays_files_and_bytes(service, tmp_path):
    file = tmp_path / "frame.png"
    file.write_bytes(PNG)
    with live(service, tmp_path) as address, Planner.connect(address) as planner:
        texts = set()
        for form in (FRAME, file, str(file), PNG, url()):
            content = [{"type": "image", "image": form}, {"type": "text", "text": "Go"}]
            texts.add(planner.plan([{"role": "user", "content": content}], max_new_tokens=6).text)
        assert len(texts) == 1
        with planner.session() as session:
            frame = FRAME.copy()
            content = [{"type": "image", "image": frame}, {"type": "text", "text": "Go"}]
            session.plan([{"role": "user", "content": content}], max_new_tokens=4)
            frame[:] = 0
            assert session.plan("On", max_new_tokens=4).reused_tokens > 0
            wrong = [{"role": "user", "content": [{"type": "image", "image": FRAME.astype(np.float32)}]}]
            with pytest.raises(RequestError, match="uint8"):
                session.plan(wrong)
            session.plan("On", max_new_tokens=2)


def test_a_service_without_a_tower_refuses_images_by_name(backend, tmp_path):
    blind = Service(config_for(tmp_path))
    blind.take(Planner(backend, eyes_tokenizer(tmp_path), bundle="f" * 64, observer=blind.observer))
    blind.open_doors()
    answer = ask(blind, body(url(), "Go"))
    assert answer.status_code == 400
    assert "no vision tower" in answer.json()["error"]["message"]


@pytest.mark.parametrize("there", [True, False])
def test_a_service_that_sees_without_pillow_says_so_at_start(backend, tmp_path, monkeypatch, caplog, there):
    monkeypatch.setattr("edge_dflash.serve.service.reads_files", lambda: there)
    made = Service(config_for(tmp_path))
    made.take(seeing(backend, tmp_path))
    said = [record.message for record in caplog.records if "Pillow is missing" in record.message]
    assert len(said) == (not there)
    assert all("every image is refused; install it with: pip install 'edge-dflash[images]'" in one for one in said)
    made.close()
