"""Certificates in responses: one per output token, none lost, none repeated, none unasked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.messages import (
    Commands,
    EngineStatistics,
    Request,
    SamplingParameters,
    SequenceEvent,
    StepOutput,
)
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.engine.own_process import OwnEngines
from lexshard.cluster.engine.supervisor import EngineSupervisor
from lexshard.cluster.engine.transport import ClientSide, EngineSide
from lexshard.cluster.ports import free_port
from lexshard.serve_app.app import create_app
from tests.support.mock_engine import EOS, MockEngine, Script, certificate, ids, spell
from tests.support.mock_server import (
    HELLO,
    TOKENIZER,
    Client,
    chat,
    complete,
    events,
    post,
    says,
    serve,
    stream,
    until,
)

ASKS = {"certificate": True}
FIELDS = {
    "need",
    "guarantee",
    "tier",
    "rescored_rows",
    "bytes_read",
    "opened_share",
    "fallback",
    "tightness",
    "failure_probability",
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": HELLO},
}


def certified(token_ids: Iterable[int]) -> list[dict[str, Any]]:
    """What the mock engine certifies of an output, as JSON."""
    return [asdict(certificate(token, i)) for i, token in enumerate(token_ids)]


def pieces(chunks: Sequence[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """The choices of a stream's chunks that belong to one choice of the response."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [choice for choice in choices if choice["index"] == index]


def told(chunks: Sequence[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [entry for piece in pieces(chunks, index) for entry in piece["certificates"]]


def says_its_number() -> MockEngine:
    return MockEngine(script=lambda request: spell(f"{request.choice}" * (request.choice + 2)))


# -- whole responses ------------------------------------------------------------------------------


def test_every_choice_has_a_certificate_per_output_token() -> None:
    replies = (
        complete({**ASKS, "n": 3, "best_of": 3}, says_its_number()),
        chat({**ASKS, "n": 3}, says_its_number()),
    )
    for reply in replies:
        for i, choice in enumerate(reply["choices"]):
            assert choice["certificates"] == certified([*ids(f"{i}" * (i + 2)), EOS])
            assert set(choice["certificates"][0]) == FIELDS


def test_certificates_end_where_the_output_does() -> None:
    cut = complete({**ASKS, "max_tokens": 3})["choices"][0]
    assert cut["certificates"] == certified(ids("Hel"))
    # The engine has gone on in the same step; what came after the stop string is not output.
    engine = MockEngine(script=lambda _: Script([ids("one t"), ids("wo three")], hangs=True))
    reply = complete({**ASKS, "stop": "two"}, engine)
    assert reply["choices"][0]["certificates"] == certified(ids("one two"))
    assert reply["usage"]["completion_tokens"] == len("one two")


def test_an_echoed_prompt_has_none() -> None:
    fields = {**ASKS, "echo": True, "logprobs": 1}
    assert complete(fields)["choices"][0]["certificates"] == certified([*ids("Hello"), EOS])
    assert complete({**fields, "max_tokens": 0})["choices"][0]["certificates"] == []


def test_the_engine_is_asked_when_the_client_asks() -> None:
    engine = MockEngine()
    for value in (True, False, None):
        complete({"certificate": value}, engine)
        chat({"certificate": value}, engine)
    complete({}, engine)
    asked = [request.parameters.certificate for request in engine.requests]
    assert asked == [True, True, False, False, False, False, False]


@pytest.mark.parametrize("path", BODIES)
def test_who_does_not_ask_is_not_told(path: str) -> None:
    for fields in ({}, {"certificate": False}, {"certificate": None}):
        body = {**BODIES[path], **fields}
        assert "certificates" not in post(path, body).text
        assert "certificates" not in str(stream(path, body))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", ["yes", 1, [True]])
def test_what_is_no_boolean_is_refused(path: str, value: Any) -> None:
    response = post(path, {**BODIES[path], "certificate": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "certificate"


# -- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True}, {"return_seed": True}])
@pytest.mark.parametrize("text", ["Hello", "aé漢🙂b", "", "stop at the end", "almost a", "🙂"])
def test_a_stream_tells_what_the_whole_response_tells(
    path: str, extra: dict[str, Any], text: str
) -> None:
    """Also while text is held back: a character is incomplete, or a stop string may begin."""
    body = {**BODIES[path], **ASKS, **extra, "n": 2, "stop": "at", "seed": 1}
    whole = post(path, body, says(text)).json()
    chunks = stream(path, body, says(text))
    assert len(whole["choices"]) == 2
    for choice in whole["choices"]:
        assert told(chunks, choice["index"]) == choice["certificates"]
        assert choice["certificates"] == certified(
            [*text.partition("at")[0].encode()] + (list(b"at") if "at" in text else [EOS])
        )
    assert len([chunk for chunk in chunks if "seed" in chunk]) == 2 * ("return_seed" in extra)


@pytest.mark.parametrize("path", BODIES)
def test_a_chunk_has_the_certificates_of_its_own_tokens(path: str) -> None:
    tokens = [*ids("aé漢b"), EOS]  # two a step: every character but the first is cut in two
    engine = MockEngine(script=lambda _: Script([tokens[i : i + 2] for i in range(0, 8, 2)]))
    asks_both = {**BODIES[path], **ASKS, "return_token_ids": True}
    chunks = pieces(stream(path, asks_both, engine))
    for piece in chunks:
        rows = [entry["rescored_rows"] for entry in piece["certificates"]]
        assert rows == list(piece.get("token_ids", []))
    assert sum(len(piece["certificates"]) > 0 for piece in chunks) == 4


# -- an engine that dies and is replaced ----------------------------------------------------------


class RecordedSide:
    """The way to an engine, as far as what is sent on it."""

    def __init__(self) -> None:
        self.submitted: list[Request] = []

    def send(self, commands: Commands) -> None:
        self.submitted.extend(commands.submit)


@pytest.mark.parametrize("path", BODIES)
def test_a_restart_of_the_engine_neither_loses_nor_repeats_certificates(path: str) -> None:
    client = EngineSupervisor(EngineConfiguration("mock"), OwnEngines("nowhere"))
    client._information = MockEngine().information
    client.health_reason = None

    def route(request: Request, text: str, begin: int, reason: str | None = None) -> None:
        tokens = ids(text)
        certificates = tuple(certificate(t, begin + i) for i, t in enumerate(tokens))
        event = SequenceEvent(
            request.request_id,
            request.choice,
            tokens,
            finish_reason=reason,  # type: ignore[arg-type]
            certificates=certificates,
        )
        client._journal.record([event])

    async def die_and_go_on(http: Client) -> Any:
        first, second = RecordedSide(), RecordedSide()
        client._side = first  # type: ignore[assignment]
        body = {**BODIES[path], **ASKS, "stream": True, "max_tokens": 5}
        answer = asyncio.ensure_future(http.post(path, json=body))
        await until(lambda: bool(first.submitted))
        [request] = first.submitted
        route(request, "a", 0)
        await asyncio.sleep(0.01)
        route(request, "bc", 1)
        client._side = None
        client._journal.count_death()
        client._side = second  # type: ignore[assignment]
        client._replay()
        [again] = second.submitted
        assert again.resumed_ids == ids("abc")
        assert again.parameters == request.parameters
        assert again.parameters.certificate
        route(again, "d", 3)
        route(again, "e", 4, "length")
        return await answer

    chunks = events(serve(die_and_go_on, client))  # type: ignore[arg-type]
    assert told(chunks) == certified(ids("abcde"))


def test_certificates_and_counts_by_tier_travel_between_processes(tmp_path: Path) -> None:
    sent = StepOutput(
        (SequenceEvent("a", 0, (7, 8), certificates=(certificate(7, 0), certificate(8, 1))),),
        EngineStatistics(head_rows=2, head_opened_share=0.5, head_rows_by_tier={"int4": 2}),
    )

    async def receive() -> StepOutput:
        engine = EngineSide(tmp_path / "engine")
        heard: asyncio.Queue[StepOutput] = asyncio.Queue()
        client = await ClientSide.connect(str(tmp_path / "engine"), heard.put_nowait)
        try:
            client.send(Commands(submit=(Request("a", 0, (1,), SamplingParameters()),)))
            while engine.receive(0.0) is None:
                await asyncio.sleep(0.001)
            engine.emit(sent)
            return await asyncio.wait_for(heard.get(), 5)
        finally:
            client.close()
            engine.close()

    assert asyncio.run(receive()) == sent


# -- the openai package, over HTTP ----------------------------------------------------------------


@pytest.fixture
def url() -> Iterator[str]:
    port = free_port()
    app = create_app(ServeConfig(model="mock"), says("aé!"), TOKENIZER)  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join()


def test_the_openai_package_reads_certificates(url: str) -> None:
    expected = certified([*ids("aé!"), EOS])
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        asks: dict[str, Any] = {"model": "mock", "extra_body": ASKS}
        creators: list[tuple[Any, dict[str, Any]]] = [
            (client.completions.create, {"prompt": "abc"}),
            (client.chat.completions.create, {"messages": HELLO}),
        ]
        for create, body in creators:
            assert create(**asks, **body).choices[0].certificates == expected
            chunks = list(create(**asks, **body, stream=True))
            streamed = [entry for chunk in chunks for entry in chunk.choices[0].certificates]
            assert streamed == expected
            plain = create(model="mock", **body)
            assert not hasattr(plain.choices[0], "certificates")
