"""The client: streams are taken apart wherever they are cut, and what does not end well is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.loadtest.client import (
    CLOSED,
    LATE,
    UNREACHABLE,
    WHOLE,
    Client,
    EventReader,
    HttpAnswer,
    StreamedAnswer,
    is_healthy,
    once,
    refusal,
)


def event(fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(said: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": said, "finish_reason": finish_reason}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}})
DONE = b"data: [DONE]\n\n"
ALL = b": a comment\n\n" + text("ab") + text("é\U0001f600") + text("", "length") + USAGE + DONE


def heard(*pieces: bytes) -> StreamedAnswer:
    """Pieces that come a second apart."""
    answer = StreamedAnswer()
    for second, piece in enumerate(pieces, start=1):
        answer.feed(piece, float(second))
    return answer


@given(st.lists(st.integers(0, len(ALL)), max_size=30), st.booleans())
def test_events_are_the_same_wherever_the_stream_is_cut(cuts: list[int], carriage: bool) -> None:
    stream = ALL.replace(b"\n", b"\r\n") if carriage else ALL
    places = [0, *sorted(cuts), len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(places)]
    reader = EventReader()
    events = [each for piece in pieces for each in reader.feed(piece)]
    assert events == EventReader().feed(ALL)
    assert events[-1] == b"[DONE]"
    answer = heard(*pieces)
    assert answer.fault == ""
    assert len(answer.pieces) == 2
    assert (answer.prompt_tokens, answer.output_tokens) == (5, 9)


def test_lines_of_data_belong_together_and_other_fields_are_skipped() -> None:
    stream = b"id: 7\nevent: x\ndata: one\ndata:two\nretry: 3\n\n\n\ndata: three\n\n"
    assert EventReader().feed(stream) == [b"one\ntwo", b"three"]


def test_text_thoughts_and_calls_are_pieces_and_the_last_choice_ends_the_answer() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    thought = event({"choices": [{"delta": {"reasoning": "Hm"}}]})
    said = event({"choices": [{"delta": {"content": "Hi"}}]})
    called = event({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]})
    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    answer = heard(role, thought, said, called, end, USAGE, DONE)
    assert answer.pieces == [2.0, 3.0, 4.0]
    assert answer.heard == 5.0
    assert answer.finished == {0: "stop"}
    assert answer.texts == {0: "Hi"}
    assert answer.fault == ""


def test_without_usage_a_piece_counts_as_a_token() -> None:
    assert heard(text("a"), text("b"), text("c", "stop"), DONE).output_tokens == 3


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (b"", "without a choice"),
        (DONE, "without a choice"),
        (text("a") + DONE, "without a finish_reason"),
        (text("a", "stop"), "without [DONE]"),
        (text("a", "stop") + b"data: [DONE]\n", "without [DONE]"),
        (text("a") + event({"error": {"message": "engine  died"}}) + DONE, "engine died"),
        (text("a", "stop") + DONE + text("b"), "event after [DONE]"),
        (b"data: {nonsense\n\n", "no JSON: {nonsense"),
        (b"data: 3\n\n", "no object"),
    ],
)
def test_a_stream_that_does_not_end_well_says_why(stream: bytes, said: str) -> None:
    assert said in heard(stream).fault


def test_a_refusal_says_its_status_and_message() -> None:
    body = json.dumps({"error": {"message": "too long", "code": 400}}).encode()
    assert refusal(400, body) == "status 400: too long"
    assert refusal(502, b"<h1>Bad gateway</h1>") == "status 502: <h1>Bad gateway</h1>"
    assert refusal(503, b"") == "status 503"
    assert refusal(422, b'{"detail": "no"}') == "status 422: {'detail': 'no'}"


# -- over HTTP ------------------------------------------------------------------------------------


async def told(
    reply: bytes, pieces: Sequence[bytes], *, seconds: float = 2.0, **options: Any
) -> tuple[HttpAnswer, bytes]:
    """What a client makes of a server that sends ``reply`` once it has heard a blank line, and what
    that server heard."""
    heard = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard = await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}", seconds=seconds)
        answer = await client.send(pieces, **options)
        client.close()
    return answer, heard


ASKED = b"GET / HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "ended", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", WHOLE, 200, b"hi"),
        (b"HTTP/1.1 404 No\r\n\r\nuntil closed", WHOLE, 404, b"until closed"),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 413 Large\r\nContent-Length: 0\r\n\r\n",
            WHOLE,
            413,
            b"",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", CLOSED, 200, b"hi"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n", CLOSED, 200, b"hi"),
        (b"SSH-2.0-OpenSSH_9.0\r\n", CLOSED, 0, b""),
        (b"", CLOSED, 0, b""),
    ],
)
def test_an_answer_is_whole_or_says_how_it_ended(
    reply: bytes, ended: str, status: int, body: bytes
) -> None:
    answer, _ = asyncio.run(told(reply, [ASKED]))
    assert (answer.ended, answer.status, answer.body) == (ended, status, body)
    assert (answer.fault == "") == (ended == WHOLE)


def test_an_answer_to_head_has_no_body_and_pieces_are_sent_apart() -> None:
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nRetry-After: 3\r\n\r\n"
    asked = [b"HEAD / HTTP/1.1\r\n", b"Host: x\r\n", b"\r\n"]
    answer, heard = asyncio.run(told(reply, asked, method="HEAD", gap=0.01))
    assert (answer.ended, answer.headers["retry-after"]) == (WHOLE, "3")
    assert heard == b"".join(asked)
    assert answer.seconds >= 0.02


def test_who_is_not_there_or_says_nothing_is_told() -> None:
    unreachable = asyncio.run(once("http://127.0.0.1:9", "/health"))
    assert (unreachable.ended, unreachable.status) == (UNREACHABLE, 0)
    assert unreachable.fault.startswith("no connection: ")
    silent, _ = asyncio.run(told(b"never", [b"GET"], seconds=0.1))
    assert (silent.ended, silent.fault) == (LATE, "no whole answer within 0.1 s")
    assert not is_healthy("http://127.0.0.1:9")
