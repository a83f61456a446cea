"""From chat completions to Responses, as OpenAI's own client reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lexshard.actors.messages import TokenLogprobs
from lexshard.serve_app.openai.errors import internal_error
from lexshard.serve_app.over_chat.reading import read_at
from lexshard.serve_app.responses.protocol import ResponsesRequest
from lexshard.serve_app.responses.writer import ResponsesWriter, beginning
from tests.support.scripted_chat import (
    USAGE,
    ScriptedChat,
    called,
    chat_writer,
    ended,
    opening,
    said,
    scripted,
    serving,
    thought,
)

TOOLS: list[Any] = [
    {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "run"},
]
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def all_parts() -> ScriptedChat:
    return scripted(
        opening(),
        thought("Hm"),
        thought("m"),
        said("Ye"),
        said("s"),
        called(0, "add", '{"a"', ": 1}"),
        called(1, "run", "say", ' "hi"', custom=True),
        ended("stop"),
    )


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(all_parts(), "responses", monkeypatch) as url:
        yield url


def test_a_whole_response(url: str) -> None:
    told = client(url).responses.create(input="Hi", tools=TOOLS, metadata={"a": "b"}, user="me")
    assert (told.status, told.output_text, told.model) == ("completed", "Yes", "mock")
    assert [item.type for item in told.output] == [
        "reasoning",
        "message",
        "function_call",
        "custom_tool_call",
    ]
    plain: Any = told.output
    assert plain[0].content[0].text == "Hmm"
    assert (plain[2].call_id, plain[2].name, plain[2].arguments) == ("call_0", "add", '{"a": 1}')
    assert (plain[3].call_id, plain[3].name, plain[3].input) == ("call_1", "run", 'say "hi"')
    assert told.usage is not None
    assert told.usage.to_dict() == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 29,
    }
    assert (told.metadata, told.user, told.tool_choice) == ({"a": "b"}, "me", "auto")
    assert [tool.type for tool in told.tools] == ["function", "custom"]


def test_a_stream_adds_up_to_the_response(url: str) -> None:
    with client(url).responses.stream(input="Hi", tools=TOOLS, model="mock") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "Yes"
    added: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            added[event.type] = added.get(event.type, "") + event.delta  # type: ignore[union-attr]
    assert added == {
        "response.reasoning_text.delta": "Hmm",
        "response.output_text.delta": "Yes",
        "response.function_call_arguments.delta": '{"a": 1}',
        "response.custom_tool_call_input.delta": 'say "hi"',
    }


def raw_events(url: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"input": "Hi", "tools": TOOLS, "stream": True, **fields}
    reply = httpx.post(f"{url}/v1/responses", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in reply.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = httpx.Response(200, text=data.removeprefix("data: ")).json()
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_events_are_numbered_and_each_is_of_its_item(url: str) -> None:
    events = raw_events(url)
    for event in events:
        EVENT.validate_python(event, extra="ignore")
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    told = [
        (event["type"].removeprefix("response."), event.get("output_index")) for event in events
    ]
    reasoning = [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    arguments, custom = "function_call_arguments", "custom_tool_call_input"
    assert told == [
        ("created", None),
        ("in_progress", None),
        *((kind, 0) for kind in reasoning),
        *((kind.replace("reasoning", "output"), 1) for kind in reasoning),
        ("output_item.added", 2),
        *((f"{arguments}.{kind}", 2) for kind in ("delta", "delta", "done")),
        ("output_item.done", 2),
        ("output_item.added", 3),
        *((f"{custom}.{kind}", 3) for kind in ("delta", "delta", "done")),
        ("output_item.done", 3),
        ("completed", None),
    ]
    final = Response.model_validate(events[-1]["response"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == final.output[event["output_index"]].id


def test_the_budget_ends_a_response_that_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = scripted(opening(), said("Yes"), called(0, "add", '{"a'), ended("length"))
    with serving(chat, "responses", monkeypatch) as url:
        told = client(url).responses.create(input="Hi", max_output_tokens=5)
        last = raw_events(url)[-1]
    assert told.status == "incomplete"
    assert told.incomplete_details is not None
    assert told.incomplete_details.reason == "max_output_tokens"
    statuses = [item.status for item in told.output]  # type: ignore[union-attr]
    assert statuses == ["completed", "incomplete"]
    assert chat.bodies[0]["max_completion_tokens"] == 5
    assert last["type"] == "response.incomplete"
    assert last["response"]["completed_at"] is None


def test_a_custom_call_tells_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    for reason, status in (("stop", "completed"), ("length", "incomplete")):
        chat = scripted(opening(), called(0, "run", "say", custom=True), ended(reason))
        with serving(chat, "responses", monkeypatch) as url:
            events = raw_events(url)
            told: Any = client(url).responses.create(input="Hi", tools=TOOLS)
        items = [event["item"] for event in events if "item" in event]
        assert [item["status"] for item in items] == ["in_progress", status]
        assert told.output[0].status == events[-1]["response"]["output"][0]["status"] == status


def test_log_probabilities_are_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    token = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    chat = scripted(opening(), said("a", TokenLogprobs(97, -0.5, 1, ())), ended("stop"))
    with serving(chat, "responses", monkeypatch) as url:
        asked: Any = {"include": ["message.output_text.logprobs"]}
        told: Any = client(url).responses.create(input="Hi", **asked)
        events = raw_events(url, **asked)
    assert [each.to_dict() for each in told.output[0].content[0].logprobs] == [token]
    [delta] = [event for event in events if event["type"] == "response.output_text.delta"]
    assert delta["logprobs"] == [token]


def test_a_failure_after_the_beginning_is_told_in_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = scripted(opening(), said("Ye"))
    chat.error = internal_error("id")
    with serving(chat, "responses", monkeypatch) as url:
        last = raw_events(url)[-1]
        with pytest.raises(openai.InternalServerError):
            client(url).responses.create(input="Hi")
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert chat.closed == 2


def test_a_failure_before_the_beginning_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = scripted()
    chat.error = internal_error("id")
    with (
        serving(chat, "responses", monkeypatch) as url,
        pytest.raises(openai.InternalServerError, match="Internal error"),
    ):
        list(client(url).responses.create(input="Hi", stream=True))


def test_a_reply_that_says_nothing_has_no_items() -> None:
    asked: Any = read_at(ResponsesRequest, {"input": "Hi"})
    writer = ResponsesWriter(beginning(asked, "m"), asked, chat_writer())  # nothing is kept
    writer.take([opening(), ended("stop")])
    told = writer.whole(USAGE)
    assert b'"status":"completed"' in told
    assert b'"output":[]' in told
