"""Bodies that are too large or hold too much: told so, and before they cost anything."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import orjson
import pytest
from pydantic import ValidationError

from serve_app import request_body
from serve_app.openai.errors import ApiError
from serve_app.openai.protocol import (
    MAX_JSON_NAMES,
    MAX_JSON_VALUES,
    CompletionRequest,
    decoded,
    parse,
)
from tests.support.mock_engine import MockEngine
from tests.support.mock_server import Wire, listening, post

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
