"""``/v1/responses`` over HTTP: what is kept, for whom, and what chat completions do as well."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.api_processes.seats import Seats
from lexshard.serve_app.app import create_app
from tests.support.mock_engine import MockEngine, Script, spell
from tests.support.mock_server import TOKENIZER, Client, Wire, listening, serve, until

KEYS = ["one", "two"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(api_keys=KEYS) as url:
        yield url


def client(url: str, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_a_conversation_goes_on_after_a_response_that_was_kept() -> None:
    engine = MockEngine(script=lambda _: spell("Yes"))
    with listening(engine) as url:
        ask = client(url).responses
        first = ask.create(input="Hi", instructions="Be short")
        second = ask.create(input="More", previous_response_id=first.id)
        ask.create(input="And", previous_response_id=second.id)
    prompts = [bytes(request.prompt_ids).decode() for request in engine.requests]
    assert prompts == [
        "<system>Be short\n<user>Hi\n<assistant>",
        "<user>Hi\n<assistant>Yes\n<user>More\n<assistant>",
        "<user>Hi\n<assistant>Yes\n<user>More\n<assistant>Yes\n<user>And\n<assistant>",
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_kept_can_be_asked_for_and_deleted(url: str, stream: bool) -> None:
    ask = client(url).responses
    made: Any = ask.create(input="Hi", stream=stream)
    if stream:
        made = list(made)[-1].response
    assert ask.retrieve(made.id).to_dict() == made.to_dict()
    ask.delete(made.id)
    for again in (ask.retrieve, ask.delete, ask.input_items.list):
        with pytest.raises(openai.NotFoundError):
            again(made.id)


def test_what_is_not_to_be_kept_is_not(url: str) -> None:
    made = client(url).responses.create(input="Hi", store=False)
    assert made.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client(url).responses.retrieve(made.id)


def test_a_key_finds_nothing_of_another(url: str) -> None:
    made = client(url).responses.create(input="Hi")
    other = client(url, "two").responses
    for ask in (other.retrieve, other.delete, other.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    with pytest.raises(openai.BadRequestError) as told:
        other.create(input="Hi", previous_response_id=made.id)
    assert told.value.code == "previous_response_not_found"
    assert told.value.param == "previous_response_id"
    assert client(url).responses.retrieve(made.id).id == made.id


def test_input_items_come_in_pages(url: str) -> None:
    ask = client(url).responses
    given: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    made = ask.create(input=given)
    for order in ("asc", "desc"):
        items: list[Any] = list(ask.input_items.list(made.id, limit=2, order=order))  # type: ignore[arg-type]
        texts = [item.content[0].text for item in items]
        assert texts == ["01234"[:: 1 if order == "asc" else -1][i] for i in range(5)]
    page = ask.input_items.list(made.id, limit=2)
    assert page.has_more
    assert page.last_id == page.data[-1].id


@pytest.mark.parametrize(
    ("query", "place"),
    [
        *[("order=x", "order"), ("limit=0", "limit"), ("limit=a", "limit"), ("after=x", "after")],
        *[
            ("limit=101", "limit"),
            ("limit=00000000019999", "limit"),
            ("limit=" + "9" * 5000, "limit"),
        ],
    ],
)
def test_pages_that_there_are_not(url: str, query: str, place: str) -> None:
    made = client(url).responses.create(input="Hi")
    headers = {"Authorization": "Bearer one"}
    reply = httpx.get(f"{url}/v1/responses/{made.id}/input_items?{query}", headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, place)


def test_a_kept_response_is_not_streamed_again(url: str) -> None:
    made = client(url).responses.create(input="Hi")
    with pytest.raises(openai.BadRequestError, match="stream"):
        client(url).responses.retrieve(made.id, stream=True)


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("GET", "?stream=1", "stream"),
        ("GET", "?stream=false&starting_after=3", "starting_after"),
        ("GET", "?include[]=message.output_text.logprobs", "include[]"),
        ("DELETE", "?force=1", "force"),
        ("GET", "/input_items?include=x", "include"),
        ("GET", "/input_items?before=x", "before"),
    ],
)
def test_what_is_not_implemented_of_a_kept_response_is_named(
    url: str, method: str, path: str, name: str
) -> None:
    made = client(url).responses.create(input="Hi")
    headers = {"Authorization": "Bearer one"}
    reply = httpx.request(method, f"{url}/v1/responses/{made.id}{path}", headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    assert client(url).responses.retrieve(made.id, stream=False).id == made.id


def test_there_is_nothing_in_the_background_to_cancel(url: str) -> None:
    made = client(url).responses.create(input="Hi")
    with pytest.raises(openai.NotFoundError, match="'background' is not implemented"):
        client(url).responses.cancel(made.id)


def test_mistakes_name_the_field_and_are_none_of_the_server(url: str) -> None:
    ask = client(url).responses
    with pytest.raises(openai.BadRequestError) as told:
        ask.create(input=[{"type": "message", "role": "user"}])  # type: ignore[list-item,misc]
    assert told.value.param == "input[0].content"
    with pytest.raises(openai.BadRequestError) as told:
        ask.create(input="x" * 99_999)
    assert (told.value.param, told.value.code) == ("input", "context_length_exceeded")
    assert "messages" not in told.value.message
    with pytest.raises(openai.NotFoundError):
        ask.create(input="Hi", model="other")
    with pytest.raises(openai.AuthenticationError):
        client(url, "wrong").responses.create(input="Hi")


def test_what_is_gone_on_with_holds_no_more_than_a_body() -> None:
    with listening(max_body_bytes=3000) as url:
        ask = client(url).responses
        made = ask.create(input="x" * 1000)
        made = ask.create(input="x" * 1000, previous_response_id=made.id)
        with pytest.raises(openai.BadRequestError, match="more than 3000") as told:
            ask.create(input="x", previous_response_id=made.id)
        assert told.value.param == "previous_response_id"


def test_a_body_that_is_as_deep_as_can_be_is_refused(url: str) -> None:
    for depth in range(240, 256):
        parameters = '{"a":' * depth + "1" + "}" * depth
        tool = f'{{"type":"function","name":"f","parameters":{parameters}}}'
        body = f'{{"input":"Hi","stream":true,"tool_choice":"none","tools":[{tool}]}}'
        headers = {"Authorization": "Bearer one"}
        reply = httpx.post(f"{url}/v1/responses", content=body, headers=headers)
        assert reply.status_code == 400
        assert "response.failed" not in reply.text


def test_api_processes_of_a_server_share_what_is_kept(tmp_path: Path) -> None:
    async def run() -> None:
        config = ServeConfig(model="mock", api_processes=2)
        clients = []
        for _ in range(2):
            seats = Seats(tmp_path / "api-processes", config.api_processes)
            app = create_app(config, MockEngine(), TOKENIZER, seats, 1)
            transport = httpx.ASGITransport(app=app)
            clients.append(Client(transport=transport, base_url="http://test"))
        first, second = clients
        made = (await first.post("/v1/responses", json={"input": "Hi"})).json()
        assert (await second.get(f"/v1/responses/{made['id']}")).json() == made
        body = {"input": "More", "previous_response_id": made["id"]}
        assert (await second.post("/v1/responses", json=body)).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_the_sequence(stream: bool) -> None:
    async def run() -> None:
        engine = MockEngine(script=lambda _: Script([(97,)], hangs=True))
        wire = Wire("/v1/responses", {"input": "Hi", "stream": stream}, engine)
        running = asyncio.create_task(wire.run())
        await until(lambda: bool(engine.requests))
        await asyncio.sleep(0.01)
        wire.gone.set()
        await running
        assert engine.cancelled == [engine.requests[0].request_id]
        assert wire.app.state.server.admission.sequences == 0

    asyncio.run(run())


def test_a_full_server_says_when_to_try_again() -> None:
    engine = MockEngine(script=lambda _: Script([(97,)], hangs=True))

    async def test(client: Client) -> None:
        first = asyncio.create_task(client.post("/v1/responses", json={"input": "Hi"}))
        await until(lambda: bool(engine.requests))
        reply = await client.post("/v1/responses", json={"input": "Hi"})
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        first.cancel()

    serve(test, engine, max_running_requests=1)


def test_requests_are_counted_with_their_tokens() -> None:
    async def test(client: Client) -> None:
        await client.post("/v1/responses", json={"input": "Hi"})
        lines = (await client.get("/metrics")).text.splitlines()
        [counted] = [line for line in lines if 'path="/v1/responses"' in line and "_total{" in line]
        assert 'status="200"' in counted
        assert counted.endswith(" 1.0")
        tokens = [line for line in lines if "lexshard_request_output_tokens_sum{" in line]
        assert [line.split()[-1] for line in tokens] == ["6.0"]

    serve(test)
