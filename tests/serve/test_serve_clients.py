"""What clients of other servers send: read where it means something, taken where it changes nothing, else named."""

from __future__ import annotations

import copy

import httpx2
import openai
import pytest
from service_support import TOOL, TOOL_TASK, live, thinking_service, tool_service

from edge_dflash.decode.options import Options
from edge_dflash.decode.sampling import MIN_TEMPERATURE, Sampling
from edge_dflash.errors import RequestError
from edge_dflash.serve import openapi
from edge_dflash.serve.app import OPERATIONS, SCHEMAS
from edge_dflash.serve.bodies import NEUTRAL
from edge_dflash.serve.calls import chat_call, completion_call
from edge_dflash.serve.config import ServeConfig
from edge_dflash.serve.errors import Refusal

HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
READERS = {CHAT: (chat_call, {"messages": HELLO}), COMPLETIONS: (completion_call, {"prompt": "x"})}


def call(**body):
    return chat_call({"messages": HELLO, **body}, ServeConfig())


def refused(**body):
    with pytest.raises(Refusal) as caught:
        call(**body)
    return caught.value


# bounds ---------------------------------------------------------------------------------------------------------------


def numbers(schema, where=()):
    """Places of numbers in a schema of a body, with their bounds."""
    for option in (schema, *schema.get("anyOf", ())):
        if option.get("type") in ("integer", "number"):
            yield where, option
        if option.get("type") == "object":
            for key, inner in option.get("properties", {}).items():
                yield from numbers(inner, (*where, key))


BOUNDS = [
    (path, where, facts)
    for path in READERS
    for where, facts in numbers(
        openapi.document(OPERATIONS, SCHEMAS, ServeConfig(), key=False)["paths"][path]["post"]["requestBody"][
            "content"
        ]["application/json"]["schema"]
    )
]


def test_every_number_of_a_request_has_bounds():
    assert len(BOUNDS) >= 20
    assert {where[-1] for _, where, _ in BOUNDS} >= {"temperature", "top_p", "n", "seed", "max_tokens", "deadline_s"}
    assert not [(path, where) for path, where, facts in BOUNDS if not {"minimum", "maximum"} <= facts.keys()]


@pytest.mark.parametrize("temperature", [1e-6, 5e-324, MIN_TEMPERATURE / 2, 0.0, 0])
def test_a_tiny_temperature_is_greedy(temperature):
    made = call(temperature=temperature, n=3)
    assert made.options["temperature"] == 0.0
    assert "seed" not in made.options
    assert made.distinct == 1
    assert Options(temperature=temperature) == Options()
    assert Sampling(temperature) == Sampling()
    assert call(temperature=MIN_TEMPERATURE).options["temperature"] == MIN_TEMPERATURE


# names of other servers -----------------------------------------------------------------------------------------------

USUAL = {
    "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0,
    "frequency_penalty": 0.0, "n": 1, "seed": 3, "logit_bias": {}, "user": "u", "metadata": {"a": "b"}, "store": False,
    "service_tier": "auto", "parallel_tool_calls": True, "logprobs": False, "top_logprobs": 0, "stop": [],
    "stream": True, "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "none", "skip_special_tokens": True, "max_tokens": 4, "max_completion_tokens": 4,
    "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "modalities": ["text"], "echo": False,
}  # fmt: skip


def test_what_every_client_sends_is_taken():
    made = call(**USUAL)
    assert made.options["seed"] == 3
    assert (made.options["top_k"], made.options["thinking"], made.options["caller"]) == (0, False, "u")


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_value_is_taken_and_another_is_refused_by_name(name):
    why, *accepted = NEUTRAL[name]
    for value in (*accepted, None):
        assert call(**{name: value})
    error = refused(**{name: "other" if isinstance(next(iter(accepted), ""), str) else 0.7})
    assert error.param == name
    assert why in str(error)


@pytest.mark.parametrize(
    ("given", "thinking"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"enable_thinking": True}, True),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "high", "edge_dflash": {"thinking": True}}, True),
        ({"reasoning_effort": "minimal"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none"}, False),
        ({}, False),
    ],
)
def test_thinking_has_several_names(given, thinking):
    assert call(**given).options["thinking"] is thinking


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "differ; give one of them"),
        ({"edge_dflash": {"thinking": False}, "reasoning_effort": "high"}, "edge_dflash.thinking and reasoning_effort"),
        ({"top_k": 3, "edge_dflash": {"top_k": 4}}, "top_k and edge_dflash.top_k differ"),
        ({"user": "a", "edge_dflash": {"caller": "b"}}, "user and edge_dflash.caller differ"),
        ({"stop": "x", "response_format": {"type": "json_object"}}, "leave stop or response_format out"),
        ({"guided_json": {}}, "give response_format"),
        ({"guided_choice": ["a"]}, "give edge_dflash.regex"),
    ],
)
def test_what_contradicts_itself_or_is_ours_by_another_name(given, words):
    assert words in str(refused(**given))


def test_a_filter_is_not_lost_beside_another():
    made = call(temperature=1.0, top_p=0, edge_dflash={"top_k": 40})
    assert (made.options["top_k"], made.options["top_p"]) == (1, 1.0)
    assert call(top_k=7).options["top_k"] == call(edge_dflash={"top_k": 7}).options["top_k"] == 7
    assert call(user="u" * 99).options["caller"] == "u" * 64
    assert call(top_k=0).options["top_k"] == call(top_k=-1).options["top_k"] == 0


def test_a_completion_opens_no_thinking():
    with pytest.raises(Refusal, match="a completion has no chat template"):
        completion_call({"prompt": "x", "edge_dflash": {"thinking": True}}, ServeConfig())
    with pytest.raises(RequestError, match="raw and thinking are given"):
        Options(raw=True, thinking=True)


# messages -------------------------------------------------------------------------------------------------------------

ASKED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "a1", "type": "function", "function": {"name": "grasp", "arguments": "{}"}}]}  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([{"role": "tool", "tool_call_id": "a1", "content": "12"}], "messages[1].tool_call_id", "there are none"),
        ([{"role": "tool", "tool_call_id": "a1", "content": "1"}, ASKED], "messages[1].tool_call_id", "there are none"),
        ([ASKED, {"role": "tool", "tool_call_id": "b", "content": "1"}], "messages[2].tool_call_id", "there are a1"),
        ([{**ASKED, "annotations": [{}]}], "messages[1].annotations", "cannot be told to the model"),
        ([{**ASKED, "reasoning": "a", "reasoning_content": "b"}], "messages[1].reasoning", "it differs from"),
        ([{**ASKED, "tool_calls": [{"id": "x", "type": "custom", "function": {}}]}], "messages[1].tool_calls[0].type",
         "only functions are called"),
    ],
)  # fmt: skip
def test_a_field_of_a_message_is_used_or_refused_by_name(messages, param, words):
    error = refused(messages=[*HELLO, *messages])
    assert error.param == param
    assert words in str(error)


def test_results_of_calls_and_thinking_are_taken():
    messages = [
        *HELLO, {**ASKED, "reasoning": "hm", "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "a1", "name": "grasp", "content": "done"},
        {"role": "user", "name": "ann", "content": "and?"},
        {"role": "tool", "tool_call_id": "a1", "content": "again"},
    ]  # fmt: skip
    task = call(messages=messages).task
    assert task[1]["reasoning_content"] == "hm"
    assert task[2]["tool_call_id"] == "a1"
    assert task[3]["name"] == "ann"


def test_a_result_answers_a_call_of_the_session(start):
    _, client = start(kind=tool_service)
    session = {"edge_dflash": {"session": "hall"}}
    first = client.post(CHAT, json={"messages": TOOL_TASK, "tools": [TOOL], **session}).json()
    (made,) = first["choices"][0]["message"]["tool_calls"]
    wrong = {"role": "tool", "tool_call_id": "x", "content": "done"}
    no = client.post(CHAT, json={"messages": [wrong], "tools": [TOOL], "max_tokens": 2, **session})
    assert (no.status_code, no.json()["error"]["param"]) == (400, "messages[0].tool_call_id")
    right = {**wrong, "tool_call_id": made["id"]}
    assert client.post(CHAT, json={"messages": [right], "tools": [TOOL], "max_tokens": 2, **session}).is_success


# the client of OpenAI -------------------------------------------------------------------------------------------------


def test_openai_s_client_as_agents_use_it(tmp_path):
    service = tool_service(tmp_path)
    with live(service, tmp_path) as url:
        transport = httpx2.HTTPTransport(uds=url.removeprefix("unix:"))
        with openai.OpenAI(
            base_url="http://planner/v1", api_key="x", http_client=httpx2.Client(transport=transport)
        ) as client:
            create = client.chat.completions.create
            asked = {"model": "fake", "messages": TOOL_TASK, "tools": [TOOL]}
            answer = create(
                **asked, temperature=1e-6, presence_penalty=0, frequency_penalty=0, parallel_tool_calls=True, seed=1,
                user="u", store=False, reasoning_effort="none", n=1, logit_bias={}, service_tier="auto",
                extra_body={"top_k": 20, "min_p": 0, "repetition_penalty": 1.0,
                            "chat_template_kwargs": {"enable_thinking": False}},
            )  # fmt: skip
            message = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls"
            with client.chat.completions.stream(**asked) as stream:
                streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
            call = message.tool_calls[0]
            assert (streamed.id, streamed.function.arguments) == (call.id, call.function.arguments)
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "held"}
            history = [*TOOL_TASK, message.model_dump(), result]
            assert create(**{**asked, "messages": history}, max_tokens=3).usage.completion_tokens == 3
            with pytest.raises(openai.BadRequestError) as caught:
                create(**{**asked, "messages": [*history, {**result, "tool_call_id": "other"}]}, max_tokens=3)
            assert caught.value.param == "messages[3].tool_call_id"
            strict = copy.deepcopy(TOOL)
            strict["function"]["strict"] = True
            with pytest.raises(openai.BadRequestError, match="form that is not known; leave strict out"):
                create(**{**asked, "tools": [strict]})  # this template writes no calls
    service.close()


def test_thinking_comes_as_reasoning_content_whatever_asked_for_it(start):
    _, client = start("hm</think>Done.", defaults={"thinking": True}, kind=thinking_service)
    body = {"prompt": "x", "max_tokens": 2, "edge_dflash": {"raw": True}}
    assert client.post(COMPLETIONS, json=body).is_success  # which has no template to open it
    for given in ({"reasoning_effort": "medium"}, {"chat_template_kwargs": {"enable_thinking": True}}):
        message = client.post(CHAT, json={"messages": TOOL_TASK, **given}).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "Done.")
