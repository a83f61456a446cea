"""Streams: what they add up to, what is written when, and what a disconnect does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lexshard.actors.messages import Request, SamplingParameters, SequenceEvent
from lexshard.serve_app.openai.chat import ChatWriter
from lexshard.serve_app.openai.choice import Choice, Delta, OutputOptions
from lexshard.serve_app.openai.completions import CompletionWriter
from lexshard.serve_app.openai.logprobs import LogprobsFormatter
from lexshard.serve_app.openai.protocol import StreamOptions
from lexshard.serve_app.openai.response_writer import ResponseWriter, server_sent_event
from tests.support.mock_engine import MockEngine, MockStream, Script, ids
from tests.support.mock_server import (
    HELLO,
    TOKENIZER,
    Wire,
    complete,
    post,
    says,
    stream,
    until,
)


@pytest.mark.parametrize("text", ["Hello", "aé漢🙂b", "", "stop at the end"])
def test_a_stream_adds_up_to_the_whole_response(text: str) -> None:
    fields = {"n": 2, "stop": "at", "logprobs": 1, "return_token_ids": True, "seed": 1}
    whole = complete(fields, says(text))
    chunks = stream("/v1/completions", {"prompt": "abc", **fields}, says(text))
    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        streamed_ids = chain.from_iterable(part["token_ids"] for part in own)
        assert list(streamed_ids) == choice["token_ids"]
        for field in choice["logprobs"]:
            parts = [part["logprobs"][field] for part in own]
            assert list(chain.from_iterable(parts)) == choice["logprobs"][field]
        assert [part["finish_reason"] for part in own][:-1] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["stop_reason"] == choice["stop_reason"]


def test_a_chat_stream_begins_with_the_role_of_each_choice() -> None:
    chunks = stream("/v1/chat/completions", {"messages": HELLO, "n": 2}, says("aé!"))
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        texts = [part["delta"].get("content", "") for part in own]
        assert "".join(texts) == "aé!"
        assert texts[1:4] == ["a", "é", "!"]
        assert own[-1]["finish_reason"] == "stop"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_usage_is_streamed_on_request() -> None:
    body = {"prompt": "abc", "stream_options": {"include_usage": True}}
    chunks = stream("/v1/completions", body)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 9
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    counts = [c["usage"]["completion_tokens"] for c in stream("/v1/completions", body)]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 6
    assert "usage" not in stream("/v1/completions", {"prompt": "abc"})[0]
    alone = {"prompt": "abc", "stream_options": {"continuous_usage_stats": True}}
    assert not any("usage" in chunk for chunk in stream("/v1/completions", alone))
    chat = {"messages": HELLO, "stream_options": body["stream_options"]}
    usages = [chunk["usage"] for chunk in stream("/v1/chat/completions", chat)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts[:2] == [0, 1]  # the role is said by no token
    assert {usage["total_tokens"] - usage["completion_tokens"] for usage in usages} == {
        usages[0]["prompt_tokens"]
    }
    chat["n"] = 2
    *told, last = stream("/v1/chat/completions", chat)
    for index in (0, 1):
        own = [each for each in told if each["choices"][0]["index"] == index]
        counts = [each["usage"]["completion_tokens"] for each in own]
        assert counts == sorted(counts)
        assert (counts[0], 2 * counts[-1]) == (0, last["usage"]["completion_tokens"])


def test_an_echo_is_streamed_first() -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 0}
    chunks = stream("/v1/completions", body)
    assert chunks[0]["choices"][0]["text"] == "abcH"
    assert chunks[0]["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c", "H"]


@pytest.mark.parametrize(("length", "beside"), [(1000, True), (3, False)])
def test_a_long_echo_is_written_beside_the_loop(
    length: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log-probabilities take a second, in which other streams go on; nothing else needs it."""
    threads: list[threading.Thread] = []
    events = CompletionWriter.events

    def noting(*arguments: Any) -> bytes:
        threads.append(threading.current_thread())
        return events(*arguments)

    monkeypatch.setattr(CompletionWriter, "events", noting)
    body = {"prompt": "é" * (length // 2) + "a", "echo": True, "logprobs": 0}
    told = stream("/v1/completions", body)[0]["choices"][0]["logprobs"]
    halves = chain.from_iterable((i, i) for i in range(length // 2))
    assert told["text_offset"] == [*halves, length // 2, length // 2 + 1]
    first, *others = threads
    assert (first is not others[0]) == beside
    assert len({*others}) == 1
    assert others


def test_a_failure_before_the_first_token_has_a_status() -> None:
    engine = MockEngine(script=lambda _: Script([], error="broken"))
    response = post("/v1/completions", {"prompt": "a", "stream": True}, engine)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


def test_a_failure_after_the_first_token_is_told_in_the_stream() -> None:
    engine = MockEngine(script=lambda _: Script([ids("a"), ids("b")], error="broken"))
    chunks = stream("/v1/completions", {"prompt": "a"}, engine)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "ab"
    assert (chunks[-1]["error"]["type"], chunks[-1]["error"]["code"]) == ("server_error", None)
    assert "broken" not in chunks[-1]["error"]["message"]


@pytest.mark.parametrize(
    ("reason", "kind"), [("error", "server_error"), ("abort", "service_unavailable_error")]
)
def test_what_comes_with_a_failure_is_told_before_it(reason: str, kind: str) -> None:
    """It was lost: that another sequence had said at the same moment, too."""

    def script(request: Request) -> Script:
        return Script([ids("one two")], finish_reason=reason if request.choice else "length")

    engine = MockEngine(script=script)
    body = {"prompt": "a", "n": 2, "stop": ["wool"]}
    *chunks, failure = stream("/v1/completions", body, engine)
    told = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, end in enumerate(["length", None]):
        own = [choice for choice in told if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == "one two"
        assert own[-1]["finish_reason"] == end
        assert "error" not in own[-1]
    assert failure["error"]["type"] == kind


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_string_before_a_failure_ends_the_text(streaming: bool) -> None:
    engine = MockEngine(script=lambda _: Script([ids("one two")], finish_reason="error"))
    body = {"prompt": "a", "stop": "two"}
    if streaming:
        told = stream("/v1/completions", body, engine)
    else:
        told = [post("/v1/completions", body, engine).json()]
    choices = [chunk["choices"][0] for chunk in told]
    assert "".join(choice["text"] for choice in choices) == "one "
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "two")


# -- the wire: what is written when, and what a disconnect does ------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("steps", [[], [ids("a"), ids("b")]])
def test_a_disconnect_cancels_every_sequence(streaming: bool, steps: list[Any]) -> None:
    engine = MockEngine(script=lambda _: Script(steps, hangs=True))

    async def check() -> None:
        body = {"prompt": ["a", "b"], "n": 2, "stream": streaming, "max_tokens": 9}
        wire = Wire("/v1/completions", body, engine)
        task = asyncio.ensure_future(wire.run())
        await until(lambda: engine.running == 4)
        await asyncio.sleep(0.02)
        wire.gone.set()
        await asyncio.wait_for(task, 5)
        assert engine.running == 0
        assert len(engine.cancelled) == 4

    asyncio.run(check())


def test_a_cancelled_handler_cancels_its_sequences() -> None:
    """Ray Serve tells of a disconnect by cancelling the task."""
    engine = MockEngine(script=lambda _: Script([ids("a")], hangs=True))

    async def check() -> None:
        for streaming in (True, False):
            wire = Wire("/v1/completions", {"prompt": "a", "stream": streaming}, engine)
            task = asyncio.ensure_future(wire.run())
            await until(lambda: engine.running == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert engine.running == 0

    asyncio.run(check())


class SteppedEngine(MockEngine):
    """Tells every sequence's token at the same moment, as engine steps do."""

    def submit(self, requests: Sequence[Request]) -> MockStream:
        stream = MockStream(self, requests)
        self.steps = asyncio.ensure_future(self._step(requests, stream))
        return stream

    async def _step(self, requests: Sequence[Request], stream: MockStream) -> None:
        for token, reason in ((97, None), (98, "length")):
            for request in requests:
                event = SequenceEvent(request.request_id, 0, (token,), finish_reason=reason)  # type: ignore[arg-type]
                stream.put(event)
            await asyncio.sleep(0.1)


def test_the_first_token_is_written_at_once_and_simultaneous_events_together() -> None:
    async def check() -> list[dict[str, Any]]:
        wire = Wire("/v1/completions", {"prompt": ["x"] * 8, "stream": True}, SteppedEngine())
        task = asyncio.ensure_future(wire.run())
        await until(lambda: len(wire.writes) >= 2)
        assert not task.done()
        await task
        return wire.writes

    writes = asyncio.run(check())
    bodies = [write["body"] for write in writes if write["type"] == "http.response.body"]
    assert [body.count(b"data: ") for body in bodies] == [8, 9]


def test_only_the_last_chunk_of_a_choice_tells_its_end() -> None:
    """Also when a slow loop meets several steps of a sequence at once."""

    class Hurried(MockEngine):
        def submit(self, requests: Sequence[Request]) -> MockStream:
            stream = MockStream(self, requests)
            for token, reason in ((97, None), (98, None), (99, "length")):
                for request in requests:
                    event = SequenceEvent(request.request_id, 0, (token,), finish_reason=reason)  # type: ignore[arg-type]
                    stream.put(event)
            return stream

    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": HELLO},
    }
    for path, body in bodies.items():
        chunks = stream(path, body, Hurried())
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons[-1] == "length"
        assert not any(reasons[:-1])


HEADER = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m"}


@pytest.mark.parametrize("writer_type", [ChatWriter, CompletionWriter])
@given(
    texts=st.lists(st.text(max_size=20), max_size=4),
    include_usage=st.booleans(),
    seed=st.none() | st.just(7),
)
def test_an_event_that_adds_text_alone_is_what_encoding_all_of_it_gives(
    writer_type: type[ResponseWriter], texts: list[str], include_usage: bool, seed: int | None
) -> None:
    """What stands around the text is encoded once per request and choice."""
    tokens = TOKENIZER.token_bytes
    options = OutputOptions()
    formatter = LogprobsFormatter(tokens, False)
    asked = StreamOptions(include_usage=include_usage)
    writer = writer_type(HEADER, options, formatter, seed, asked)
    request = Request("a", 0, (1,), SamplingParameters())
    choices = [Choice(index, request, "", options, tokens) for index in range(2)]
    for text in texts:
        deltas = [Delta(choice, text, (1,), (), (), (), (), False, None) for choice in choices]
        whole = [
            server_sent_event(chunk)
            for delta in deltas
            for chunk in writer.completed_chunks(delta, None)
        ]
        assert writer.events(deltas, None) == (b"".join(whole) if text else b"")
        assert writer.events(deltas[:1], None) == (whole[0] if text else b"")
