"""What clients may send, and that everything else is a 400 that names the field."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import pytest

from lexshard.actors.messages import Drafting
from lexshard.serve_app.openai.errors import TYPES_AND_CODES
from lexshard.serve_app.request_record import RequestRecord
from tests.support.mock_engine import VOCABULARY, MockEngine, Script, byte_tokenizer, ids
from tests.support.mock_server import HELLO, TOKENIZER, Client, serve

USER = {"role": "user"}


def ask(
    path: str,
    body: Any,
    engine: MockEngine | None = None,
    template: str | None = TOKENIZER.chat_template,
    **config: Any,
) -> httpx.Response:
    """One POST to a fresh application; ``body`` may be raw bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def post(client: Client) -> httpx.Response:
        return await client.post(path, content=content)

    reply: httpx.Response = serve(post, engine, byte_tokenizer(template), **config)
    return reply


def complete(body: dict[str, Any], engine: MockEngine | None = None) -> httpx.Response:
    return ask("/v1/completions", {"prompt": "abc", **body}, engine)


def chat(body: dict[str, Any], engine: MockEngine | None = None, **config: Any) -> httpx.Response:
    return ask("/v1/chat/completions", {"messages": HELLO, **body}, engine, **config)


def assert_refused(response: httpx.Response, parameter: str | None, status: int = 400) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == parameter
    kind, code = TYPES_AND_CODES[status]
    assert error["type"] == kind
    assert isinstance(error["code"], str) if parameter else error["code"] == code
    assert isinstance(error["message"], str)


# Values that are refused, by field; a body, where it takes more than that field.
BAD_IN_BOTH: dict[str, list[Any]] = {
    "no_such_field": [1],
    "stream_options": [{"include_usage": True}],
    "prompt_logprobs": [-1, -2, {"prompt_logprobs": 1, "stream": True}],
    "max_tokens": [-1, 0, "16", 1.5, True],
    "min_tokens": [{"min_tokens": 9, "max_tokens": 8}],
    "n": [0, 129, False],
    "temperature": [-0.1, True, "hot"],
    "top_p": [1.5],
    "top_k": [-2],
    "min_p": [2],
    "repetition_penalty": [0],
    "presence_penalty": [2.5],
    "frequency_penalty": [-3],
    "seed": [2**63, 1.0],
    "stop": [["a"] * 17, [""], 3, "a" * 2000],
    "stop_token_ids": [[VOCABULARY], [-1]],
    "allowed_token_ids": [[], [VOCABULARY]],
    "logit_bias": [
        *({key: 1} for key in ("x", "-1", str(VOCABULARY), "²")),
        *({"1": 101}, {"1": None}, {str(i): 0 for i in range(1025)}),
    ],
    "bad_words": [[""]],
    "truncate_prompt_tokens": [0, -2],
    "truncation_side": ["up"],
    "priority": [1.5, -1],
    "draft_tokens": [-1, 256, 1.5],
    "request_id": ["two words"],
    "stream": ["yes"],
}
BAD_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": [
        *(None, "", [], [[]], ["a", ""], ["a", 1], [1, True], [1.0], [-1], [VOCABULARY]),
        *({"text": "a"}, ["a"] * 1025, "a" * 5000),
    ],
    "logprobs": [-1, 21, True],
    "best_of": [2],
    "suffix": ["end"],
    "messages": [HELLO],
    "n": [{"n": 100, "prompt": ["a", "b", "c"]}],
}
BAD_CHATS: dict[str, list[Any]] = {
    "messages": [
        *([], "hi", [HELLO[0], {"role": "system", "content": "late"}]),
        {"messages": HELLO, "max_completion_tokens": 5000, "max_tokens": 5},
    ],
    "top_logprobs": [
        *(2, {"top_logprobs": 2, "logprobs": False}, {"top_logprobs": 21, "logprobs": True})
    ],
    "logprobs": [1],
    "max_completion_tokens": [0],
    "continue_final_message": [{"continue_final_message": True, "add_generation_prompt": True}],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [{"chat_template": "x"}, {"tokenize": True}],
    "response_format": [{"type": "yaml"}, "json_object", {}],
    "tools": [3],
    "tool_choice": ["required"],
    "functions": [[{}]],
    "reasoning_effort": ["high"],
    "audio": [{"voice": "x"}],
    "modalities": [["text", "audio"]],
    "prediction": [{"type": "content"}],
    "web_search_options": [{}],
    "prompt": ["x"],
}
BAD_MESSAGES: dict[str, Any] = {
    "0": "hi",
    "0.role": {"role": "robot", "content": "x"},
    "0.name": {**USER, "content": "x", "name": 1},
    "0.content": USER,
    "0.content.0": {**USER, "content": [{"type": "image_url", "image_url": {}}]},
}


def cases(table: dict[str, list[Any]]) -> list[tuple[dict[str, Any], str]]:
    """Bodies that are refused, each with the field that is told."""
    return [
        (value if isinstance(value, dict) and field in value else {field: value}, field)
        for field, values in table.items()
        for value in values
    ]


@pytest.mark.parametrize(("body", "field"), cases(BAD_IN_BOTH), ids=lambda value: str(value)[:50])
def test_bad_fields_are_named(body: dict[str, Any], field: str) -> None:
    assert_refused(complete(body), field)
    assert_refused(chat(body), field)


@pytest.mark.parametrize(
    ("body", "field"), cases(BAD_COMPLETIONS), ids=lambda value: str(value)[:50]
)
def test_bad_completion_fields_are_named(body: dict[str, Any], field: str) -> None:
    assert_refused(complete(body), field)


@pytest.mark.parametrize(("body", "field"), cases(BAD_CHATS), ids=lambda value: str(value)[:60])
def test_bad_chat_fields_are_named(body: dict[str, Any], field: str) -> None:
    assert_refused(chat(body), field)


def test_what_is_wrong_inside_a_field_is_named_by_its_place() -> None:
    for place, message in BAD_MESSAGES.items():
        assert_refused(chat({"messages": [message]}), f"messages.{place}")
    assert_refused(chat({"messages": [{**USER, "content": 1}]}), "messages.0.content")
    options = {"stream": True, "stream_options": {"what": True}}
    assert_refused(complete(options), "stream_options.what")
    for name in ("thinking", "raise_exception"):
        arguments = {"chat_template_kwargs": {name: True}}
        assert_refused(chat(arguments), f"chat_template_kwargs.{name}")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"null", b"\xff", b"[" * 5000])
def test_bodies_that_are_no_object_are_refused(body: bytes) -> None:
    assert_refused(ask("/v1/completions", body), None)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_json_does_not_have_are_refused(number: bytes) -> None:
    body = b'{"prompt": "a", "temperature": ' + number + b"}"
    assert_refused(ask("/v1/completions", body), None)


def test_a_lone_surrogate_is_refused() -> None:
    assert_refused(ask("/v1/completions", b'{"prompt": "\\ud800"}'), None)


def test_both_lengths_are_told_when_they_do_not_fit() -> None:
    response = complete({"max_tokens": 4095})
    assert "maximum context length is 4096 tokens" in response.text
    assert "4098 tokens (3 in the prompt, 4095 in the completion)" in response.text
    response = complete({"prompt": "x" * 4096, "max_tokens": 0, "echo": True})
    assert "4097 tokens (4096 in the prompt, 1 in the completion)" in response.text


def test_a_prompt_that_fills_the_context_leaves_no_room() -> None:
    engine = MockEngine(max_model_len=8)
    assert_refused(complete({"prompt": "x" * 8}, engine), "prompt")
    assert complete({"prompt": "x" * 7}, engine).status_code == 200
    assert engine.requests[0].parameters.max_tokens == 1


def test_the_kv_cache_bounds_the_context_too() -> None:
    response = complete({"max_tokens": 100}, MockEngine(kv_tokens=64))
    assert_refused(response, "prompt")
    assert "maximum context length is 64 tokens" in response.text
    assert "the KV cache holds 64" in response.text


def test_null_and_harmless_values_ask_for_nothing() -> None:
    engine = MockEngine()
    harmless_chat: dict[str, Any] = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "verbosity": "low",
        "reasoning_effort": None,
        "logit_bias": None,
        "stop": None,
        "temperature": 1,
        "seed": None,
        "n": None,
    }
    assert chat(harmless_chat, engine).status_code == 200
    assert complete({"suffix": "", "best_of": 1, "logprobs": None}, engine).status_code == 200


def test_null_asks_for_nothing_under_any_name() -> None:
    """Clients of other servers send all their fields."""
    fields = {
        "guided_decoding": None,
        "regex": None,
        "use_beam_search": None,
        "no_such_field": None,
    }
    assert complete(fields).status_code == 200
    options = {"include_usage": True, "chunk_size": None}
    reply = chat({**fields, "prompt": None, "stream": True, "stream_options": options})
    assert reply.status_code == 200
    part = {"type": "text", "text": "Hi", "cache_control": None}
    message = {"role": "user", "content": [part], "weight": None}
    assert chat({"messages": [message]}).status_code == 200
    assert ask("/tokenize", {"prompt": "a", "messages": None, "pair": None}).status_code == 200
    assert_refused(complete({"guided_decoding": {}}), "guided_decoding")
    assert_refused(complete({"prompt": None}), "prompt")


def test_messages_clients_send_back_are_accepted() -> None:
    previous = {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert chat({"messages": [*HELLO, previous, *HELLO]}).status_code == 200


def test_parameters_reach_the_engine() -> None:
    engine = MockEngine(default_sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.9})
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"07": 9, "7": 5, "3": -100},
        "bad_words": ["no"],
        "allowed_token_ids": [3, 1, 3],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "seed": -1,
        "priority": 4,
        "draft_tokens": 2,
        "logprobs": 2,
    }
    assert complete(fields, engine).status_code == 200
    [request] = engine.requests
    parameters = request.parameters
    assert request.prompt_ids == ids("abc")
    assert request.priority == 4
    assert request.drafting == Drafting(most=2)
    assert (parameters.temperature, parameters.top_k, parameters.top_p) == (0.6, 20, 0.5)
    assert (parameters.min_p, parameters.repetition_penalty) == (0.1, 1.1)
    assert (parameters.presence_penalty, parameters.frequency_penalty) == (1.0, -1.0)
    assert parameters.logit_bias == ((3, -100.0), (7, 5.0))
    assert parameters.bad_words == (ids(" no"), ids("no"))
    assert parameters.allowed_ids == (1, 3)
    assert parameters.stop_token_ids == (5,)
    assert parameters.ignore_eos
    assert (parameters.min_tokens, parameters.max_tokens) == (2, 9)
    assert parameters.seed == 2**64 - 1
    assert (parameters.logprobs, parameters.prompt_logprobs) == (2, None)


def test_extreme_values_become_safe_ones() -> None:
    engine = MockEngine()
    assert complete({"temperature": 1e-300, "top_k": 10**6}, engine).status_code == 200
    assert complete({"top_p": 0}, engine).status_code == 200
    cold, narrow = (request.parameters for request in engine.requests)
    assert (cold.temperature, cold.top_k) == (0.0, 0)
    assert (narrow.top_k, narrow.top_p) == (1, 1.0)


def test_unseeded_requests_get_seeds_of_their_own_and_given_ones_are_shared() -> None:
    engine = MockEngine()
    free = complete({"prompt": ["a", "a"], "return_seed": True}, engine).json()
    assert free["seed"] == [request.parameters.seed for request in engine.requests]
    assert len(set(free["seed"])) == 2
    assert all(0 <= seed < 2**63 for seed in free["seed"])
    engine.requests.clear()
    given = complete({"prompt": ["a", "a"], "n": 2, "seed": 5, "return_seed": True}, engine).json()
    assert given["seed"] == [5, 5]
    assert [(r.parameters.seed, r.choice) for r in engine.requests] == [(5, 0), (5, 1)] * 2
    assert len({request.request_id for request in engine.requests}) == 4
    assert "seed" not in complete({}).json()


def test_who_asks_decides_how_early_they_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MockEngine()
    privileged = partial(RequestRecord, lowest_priority=-2, cache_salt="owner")
    monkeypatch.setattr("lexshard.serve_app.middleware.RequestRecord", privileged)
    assert complete({"priority": -2}, engine).status_code == 200
    response = complete({"priority": -3})
    assert_refused(response, "priority")
    assert "-2" in response.text
    patient = partial(RequestRecord, lowest_priority=3)
    monkeypatch.setattr("lexshard.serve_app.middleware.RequestRecord", patient)
    assert complete({}, engine).status_code == 200
    assert_refused(complete({"priority": 2}), "priority")
    assert [request.priority for request in engine.requests] == [-2, 3]


def test_the_engine_is_told_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MockEngine()
    known = partial(RequestRecord, cache_salt="owner")
    monkeypatch.setattr("lexshard.serve_app.middleware.RequestRecord", known)
    assert complete({"n": 2}, engine).status_code == 200
    assert {(request.client, request.cache_salt) for request in engine.requests} == {
        ("127.0.0.1", "owner")
    }


def test_chat_takes_the_rest_of_the_context_and_completions_sixteen() -> None:
    engine = MockEngine()
    chat({}, engine)
    complete({}, engine)
    complete({"prompt": "x" * 4090}, engine)
    chat({"max_tokens": 9, "max_completion_tokens": 7}, engine)
    template = "<user>Hi\n<assistant>"
    assert engine.requests[0].prompt_ids == ids(template)
    wanted = [request.parameters.max_tokens for request in engine.requests]
    assert wanted == [4096 - len(template), 16, 6, 7]


def test_prompts_are_truncated_from_the_left() -> None:
    engine = MockEngine(max_model_len=32)
    complete({"prompt": "abcdef", "truncate_prompt_tokens": 2}, engine)
    complete({"prompt": "y" * 100, "truncate_prompt_tokens": -1, "max_tokens": 10}, engine)
    assert engine.requests[0].prompt_ids == ids("ef")
    assert len(engine.requests[1].prompt_ids) == 22
    right = {"truncate_prompt_tokens": 2, "truncation_side": "right"}
    complete({"prompt": "abcdef", **right}, engine)
    assert engine.requests[2].prompt_ids == ids("ab")
    scored = {"max_tokens": 0, "echo": True}
    complete({"prompt": "z" * 100, "truncate_prompt_tokens": -1, **scored}, engine)
    assert len(engine.requests[3].prompt_ids) == 31
    engine = MockEngine(max_model_len=32, kv_tokens=16)  # a cache that holds less
    complete({"prompt": "y" * 100, "truncate_prompt_tokens": -1, "max_tokens": 10}, engine)
    assert len(engine.requests[0].prompt_ids) == 6


def test_what_is_no_token_is_named() -> None:
    told = chat({"logit_bias": {"bad": 5, "7": 1, str(VOCABULARY): 2}}).json()["error"]["message"]
    assert "'bad'" in told
    assert told.count(str(VOCABULARY)) == 2
    refused = complete({"prompt": [VOCABULARY]})
    assert "out of vocabulary" in refused.json()["error"]["message"]


def test_the_template_sees_parts_names_and_flags() -> None:
    engine = MockEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "rule"}, {"role": "user", "content": parts}]
    chat({"messages": messages, "add_generation_prompt": False}, engine)
    continued = [*HELLO, {"role": "assistant", "content": "Sure"}]
    chat({"messages": continued, "continue_final_message": True}, engine)
    assert engine.requests[0].prompt_ids == ids("<system>rule\n<user>a\nb\n")
    assert engine.requests[1].prompt_ids == ids("<user>Hi\n<assistant>Sure")


def test_a_template_that_reads_names_gets_them() -> None:
    template = "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}{% endfor %}"
    engine = MockEngine()
    named = {"messages": [{**HELLO[0], "name": "Ada"}]}
    assert chat(named, engine, template=template).status_code == 200
    assert engine.requests[0].prompt_ids == ids("Ada: Hi")


def test_template_kwargs_are_those_the_template_reads() -> None:
    template = (
        "{% macro told(name) %}{{ style }} {{ name }}{% endmacro %}"
        "{% if thinking is defined and thinking %}{% generation %}hm{% endgeneration %}{% endif %}"
        "{% for message in messages %}{{ told(message.content) }}{% endfor %}{{ bos_token }}"
    )
    engine = MockEngine()

    def post(**arguments: Any) -> httpx.Response:
        return chat({"chat_template_kwargs": arguments}, engine, template=template)

    assert post(style="so", thinking=True, bos_token="!", other=None).status_code == 200
    assert engine.requests[0].prompt_ids == ids("hmso Hi!")
    for name in ("other", "name", "message", "told", "strftime_now"):
        assert_refused(post(**{name: 1}), f"chat_template_kwargs.{name}")


def test_a_model_without_template_refuses_chat() -> None:
    response = chat({}, template=None)
    assert_refused(response, "messages")
    assert "no chat template" in response.text


def test_unknown_models_are_404_and_known_names_are_answered() -> None:
    assert_refused(complete({"model": "other"}), "model", 404)
    assert complete({"model": "mock"}).json()["model"] == "mock"


def test_engine_refusals_are_400_and_failures_500() -> None:
    refusing = MockEngine(script=lambda _: Script([], error="too odd", refused=True))
    failing = MockEngine(script=lambda _: Script([], error="secret detail"))
    assert_refused(complete({}, refusing), None)
    response = complete({}, failing)
    assert_refused(response, None, 500)
    assert "secret" not in response.text
