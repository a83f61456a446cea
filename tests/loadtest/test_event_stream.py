"""A stream says the same wherever the network cuts it, and one that does not end well is told."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.loadtest.event_stream import EventReader, StreamedAnswer, refusal


def event(fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(said: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": said, "finish_reason": finish_reason}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}})
DONE = b"data: [DONE]\n\n"
WHOLE = b": a comment\n\n" + text("ab") + text("é\U0001f600") + text("", "length") + USAGE + DONE


def heard(*pieces: bytes) -> StreamedAnswer:
    """Pieces that come a second apart."""
    answer = StreamedAnswer()
    for second, piece in enumerate(pieces, start=1):
        answer.feed(piece, float(second))
    return answer


@given(st.lists(st.integers(0, len(WHOLE)), max_size=30), st.booleans())
def test_events_are_the_same_wherever_the_stream_is_cut(cuts: list[int], carriage: bool) -> None:
    stream = WHOLE.replace(b"\n", b"\r\n") if carriage else WHOLE
    places = [0, *sorted(cuts), len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(places)]
    reader = EventReader()
    events = [each for piece in pieces for each in reader.feed(piece)]
    assert events == EventReader().feed(WHOLE)
    assert events[-1] == b"[DONE]"
    answer = heard(*pieces)
    assert answer.fault == ""
    assert len(answer.pieces) == 2
    assert (answer.prompt_tokens, answer.output_tokens) == (5, 9)


def test_lines_of_data_belong_together_and_other_fields_are_skipped() -> None:
    stream = b"id: 7\nevent: x\ndata: one\ndata:two\nretry: 3\n\n\n\ndata: three\n\n"
    assert EventReader().feed(stream) == [b"one\ntwo", b"three"]


def test_only_visible_text_is_a_piece_and_the_last_choice_ends_the_answer() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    said = event({"choices": [{"delta": {"content": "Hi"}}]})
    called = event({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]})
    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    answer = heard(role, said, called, end, USAGE, DONE)
    assert answer.pieces == [2.0, 3.0]
    assert answer.heard == 4.0
    assert answer.finish_reason == "stop"
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
