"""What is wrong with a request is told as OpenAI's own server tells it, over real HTTP: clients
choose by it what they raise, and whether they shorten, fall back or try again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.mock_engine import MockEngine, spell
from tests.support.mock_server import HELLO, listening

KEY = "the-key"
INVALID = "invalid_request_error"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = MockEngine(max_model_len=64)
    limits = {"max_body_bytes": 2_000_000, "max_requests_per_client": 2}
    with listening(engine, api_keys=[KEY], **limits) as url:
        yield url


def client(url: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def refused(url: str, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as told:
        client(url).chat.completions.create(**{"model": "mock", "messages": HELLO, **fields})
    return told.value


def error_of(reply: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def told(url: str, body: bytes, path: str = "/v1/chat/completions") -> dict[str, Any]:
    reply = httpx.post(url + path, content=body, headers=HEADERS)
    assert reply.status_code == 400
    return error_of(reply)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "x" * 100}]},
        {"messages": [{"role": "user", "content": "x" * 100}], "stream": True},
        {"messages": [{"role": "user", "content": "x" * 1_000_000}]},  # not even tokenised
        {"max_tokens": 60},
        {"max_completion_tokens": 60},
    ],
    ids=["prompt", "stream", "text", "max_tokens", "max_completion_tokens"],
)
def test_what_exceeds_the_context_has_openais_code_and_sentence(
    url: str, fields: dict[str, Any]
) -> None:
    error = refused(url, **fields)
    assert isinstance(error, openai.BadRequestError)
    assert (error.code, error.type, error.param) == ("context_length_exceeded", INVALID, "messages")
    # Recent openai packages show nothing but the message, in which others look for either.
    assert "This model's maximum context length is 64 tokens. However, " in str(error)
    assert "(context_length_exceeded)" in str(error)


def test_a_completion_that_exceeds_the_context_names_its_prompt(url: str) -> None:
    with pytest.raises(openai.BadRequestError) as told:
        client(url).completions.create(model="mock", prompt=[1] * 65)
    assert (told.value.code, told.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "other"}, 404, "model_not_found"),
        ({"temperature": -1}, 400, "invalid_value"),
        ({"n": "two"}, 400, "invalid_type"),
        ({"extra_body": {"tempratur": 1}}, 400, "unknown_parameter"),
        ({"modalities": ["audio"]}, 400, "unsupported_parameter"),
        ({"messages": [{"role": "tool", "content": ""}]}, 400, "missing_required_parameter"),
        ({"user": "x" * 3_000_000}, 413, "request_too_large"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals_have_openais_type_and_a_code(
    url: str, fields: dict[str, Any], status: int, code: str
) -> None:
    error = refused(url, **fields)
    assert (error.status_code, error.code, error.type) == (status, code, INVALID)


def test_what_is_missing_is_told(url: str) -> None:
    assert told(url, b"{}")["code"] == "missing_required_parameter"
    assert told(url, b"{}", "/v1/completions")["code"] == "missing_required_parameter"


def test_wrong_keys_paths_and_methods_have_openais_codes(url: str) -> None:
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key provided") as wrong:
        client(url, "other").models.list()
    assert (wrong.value.code, wrong.value.type) == ("invalid_api_key", INVALID)
    with pytest.raises(openai.NotFoundError) as nowhere:
        client(url).embeddings.create(model="mock", input="a")
    assert (nowhere.value.code, nowhere.value.type) == ("unknown_url", INVALID)
    reply = httpx.get(f"{url}/v1/completions")
    assert (reply.status_code, error_of(reply)["code"]) == (405, "method_not_supported")


def test_too_much_of_one_client_is_a_rate_limit_and_no_engine_is_no_service() -> None:
    engine = MockEngine(script=lambda _: spell("a" * 40, seconds_per_step=0.05))
    with listening(engine, max_requests_per_client=1) as url:
        ask = client(url).completions.create
        stream = ask(model="mock", prompt="a", max_tokens=40, stream=True)
        with pytest.raises(openai.RateLimitError) as limited:
            ask(model="mock", prompt="a")
        stream.close()
        assert (limited.value.code, limited.value.type) == ("rate_limit_exceeded", "requests")
        engine.health_reason = "the engine is starting"
        with pytest.raises(openai.InternalServerError) as absent:
            ask(model="mock", prompt="a")
        assert absent.value.status_code == 503
        assert (absent.value.code, absent.value.type) == (None, "service_unavailable_error")


# -- words that help -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (["a"] * 17, "at most 16"),
        ("a" * 2000, "at most 1024"),
        (["a", 1], "valid string"),
        ([""], "at least 1"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_stop_says_what_is_wrong_with_it(url: str, stop: Any, words: str) -> None:
    error = refused(url, stop=stop)
    assert error.param == "stop"
    assert words in error.message


@pytest.mark.parametrize(
    ("fields", "field", "meant"),
    [
        ({"tempratur": 1}, "tempratur", "temperature"),
        ({"max_token": 1}, "max_token", "max_tokens"),
        ({"stream_options": {"include_usag": 1}}, "stream_options.include_usag", "include_usage"),
        ({"messages": [{"role": "user", "content": "", "nam": "a"}]}, "messages.0.nam", "name"),
        ({"quite_something_else": 1}, "quite_something_else", None),
        ({"x" * 100_000: 1}, "x" * 200 + "...", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_unknown_field_is_told_with_the_one_that_was_meant(
    url: str, fields: dict[str, Any], field: str, meant: str | None
) -> None:
    error = refused(url, extra_body=fields)
    assert (error.param, error.code) == (field, "unknown_parameter")
    assert f"unknown field '{field}'" in error.message
    assert ("did you mean" in error.message) == (meant is not None)
    assert meant is None or f"did you mean {meant}?" in error.message


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([*HELLO, {"role": "assistant", "function_call": {"name": "f"}}], "1.function_call"),
        ([{"role": "function", "content": "sunny", "name": "f"}], "0.role"),
    ],
    ids=lambda value: str(value)[-20:],
)
def test_a_history_with_functions_of_old_is_refused_by_name(
    url: str, messages: list[Any], field: str
) -> None:
    error = refused(url, messages=messages)
    assert (error.param, error.code) == (f"messages.{field}", "unsupported_parameter")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"prompt": "a", "n": 1, "n": 2}', "n"),
        (b'{"prompt": "a", "n": 1, "\\u006e": 2}', "n"),
        (b'{"prompt": "a", "stream_options": {"a": null, "b": 0, "a": null}}', "a"),
        (b'{"prompt": "a:b", "x\\u003a": null, "x:": null}', "x:"),
    ],
)
def test_a_name_that_comes_twice_is_told(url: str, body: bytes, name: str) -> None:
    error = told(url, body, "/v1/completions")
    assert f"'{name}' twice" in error["message"]
    assert error["param"] == name


def test_colons_wherever_they_may_stand_are_no_names(url: str) -> None:
    for prompt in (b"a:b::", b"\\u003a", b"\\\\u003a:", b'{\\"a\\": 1, \\"a\\": 2}'):
        body = b'{"prompt": "' + prompt + b'", "n": 1, "user": {"a": [{"b": 1}, {"b": 2}]}}'
        reply = httpx.post(f"{url}/v1/completions", content=body, headers=HEADERS)
        assert reply.status_code == 200, reply.text


GETS = (
    "/health",
    "/metrics",
    "/version",
    "/status",
    "/tokenizer_info",
    "/v1/models/mock",
    "/v1/models",
)


@pytest.mark.parametrize("path", GETS)
def test_head_is_answered_as_get_without_the_body(url: str, path: str) -> None:
    whole = httpx.get(url + path, headers=HEADERS)
    head = httpx.head(url + path, headers=HEADERS)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    assert head.status_code == 200
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    guarded = path not in ("/health", "/metrics", "/version")
    assert httpx.head(url + path).status_code == (401 if guarded else 200)
