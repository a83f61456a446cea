"""Bodies that are too large or hold too much: told so, and before they cost anything."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import openai
import orjson
import psutil
import pytest
from pydantic import ValidationError

from lexshard.serve_app import body_room, request_body
from lexshard.serve_app.body_room import MAX_JSON_NAMES, MAX_JSON_VALUES
from lexshard.serve_app.openai.errors import ApiError
from lexshard.serve_app.openai.protocol import CompletionRequest, parse, read_object
from lexshard.serve_app.request_body import decoded
from tests.support.mock_engine import MockEngine
from tests.support.mock_server import Wire, listening, post
from tests.support.quick import slow

LIMIT = 65_536
TOO_LARGE = 8 * 1024 * 1024


# -- over the limit --------------------------------------------------------------------------------


def test_clients_that_send_everything_first_read_the_413() -> None:
    """A connection closed before would be reset, and its answer lost."""
    body = json.dumps({"prompt": "x" * TOO_LARGE}).encode()
    with listening(max_body_bytes=LIMIT) as url:
        for _ in range(3):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{url}/v1/completions", body)
            assert refused.value.code == 413
            assert str(LIMIT) in json.loads(refused.value.read())["error"]["message"]
        with httpx.Client() as client:
            for content in (body, parts(body)):
                response = client.post(f"{url}/v1/completions", content=content)
                assert response.status_code == 413
                assert "connection" not in response.headers
            assert client.get(f"{url}/health").status_code == 200
        asking = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIStatusError) as told:
            asking.completions.create(model="mock", prompt="x" * TOO_LARGE)
        assert told.value.status_code == 413


def parts(body: bytes) -> Iterator[bytes]:
    """Sent in chunks, without a declared length."""
    for begin in range(0, len(body), 1_000_000):
        yield body[begin : begin + 1_000_000]


def test_a_body_without_end_is_answered_and_its_connection_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_body, "MAX_DRAINED_BYTES", 5 * LIMIT)
    read = 0

    class Flood(Wire):
        async def receive(self) -> dict[str, Any]:
            nonlocal read
            read += LIMIT
            return {"type": "http.request", "body": b" " * LIMIT, "more_body": True}

    wire = Flood("/v1/completions", {}, MockEngine(), max_body_bytes=LIMIT)
    asyncio.run(wire.run())
    assert wire.writes[0]["status"] == 413
    assert (b"connection", b"close") in wire.writes[0]["headers"]
    assert read <= 8 * LIMIT


def test_a_body_that_stops_coming_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "MAX_DRAINING_SECONDS", 0.05)

    class Stalled(Wire):
        async def receive(self) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

    wire = Stalled("/v1/completions", {}, MockEngine(), max_body_bytes=LIMIT)
    wire.scope["headers"] = [(b"content-length", b"%d" % TOO_LARGE)]
    asyncio.run(wire.run())
    assert wire.writes[0]["status"] == 413


def test_half_a_body_is_waited_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_SECONDS", 0.05)
    parts = [{"type": "http.request", "body": b'{"prompt": "a', "more_body": True}]

    class Half(Wire):
        async def receive(self) -> dict[str, Any]:
            if not parts:
                await asyncio.Event().wait()
            return parts.pop()

    wire = Half("/v1/completions", {}, MockEngine())
    asyncio.run(wire.run())
    assert wire.writes[0]["status"] == 408
    assert (b"connection", b"close") in wire.writes[0]["headers"]


# -- no more than there is room for ----------------------------------------------------------------

MIB = 1024 * 1024
KEYS = ["one", "two", "three"]


@contextmanager
def sending(url: str, key: str, declared: int | None, sent: int) -> Iterator[socket.socket]:
    """A client that stops in the middle: it has sent ``sent`` bytes, or what is taken of them."""
    address = urllib.parse.urlsplit(url)
    assert address.hostname is not None
    length = "Transfer-Encoding: chunked" if declared is None else f"Content-Length: {declared}"
    head = f"POST /tokenize HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n{length}\r\n\r\n"
    body = b" " * sent if declared is not None else b"%x\r\n" % sent + b" " * sent + b"\r\n"
    with socket.create_connection((address.hostname, address.port or 80)) as client:
        client.sendall(head.encode())
        client.settimeout(0.2)
        with suppress(TimeoutError):
            client.sendall(body)
        del body  # it would count as the server's memory
        yield client


def ask(url: str, key: str, size: int) -> httpx.Response:
    body = json.dumps({"prompt": "a"}).encode().ljust(size)
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/tokenize", content=body, headers=headers, timeout=30)


def answer_of(client: socket.socket) -> tuple[int, dict[str, str], dict[str, Any]]:
    client.settimeout(30)
    with client.makefile("rb") as stream:
        status = int(stream.readline().split()[1])
        lines = iter(lambda: stream.readline().decode().strip(), "")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return status, headers, json.loads(stream.read(int(headers["content-length"])))["error"]


@pytest.mark.parametrize("declared", [slow(15 * MIB), None], ids=["a length", "in chunks"])
def test_stopped_bodies_take_no_more_memory_than_a_clients_share(
    declared: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 bodies of 15 MiB that stop before their end were 600 MB; others are served meanwhile."""
    monkeypatch.setattr(body_room, "ROOM_SECONDS", 0.3)
    monkeypatch.setattr(request_body, "MAX_DRAINING_SECONDS", 0.3)
    process = psutil.Process()
    with listening(api_keys=KEYS) as url, ExitStack() as stopped:
        assert ask(url, "two", 10 * MIB).status_code == 200
        before = process.memory_info().rss
        bodies = [
            stopped.enter_context(sending(url, "one", declared, 15 * MIB - 1)) for _ in range(40)
        ]
        time.sleep(1)
        assert process.memory_info().rss - before < 100 * MIB
        assert ask(url, "two", 10 * MIB).status_code == 200
        assert ask(url, "one", 10_000).status_code == 200
        status, headers, error = answer_of(bodies[-1])
        assert (status, error["type"]) == (429, "requests")
        assert "33554432 that one client" in error["message"]
        assert headers["retry-after"] == "1"
        assert headers["connection"] == "close"


def test_what_all_clients_send_at_once_has_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the room is free again when they have gone."""
    monkeypatch.setattr(body_room, "ROOM_SECONDS", 0.3)
    with listening(api_keys=KEYS) as url:
        with ExitStack() as stopped:
            for key in ("one", "one", "two", "two"):
                stopped.enter_context(sending(url, key, 16 * MIB, 1))
            refused = ask(url, "three", 100_000)
            assert refused.status_code == 503
            assert "67108864 bytes" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
            assert "connection" not in refused.headers  # it was sent whole
            assert ask(url, "three", 10_000).status_code == 200
        for key in KEYS:
            assert ask(url, key, 15 * MIB).status_code == 200


def test_many_large_bodies_at_once_wait_for_each_other() -> None:
    """Nobody who sends them as fast as the line allows is refused."""
    with listening() as url, ThreadPoolExecutor(12) as clients:
        asked = list(clients.map(lambda _: ask(url, "any", 15 * MIB), range(12)))
    assert [answer.status_code for answer in asked] == [200] * 12


def test_the_room_grows_with_the_largest_body() -> None:
    with listening(max_body_bytes=100 * MIB) as url:
        assert ask(url, "any", 90 * MIB).status_code == 200


# -- more values than anybody asks with ------------------------------------------------------------


def flat(count: int) -> str:
    return "[" + ",".join(["0"] * count) + "]"


@pytest.mark.parametrize(
    "body",
    [
        flat(MAX_JSON_VALUES + 1),
        "[" + "[]," * (MAX_JSON_VALUES // 2 + 1) + "1]",
        "[" + '",",' * (MAX_JSON_VALUES + 1) + "1]",
        '["\\\\",' + '"\\"",' * (MAX_JSON_VALUES + 1) + "1]",
        "{" + ",".join(f'"{i}":0' for i in range(MAX_JSON_NAMES + 1)) + "}",
        '[{"a":1}' + ',{"a":1}' * MAX_JSON_NAMES + "]",
    ],
    ids=["numbers", "lists", "commas as texts", "quotes as texts", "names", "objects"],
)
def test_bodies_that_hold_too_much_are_refused_unmade(
    body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orjson, "loads", lambda _: pytest.fail("was made"))
    with pytest.raises(ApiError, match=f"{MAX_JSON_VALUES} values or {MAX_JSON_NAMES} names"):
        decoded(body.encode())


@pytest.mark.parametrize(
    "text",
    ["{[,:" * 400_000, '","' * 400_000, '\\",\\\\' * 300_000, "\\" * 1_000_001 + ",\n" * 600_000],
    ids=["structure", "quotes", "both", "backslashes"],
)
def test_texts_may_hold_anything(text: str) -> None:
    body = {"a": text, text[:999]: [text, {"b": 1}]}
    assert decoded(json.dumps(body).encode()) == body


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' + flat(MAX_JSON_VALUES + 1) + "}",
        "{" + ",".join(f'"{i}":0' for i in range(MAX_JSON_NAMES + 1)) + "}",
    ],
    ids=["values", "names"],
)
def test_a_text_of_json_holds_no_more_than_a_body(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the arguments of a call are; what it says in strings does not count."""
    assert read_object(json.dumps({"a": text}), "arguments") == {"a": text}
    monkeypatch.setattr(orjson, "loads", lambda _: pytest.fail("was made"))
    with pytest.raises(ApiError, match="'arguments' holds more than 1000000 values or 100000 "):
        read_object(text, "arguments")


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**300])
def test_an_integer_that_would_become_another_is_refused(number: int) -> None:
    for body in (f'{{"a": [{number}]}}', str(number)):
        with pytest.raises(ApiError, match="the body holds an integer of more than 64 bits: "):
            decoded(body.encode())


@pytest.mark.parametrize("value", [2**64 - 1, -(2**63), 1e22, 0.1234567890123456789, f"{2**64}"])
def test_other_long_numbers_are_read_as_they_are(value: Any) -> None:
    assert decoded(json.dumps({"a": [value]}).encode()) == {"a": [value]}


def test_a_text_of_json_keeps_integers_of_any_size() -> None:
    told = {"a": [2**64, -(2**63) - 1, 10**300, 1.5]}
    assert read_object(json.dumps(told), "arguments") == told
    with suppress(ApiError):  # by how deep this Python reads
        assert read_object('{"a":' + "[" * 1000 + str(2**64) + "]" * 1000 + "}", "arguments")


def test_as_many_values_as_allowed_are_read() -> None:
    assert len(decoded(flat(MAX_JSON_VALUES - 1).encode())) == MAX_JSON_VALUES - 1


WRONG: dict[str, dict[str, Any]] = {
    "unknown_0": {f"unknown_{i}": 1 for i in range(90_000)},
    "stream_options.unknown_0": {
        "stream_options": {f"unknown_{i}": 1 for i in range(90_000)},
        "stream": True,
    },
    "logit_bias": {"logit_bias": {f"{i}": "much" for i in range(90_000)}},
    "allowed_token_ids": {"allowed_token_ids": ["x"] * 900_000},
    "stop_token_ids": {"stop_token_ids": ["x"] * 900_000},
    "bad_words": {"bad_words": [0] * 900_000},
    "stop": {"stop": [0] * 900_000},
}


@pytest.mark.parametrize("field", WRONG)
def test_of_many_wrong_values_only_the_first_is_looked_at(field: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(CompletionRequest, {"prompt": "a", **WRONG[field]})
    assert refused.value.parameter == field
    found = refused.value.__cause__
    assert isinstance(found, ValidationError)
    assert found.error_count() <= 2  # one for each kind of value that the field may have


def test_conversations_have_a_bounded_number_of_messages() -> None:
    for messages in (
        [{"role": "user", "content": ""}] * 20_000,
        [{"role": "user", "content": [{"type": "text", "text": ""}] * 20_000}],
    ):
        response = post("/v1/chat/completions", {"messages": messages})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
        assert "16384" in response.text
