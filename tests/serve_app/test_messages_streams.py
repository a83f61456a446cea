"""From chat completions to messages, as Anthropic's own client reads them."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from lexshard.serve_app.openai.errors import internal_error
from tests.support.scripted_chat import (
    ScriptedChat,
    called,
    ended,
    opening,
    said,
    scripted,
    serving,
    thought,
)

EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
TOOLS: list[Any] = [{"name": "add", "input_schema": {"type": "object"}}]
ASKED: dict[str, Any] = {
    "model": "mock",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "Hi"}],
}


def all_parts() -> ScriptedChat:
    return scripted(
        opening(),
        thought("Hm"),
        thought("m"),
        said("Ye"),
        said("s"),
        called(0, "add", '{"a"', ": 1}"),
        called(1, "add"),
        ended("stop"),
    )


def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def check(message: Message) -> None:
    assert [block.to_dict() for block in message.content] == [
        {"type": "thinking", "thinking": "Hmm", "signature": "unsigned"},
        {"type": "text", "text": "Yes"},
        {"type": "tool_use", "id": "call_0", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {}},
    ]
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert message.usage.to_dict() == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 9,
    }


def test_a_whole_message_and_a_stream_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(all_parts(), "messages_api", monkeypatch) as url:
        check(client(url).messages.create(**ASKED, tools=TOOLS))
        with client(url).messages.stream(**ASKED, tools=TOOLS) as stream:
            texts = [*stream.text_stream]
            message = stream.get_final_message()
    assert texts == ["Ye", "s"]
    check(Message.model_validate(message.to_dict()))


def raw_events(url: str) -> list[dict[str, Any]]:
    reply = httpx.post(f"{url}/v1/messages", json={**ASKED, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in reply.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_events_come_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(all_parts(), "messages_api", monkeypatch) as url:
        events = raw_events(url)
    for event in events:
        EVENT.validate_python(event)
    told = [
        (event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events
    ]
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert told == [
        ("message_start", None, None),
        (start, 0, None),
        *[(delta, 0, "thinking_delta")] * 2,
        (delta, 0, "signature_delta"),
        (stop, 0, None),
        (start, 1, None),
        *[(delta, 1, "text_delta")] * 2,
        (stop, 1, None),
        (start, 2, None),
        *[(delta, 2, "input_json_delta")] * 2,
        (stop, 2, None),
        (start, 3, None),
        (stop, 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 4
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 16
    assert events[0]["message"]["usage"]["output_tokens"] == 0


@pytest.mark.parametrize(
    ("chat", "reason", "sequence"),
    [
        (scripted(opening(), said("a"), ended("stop")), "end_turn", None),
        (scripted(opening(), said("a"), ended("stop", "x")), "stop_sequence", "x"),
        (scripted(opening(), said("a"), ended("length")), "max_tokens", None),
        (scripted(opening(), called(0, "add", '{"a'), ended("length")), "max_tokens", None),
        (scripted(opening(), called(0, "add", "{}"), ended("stop")), "tool_use", None),
    ],
)
def test_why_a_message_ended(
    chat: ScriptedChat, reason: str, sequence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(chat, "messages_api", monkeypatch) as url:
        told = client(url).messages.create(**ASKED)
    assert (told.stop_reason, told.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize(
    "arguments", ['{"a":' * 300 + "1" + "}" * 300, '{"a": 12345678901234567890123}']
)
def test_arguments_are_told_whole_as_in_a_stream(
    arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However deep or large they are: a reply that was whole failed at its end."""
    with serving(
        scripted(opening(), called(0, "add", arguments), ended("stop")), "messages_api", monkeypatch
    ) as url:
        whole = httpx.post(f"{url}/v1/messages", json=ASKED)
        events = raw_events(url)
    assert whole.status_code == 200
    streamed = [event["delta"].get("partial_json", "") for event in events if "delta" in event]
    assert whole.json()["content"][0]["input"] == json.loads("".join(streamed))


def test_a_failure_is_raised_by_the_client_whenever_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = all_parts()
    chat.error = internal_error("id")
    with serving(chat, "messages_api", monkeypatch) as url:
        with pytest.raises(anthropic.InternalServerError):
            client(url).messages.create(**ASKED)
        with (
            pytest.raises(anthropic.APIStatusError, match="Internal error"),
            client(url).messages.stream(**ASKED) as stream,
        ):
            stream.get_final_message()
        assert raw_events(url)[-1]["error"]["type"] == "api_error"
    assert chat.closed == 3
