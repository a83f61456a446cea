"""``/v1/messages`` over HTTP: keys, errors of the protocol's own shape, and what chat completions
do as well."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.mock_engine import MockEngine, Script
from tests.support.mock_server import Client, Wire, listening, post, serve, until

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": "mock", "max_tokens": 50, "messages": HELLO}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(api_keys=["one"]) as url:
        yield url


def client(url: str, **keys: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, max_retries=0, **{"api_key": "one", **keys})  # type: ignore[arg-type]


def test_either_header_has_the_key(url: str) -> None:
    assert client(url).messages.create(**ASKED).content[0].to_dict()["text"] == "Hello"
    bearer = anthropic.Anthropic(base_url=url, api_key=None, auth_token="one", max_retries=0)
    assert bearer.messages.create(**ASKED).stop_reason == "end_turn"
    with pytest.raises(anthropic.AuthenticationError):
        client(url, api_key="wrong").messages.create(**ASKED)


def test_the_library_tells_the_id_of_a_request(url: str) -> None:
    raw = client(url).messages.with_raw_response.create(**ASKED)
    assert raw.request_id == raw.headers["x-request-id"]
    assert raw.parse()._request_id == raw.request_id
    with pytest.raises(anthropic.AuthenticationError) as told:
        client(url, api_key="wrong").messages.create(**ASKED)
    assert told.value.request_id is not None
    assert "request-id" not in httpx.get(f"{url}/health").headers


def test_its_header_opens_nothing_else(url: str) -> None:
    reply = httpx.get(f"{url}/v1/models", headers={"x-api-key": "one"})
    assert reply.status_code == 401
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_tokens_are_counted(url: str) -> None:
    told = client(url).messages.count_tokens(model="mock", messages=HELLO, system="Be short")
    assert told.input_tokens == len("<system>Be short\n<user>Hi\n<assistant>")
    usage = client(url).messages.create(**ASKED, system="Be short").usage
    assert usage.input_tokens == told.input_tokens


def refused(**fields: Any) -> tuple[int, str, str]:
    reply = post("/v1/messages", {**ASKED, **fields})
    told = reply.json()
    assert told["type"] == "error"
    assert told["request_id"] == reply.headers["x-request-id"]
    return reply.status_code, told["error"]["type"], told["error"]["message"]


def test_errors_have_the_shape_of_the_protocol() -> None:
    invalid = (400, "invalid_request_error")
    *kind, message = refused(messages=[{"role": "user", "content": [{"type": "image"}]}])
    assert (*kind,) == invalid
    assert message == "'messages[0].content[0].type' is 'image': this model reads text only"
    *kind, message = refused(messages=[{"role": "user", "content": "x" * 99_999}])
    assert (*kind,) == invalid
    assert message.startswith("prompt is too long: ")
    *kind, message = refused(max_tokens=99_999)  # Claude Code reads the numbers
    assert (*kind,) == invalid
    assert re.fullmatch(
        r"input length and `max_tokens` exceed context limit: \d+ \+ 99999 > 4096, "
        "decrease input length or `max_tokens` and try again",
        message,
    )
    message = refused(messages=[{"role": "user", "content": "x" * 4097}])[2]
    assert message.startswith("prompt is too long: ")
    assert refused(model="other")[:2] == (404, "not_found_error")


def test_the_librarys_runner_goes_on_without_a_thread(url: str) -> None:
    """It asks for one by itself, and leaves it out after the error that says there is none."""
    with pytest.raises(anthropic.BadRequestError, match="'thread' is not implemented") as error:
        client(url).beta.messages.create(**ASKED, thread={"type": "create"})
    assert error.value.body["error"]["details"]["error_code"] == "thread_unsupported_request"  # type: ignore[index]
    message = client(url).beta.messages.tool_runner(tools=[], **ASKED).until_done()
    assert message.content[0].to_dict()["text"] == "Hello"


def test_so_have_those_of_the_server_around_it() -> None:
    engine = MockEngine(script=lambda _: Script([(97,)], hangs=True))

    async def test(client: Client) -> None:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            wrong = await client.get(path)
            assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
            broken = await client.post(path, content="{")
            assert (broken.status_code, broken.json()["type"]) == (400, "error")
        large = await client.post("/v1/messages", content=b" " * 2_000_000)
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        first = asyncio.create_task(client.post("/v1/messages", json=ASKED))
        await until(lambda: bool(engine.requests))
        full = await client.post("/v1/messages", json=ASKED)
        assert (full.status_code, full.json()["error"]["type"]) == (529, "overloaded_error")
        assert full.headers["retry-after"] == "1"
        other = await client.post("/v1/chat/completions", json={"messages": HELLO})
        assert (other.status_code, "type" in other.json()) == (503, False)
        first.cancel()

    serve(test, engine, max_running_requests=1, max_body_bytes=1_000_000)


def test_a_failure_of_the_engine_is_one_of_the_protocol() -> None:
    engine = MockEngine(script=lambda _: Script([], error="broken"))
    for stream in (False, True):
        reply = post("/v1/messages", {**ASKED, "stream": stream}, engine)
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "api_error")


def test_stop_sequences_end_a_message(url: str) -> None:
    told = client(url).messages.create(**ASKED, stop_sequences=["ll"])
    assert told.content[0].to_dict()["text"] == "He"
    assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", "ll")
    several = [*map(str, range(15)), "ll"]
    assert client(url).messages.create(**ASKED, stop_sequences=several).stop_sequence == "ll"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_the_sequence(stream: bool) -> None:
    async def run() -> None:
        engine = MockEngine(script=lambda _: Script([(97,)], hangs=True))
        wire = Wire("/v1/messages", {**ASKED, "stream": stream}, engine)
        running = asyncio.create_task(wire.run())
        await until(lambda: bool(engine.requests))
        await asyncio.sleep(0.01)
        wire.gone.set()
        await running
        assert engine.cancelled == [engine.requests[0].request_id]
        assert wire.app.state.server.admission.sequences == 0

    asyncio.run(run())
