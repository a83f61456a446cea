"""The server as clients meet it: whole responses, streams, failures, limits, disconnects."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from mock_engine import (
    BOS,
    EOS,
    VOCABULARY,
    MockEngine,
    MockStream,
    Script,
    byte_tokenizer,
    ids,
    spell,
)

from actors.messages import Request, SequenceEvent
from cluster.config import ServeConfig
from serve_app.app import create_app
from serve_app.cli import main
from serve_app.middleware import ProxyHeaders
from serve_app.prompts import estimated_tokens

TOKENIZER = byte_tokenizer()
HELLO = [{"role": "user", "content": "Hi"}]
Client = httpx.AsyncClient


def serve(
    test: Callable[[Client], Awaitable[Any]], engine: MockEngine | None = None, **config: Any
) -> Any:
    """Runs ``test`` against an application in this process."""
    app = create_app(ServeConfig(model="mock", **config), engine or MockEngine(), TOKENIZER)

    async def run() -> Any:
        transport = httpx.ASGITransport(app=app)
        async with Client(transport=transport, base_url="http://test") as client:
            return await test(client)

    return asyncio.run(run())


def post(
    path: str, body: dict[str, Any], engine: MockEngine | None = None, **config: Any
) -> httpx.Response:
    async def request(client: Client) -> httpx.Response:
        return await client.post(path, json=body)

    response: httpx.Response = serve(request, engine, **config)
    return response


def complete(body: dict[str, Any], engine: MockEngine | None = None) -> dict[str, Any]:
    response = post("/v1/completions", {"prompt": "abc", **body}, engine)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    return content


def chat(body: dict[str, Any], engine: MockEngine | None = None) -> dict[str, Any]:
    response = post("/v1/chat/completions", {"messages": HELLO, **body}, engine)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    return content


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with ``[DONE]``."""
    assert response.headers["content-type"].startswith("text/event-stream")
    items = response.text.split("\n\n")
    assert items[-1] == ""
    assert items[-2] == "data: [DONE]"
    return [json.loads(item.removeprefix("data: ")) for item in items[:-2]]


def stream(
    path: str, body: dict[str, Any], engine: MockEngine | None = None
) -> list[dict[str, Any]]:
    return events(post(path, {**body, "stream": True}, engine))


def says(text: str) -> MockEngine:
    return MockEngine(script=lambda _: spell(text))


# -- whole responses ------------------------------------------------------------------------------


def test_completion_has_openai_shape() -> None:
    reply = complete({"request_id": "mine"})
    assert reply["id"] == "cmpl-mine"
    assert reply["object"] == "text_completion"
    assert reply["model"] == "mock"
    assert isinstance(reply["created"], int)
    assert reply["system_fingerprint"].startswith("lexshard-")
    assert reply["choices"] == [
        {
            "index": 0,
            "text": "Hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat_has_openai_shape() -> None:
    engine = MockEngine(script=lambda _: spell("Hello", cached_tokens=16))
    reply = chat({"n": 2}, engine)
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert all(choice["message"] == message for choice in reply["choices"])
    assert reply["usage"]["prompt_tokens"] == len("<user>Hi\n<assistant>")
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


def test_choices_of_batched_prompts_are_in_order() -> None:
    def script(request: Request) -> Script:
        text = bytes(request.prompt_ids).decode() + str(request.choice)
        return spell(text, seconds_per_step=0.002 * (3 - len(request.prompt_ids)))

    reply = complete({"prompt": ["x", "yy"], "n": 2}, MockEngine(script=script))
    assert [choice["text"] for choice in reply["choices"]] == ["x0", "x1", "yy0", "yy1"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 3


def test_length_is_told() -> None:
    reply = complete({"max_tokens": 3})
    assert reply["choices"][0]["text"] == "Hel"
    assert reply["choices"][0]["finish_reason"] == "length"


def test_a_character_cut_off_by_the_length_is_replaced() -> None:
    assert complete({"max_tokens": 2}, says("aé"))["choices"][0]["text"] == "a\ufffd"


def test_stop_strings_cut_the_text_cancel_the_sequence_and_count_what_was_generated() -> None:
    engine = MockEngine(script=lambda _: Script([ids("one t"), ids("wo three"), (65,)], hangs=True))
    reply = complete({"stop": ["zzz", "two"]}, engine)
    [choice] = reply["choices"]
    assert choice["text"] == "one "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "two")
    assert reply["usage"]["completion_tokens"] == len("one two")
    assert engine.cancelled == [engine.requests[0].request_id]
    assert engine.running == 0


def test_a_stop_string_ends_one_choice_and_leaves_the_others() -> None:
    def script(request: Request) -> Script:
        return spell("a stop b") if request.choice == 0 else spell("long enough text")

    engine = MockEngine(script=script)
    reply = complete({"n": 2, "stop": "stop"}, engine)
    assert [choice["text"] for choice in reply["choices"]] == ["a ", "long enough text"]
    assert len(engine.cancelled) == 1


def test_the_stop_string_is_kept_on_request() -> None:
    reply = complete({"stop": "ll", "include_stop_str_in_output": True})
    assert reply["choices"][0]["text"] == "Hell"


def test_stop_tokens_are_shown_on_request_only() -> None:
    engine = MockEngine(script=lambda _: Script([ids("ab"), ids("!")], stop_reason=33))
    plain = complete({"stop_token_ids": [33]}, engine)["choices"][0]
    assert (plain["text"], plain["stop_reason"]) == ("ab", 33)
    fields = {"stop_token_ids": [33], "include_stop_str_in_output": True}
    assert complete(fields, engine)["choices"][0]["text"] == "ab!"


def test_special_tokens_are_shown_on_request_only() -> None:
    engine = MockEngine(script=lambda _: Script([(BOS, 65), (66,)], finish_reason="length"))
    assert complete({}, engine)["choices"][0]["text"] == "AB"
    shown = complete({"skip_special_tokens": False}, engine)["choices"][0]["text"]
    assert shown == "<|begin|>AB"


def test_token_ids_are_returned_on_request() -> None:
    choice = complete({"return_token_ids": True})["choices"][0]
    assert choice["prompt_token_ids"] == list(ids("abc"))
    assert choice["token_ids"] == [*ids("Hello"), EOS]
    reply = chat({"return_token_ids": True})
    assert reply["prompt_token_ids"] == list(ids("<user>Hi\n<assistant>"))
    assert reply["choices"][0]["token_ids"] == [*ids("Hello"), EOS]


# -- log-probabilities ----------------------------------------------------------------------------


def test_completion_logprobs() -> None:
    engine = MockEngine(script=lambda _: Script([ids("aé")], finish_reason="length"))
    logprobs = complete({"logprobs": 3}, engine)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-1.5] * 3
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["top_logprobs"][0] == {"b": -0.25, "a": -1.5, "c": -9999.0}


def test_zero_logprobs_still_tell_the_chosen_token() -> None:
    engine = MockEngine(script=lambda _: Script([ids("ab")], finish_reason="length"))
    logprobs = complete({"logprobs": 0}, engine)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -1.5}, {"b": -1.5}]


def test_chat_logprobs_keep_the_bytes_of_split_characters() -> None:
    engine = MockEngine(script=lambda _: Script([ids("é")], finish_reason="length"))
    choice = chat({"logprobs": True, "top_logprobs": 1}, engine)["choices"][0]
    assert choice["message"]["content"] == "é"
    content = choice["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "é"
    assert [len(token["top_logprobs"]) for token in content] == [1, 1]
    bare = chat({"logprobs": True}, engine)["choices"][0]["logprobs"]["content"][0]
    assert (bare["logprob"], bare["top_logprobs"]) == (-1.5, [])


def test_tokens_can_be_written_as_ids() -> None:
    logprobs = complete({"logprobs": 1, "return_tokens_as_token_ids": True, "max_tokens": 1})
    assert logprobs["choices"][0]["logprobs"]["tokens"] == ["token_id:72"]


def test_prompt_logprobs() -> None:
    scores = complete({"prompt_logprobs": 1})["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert scores[1] == {
        "99": {"logprob": -0.25, "rank": 1, "decoded_token": "c"},
        "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
    }
    assert len(chat({"prompt_logprobs": 0})["prompt_logprobs"]) == len("<user>Hi\n<assistant>")


def test_what_lm_eval_sends_is_scored() -> None:
    """Echo, one logprob and one token over batches of ids; scores are sliced [ctxlen:-1]."""
    body = {
        "prompt": [list(ids("the cat")), list(ids("a"))],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    for prompt, choice in zip(body["prompt"], complete(body)["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"] == bytes(prompt).decode() + "H"
        assert len(logprobs["tokens"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        for token, score, top in zip(
            logprobs["tokens"][1:],
            logprobs["token_logprobs"][1:],
            logprobs["top_logprobs"][1:],
            strict=True,
        ):
            assert top[token] == score
        assert logprobs["text_offset"] == list(range(len(prompt) + 1))


def test_echo_without_output_scores_the_prompt_alone() -> None:
    engine = MockEngine()
    reply = complete({"echo": True, "logprobs": 1, "max_tokens": 0}, engine)
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert reply["usage"]["completion_tokens"] == 0
    assert engine.running == 0


# -- streams --------------------------------------------------------------------------------------


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


def test_an_echo_is_streamed_first() -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 0}
    chunks = stream("/v1/completions", body)
    assert chunks[0]["choices"][0]["text"] == "abcH"
    assert chunks[0]["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c", "H"]


def test_a_failure_before_the_first_token_has_a_status() -> None:
    engine = MockEngine(script=lambda _: Script([], error="broken"))
    response = post("/v1/completions", {"prompt": "a", "stream": True}, engine)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "InternalServerError"


def test_a_failure_after_the_first_token_is_told_in_the_stream() -> None:
    engine = MockEngine(script=lambda _: Script([ids("a"), ids("b")], error="broken"))
    chunks = stream("/v1/completions", {"prompt": "a"}, engine)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "ab"
    assert chunks[-1]["error"]["code"] == 500
    assert "broken" not in chunks[-1]["error"]["message"]


# -- the wire: what is written when, and what a disconnect does -----------------------------------


class Wire:
    """Drives the application by hand, so that single writes and disconnects can be seen."""

    def __init__(self, path: str, body: dict[str, Any], engine: MockEngine, **config: Any) -> None:
        self.app = create_app(ServeConfig(model="mock", **config), engine, TOKENIZER)
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
            "client": ("1.2.3.4", 5),
            "server": ("test", 80),
        }
        self.body = json.dumps(body).encode()
        self.writes: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._sent = False

    async def receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.writes.append(message)

    async def run(self) -> None:
        await self.app(self.scope, self.receive, self.send)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


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
                stream.queue.put_nowait(event)
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
    assert [body.count(b"data: ") for body in bodies] == [8, 8, 1, 0]


def test_only_the_last_chunk_of_a_choice_tells_its_end() -> None:
    """Also when a slow loop meets several steps of a sequence at once."""

    class Hurried(MockEngine):
        def submit(self, requests: Sequence[Request]) -> MockStream:
            stream = MockStream(self, requests)
            for token, reason in ((97, None), (98, None), (99, "length")):
                for request in requests:
                    event = SequenceEvent(request.request_id, 0, (token,), finish_reason=reason)  # type: ignore[arg-type]
                    stream.queue.put_nowait(event)
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


# -- admission ------------------------------------------------------------------------------------


def test_a_full_server_says_503_and_when_to_come_back() -> None:
    engine = MockEngine(script=lambda _: spell("ab", seconds_per_step=0.05))

    async def check(client: Client) -> None:
        body = {"prompt": "x", "n": 3}
        first = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: engine.running == 3)
        refused = await client.post("/v1/completions", json={"prompt": "x", "n": 2})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        assert (await first).status_code == 200
        assert (await client.post("/v1/completions", json=body)).status_code == 200

    serve(check, engine, max_running_requests=4)


def test_waiting_prompt_tokens_are_bounded() -> None:
    engine = MockEngine(script=lambda _: spell("ab", seconds_per_step=0.05))

    async def check(client: Client) -> None:
        long = {"prompt": list(ids("x" * 200))}
        first = asyncio.ensure_future(client.post("/v1/completions", json=long))
        await until(lambda: engine.running == 1)
        refused = await client.post("/v1/completions", json=long)
        assert refused.status_code == 503
        assert (await first).status_code == 200
        assert (await client.post("/v1/completions", json=long)).status_code == 200

    serve(check, engine, max_waiting_tokens=100)


def test_a_prompt_that_cannot_fit_is_refused_before_it_costs_anything() -> None:
    text = "a" * 2_000_000
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
    }
    for path, body in bodies.items():
        response = post(path, body)
        assert response.status_code == 400
        assert "2000000 characters" in response.json()["error"]["message"]


def test_no_prompt_is_expected_to_wait_with_more_tokens_than_fit() -> None:
    """Else a text that is going to be truncated shuts everyone out while it is tokenised."""
    assert estimated_tokens(["a" * 5_000, [1] * 500, "b"], 100) == 100 + 100 + 1


def test_bad_words_are_bounded_together() -> None:
    words = ["a" * 1024] * 16
    assert post("/v1/completions", {"prompt": "a", "bad_words": words}).status_code == 200
    response = post("/v1/completions", {"prompt": "a", "bad_words": [*words, "b"]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "bad_words"


def test_messages_do_not_repeat_everything_a_client_wrote() -> None:
    for body in ({"prompt": "a", "k" * 100_000: 1}, {"prompt": "a", "model": "m" * 100_000}):
        assert len(post("/v1/completions", body).content) < 1000


def test_one_client_may_have_a_limit() -> None:
    engine = MockEngine(script=lambda _: spell("ab", seconds_per_step=0.05))

    async def check(client: Client) -> None:
        first = asyncio.ensure_future(client.post("/v1/completions", json={"prompt": "x"}))
        await until(lambda: engine.running == 1)
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 429
        assert "retry-after" in refused.headers
        assert (await first).status_code == 200

    serve(check, engine, max_requests_per_client=1)


def test_refused_requests_leave_nothing_behind() -> None:
    async def check(client: Client) -> None:
        for body in ({"prompt": [VOCABULARY]}, {"prompt": "x", "max_tokens": 9999}):
            for streaming in (True, False):
                reply = await client.post("/v1/completions", json={**body, "stream": streaming})
                assert reply.status_code == 400
        text = (await client.get("/metrics")).text
        assert "lexshard_admitted_sequences 0.0" in text
        assert "lexshard_admitted_waiting_tokens 0.0" in text

    serve(check)


# -- keys, ids, other routes ----------------------------------------------------------------------


def test_api_keys_guard_the_api_and_leave_health_open() -> None:
    async def check(client: Client) -> None:
        for path in ("/v1/models", "/v1/models/mock", "/tokenizer_info"):
            assert (await client.get(path)).status_code == 401
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            refused = await client.post(path, json={"prompt": "a"})
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
        for path in ("/health", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200
        for key, status in (("first", 200), ("second", 200), ("third", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.get("/v1/models", headers=headers)).status_code == status
        basic = {"Authorization": "Basic first"}
        assert (await client.get("/v1/models", headers=basic)).status_code == 401

    serve(check, api_keys=["first", "second"])


def test_request_ids_are_echoed_when_they_are_harmless() -> None:
    async def check(client: Client) -> None:
        reply = await client.get("/health", headers={"x-request-id": "abc-1"})
        assert reply.headers.get_list("x-request-id") == ["abc-1"]
        reply = await client.get("/nowhere", headers={"x-request-id": "a b"})
        assert len(reply.headers["x-request-id"]) == 32

    serve(check)


def test_unknown_paths_and_methods_have_the_error_shape() -> None:
    async def check(client: Client) -> None:
        for path in ("/", "/v1/embeddings", "/docs", "/openapi.json", "/health/"):
            reply = await client.get(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, 404)
        reply = await client.get("/v1/completions")
        assert (reply.status_code, reply.json()["error"]["code"]) == (405, 405)
        assert reply.headers["allow"] == "POST"
        assert (await client.get("/v1/models/other")).status_code == 404

    serve(check)


def test_models_are_listed_under_every_name() -> None:
    async def check(client: Client) -> None:
        data = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in data] == ["org/a", "b"]
        card = (await client.get("/v1/models/org/a")).json()
        assert (card["object"], card["max_model_len"]) == ("model", 4096)

    serve(check, served_model_name=["org/a", "b"])


def test_an_engine_that_is_not_ready_is_told_everywhere() -> None:
    engine = MockEngine(health_reason="the engine is starting")

    async def check(client: Client) -> None:
        reply = await client.get("/health")
        assert reply.status_code == 503
        assert "retry-after" in reply.headers
        assert "starting" in reply.text
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        reply = await client.post("/v1/completions", json={"prompt": "a"})
        assert reply.status_code == 503
        assert "retry-after" in reply.headers
        engine.failure = "no such model"
        assert "retry-after" not in (await client.get("/health")).headers

    serve(check, engine)


def test_texts_and_ids_are_exchanged() -> None:
    async def check(client: Client) -> None:
        reply = (await client.post("/tokenize", json={"prompt": "héy"})).json()
        assert reply == {
            "count": 4,
            "max_model_len": 4096,
            "tokens": list(ids("héy")),
            "token_strs": None,
        }
        body = {"messages": HELLO, "return_token_strs": True, "add_generation_prompt": False}
        reply = (await client.post("/tokenize", json=body)).json()
        assert reply["tokens"] == list(ids("<user>Hi\n"))
        assert reply["token_strs"][-1] == "Ċ"
        reply = await client.post("/detokenize", json={"tokens": list(ids("héy"))})
        assert reply.json() == {"prompt": "héy"}
        for body in ({"tokens": [VOCABULARY]}, {"tokens": ["a"]}, {}):
            reply = await client.post("/detokenize", json=body)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")
        info = (await client.get("/tokenizer_info")).json()
        assert info["eos_token"] == "<|end|>"
        assert "message" in info["chat_template"]
        assert info["model_max_length"] == 4096

    serve(check)


def test_metrics_tell_of_engine_and_requests() -> None:
    async def check(client: Client) -> None:
        await client.post("/v1/completions", json={"prompt": "abc"})
        await client.post("/v1/completions", json={"prompt": ""})
        await client.get("/nowhere/" + "x" * 50)
        reply = await client.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = reply.text.splitlines()
        request = 'lexshard_http_requests_total{method="%s",path="%s",status="%d"} 1.0'
        assert request % ("POST", "/v1/completions", 200) in lines
        assert request % ("POST", "/v1/completions", 400) in lines
        assert request % ("GET", "other", 404) in lines
        assert "lexshard_steps_total 7.0" in lines
        assert "lexshard_running 2.0" in lines
        assert 'lexshard_http_tokens_total{kind="completion"} 6.0' in lines
        assert "lexshard_time_to_first_token_seconds_count 1.0" in lines

    serve(check)


def test_internal_errors_tell_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = MockEngine()

    def explode(requests: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    engine.submit = explode  # type: ignore[method-assign]
    for streaming in (True, False):
        body = {"prompt": "a", "stream": streaming}
        response = post("/v1/completions", body, engine)
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.headers["x-request-id"] in response.json()["error"]["message"]
        assert response.headers["x-request-id"] in caplog.text


def test_clients_cannot_steer_ray_serve() -> None:
    seen: dict[str, Any] = {}

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.update(dict(scope["headers"]))
        ids_twice = [(b"x-request-id", b"a"), (b"x-request-id", b"a")]
        await send({"type": "http.response.start", "status": 200, "headers": ids_twice})

    async def check() -> list[Any]:
        sent: list[Any] = []
        headers = [
            (b"x-request-disconnect-disabled", b"?1"),
            (b"x-request-timeout-seconds", b"1"),
            (b"x-request-id", b"no good"),
            (b"accept", b"*/*"),
        ]

        async def send(message: Any) -> None:
            sent.append(message)

        await ProxyHeaders(inner)({"type": "http", "headers": headers}, None, send)  # type: ignore[arg-type]
        return sent

    [start] = asyncio.run(check())
    assert seen == {b"accept": b"*/*"}
    assert start["headers"] == [(b"x-request-id", b"a")]


def test_the_application_stops_its_engine() -> None:
    engine = MockEngine()
    app = create_app(ServeConfig(model="mock"), engine, TOKENIZER)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            assert not engine.stopped

    asyncio.run(live())
    assert engine.stopped


# -- the command line -----------------------------------------------------------------------------


def model_folder(path: Path) -> Path:
    """A folder that holds the byte tokenizer and looks like a model's."""
    folder = path / "mock-model"
    TOKENIZER._tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def test_bad_command_lines_end_with_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(model_folder(tmp_path))
    latin, numbered = tmp_path / "latin.yaml", tmp_path / "numbered.yaml"
    latin.write_bytes(b"model: caf\xe9\n")
    numbered.write_text("model: a\n1: 2\n")
    mistyped = tmp_path / "mistyped.yaml"
    mistyped.write_text("model: a\nthreads: true\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            (["serve"], "no model"),
            (["serve", "--model", str(tmp_path / "absent")], "no model folder at"),
            (["serve", "--model", str(tmp_path)], "has no config.json"),
            (["serve", "--model", folder, "--dtype", "int3"], "dtype"),
            (["serve", "--model", folder, "--kv-cache-memory", "lots"], "kv_cache_memory"),
            (["serve", "--model", folder, "--port", port], "in use"),
            (["serve", "--config", str(tmp_path / "absent.yaml")], "cannot read"),
            (["serve", "--model", folder, "--kv-cache-memory", "0"], "kv_cache_memory"),
            (["serve", "--model", folder, "--api-key", ""], "api_keys"),
            (["serve", "--config", str(latin)], "not valid YAML"),
            (["serve", "--config", str(numbered)], "must hold a mapping"),
            (["serve", "--config", str(mistyped)], "threads"),
        ]
        for arguments, expected in cases:
            assert main(arguments) == 2
            error = capsys.readouterr().err
            assert expected in error
            assert error.count("\n") == 1
    assert main(["frobnicate"]) == 2
    assert main(["--help"]) == 0


# -- everything real but the engine ---------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_openai_clients_through_ray_serve(tmp_path: Path) -> None:
    """The openai package, sync and async, against the application inside Ray Serve."""
    script = Path(__file__).parent / "serve_mock.py"
    folder = model_folder(tmp_path)
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(free_port())],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all answered" in done.stdout
    log = done.stdout + done.stderr
    assert "POST /v1/completions status=200" in log
    assert "engine error" in log
