"""What one request's texts may cost: bounded before they are tokenised, and beside the loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from lexshard.serve_app.openai.errors import ApiError, ClientDisconnectedError
from lexshard.serve_app.openai.protocol import read_object
from lexshard.serve_app.openai.tokenization import ModelTokenizer, most_text_bytes
from lexshard.serve_app.openai.workers import SHORT_TEXT, TextWorkers
from lexshard.serve_app.responses import items
from tests.support.mock_engine import VOCABULARY, MockEngine, Script, byte_tokenizer, ids
from tests.support.mock_server import HELLO, TOKENIZER, Client, Wire, post, serve, until
from tests.support.paths import DEMO

LIMIT = most_text_bytes(4096)
LONG = "ab " * 5_000_000


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all texts that were tokenised."""
    lengths: list[int] = []
    encode = TOKENIZER.encode

    def noting(text: str, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(TOKENIZER, "encode", noting)
    return lengths


TOO_LONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": LONG}, "prompt"),
    ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 10}, "prompt"),
    ("/v1/completions", {"prompt": ["a" * 8400] * 250, "truncate_prompt_tokens": 10}, "prompt"),
    ("/v1/completions", {"prompt": "漢" * 180_000, "truncate_prompt_tokens": 10}, "prompt"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": 10},
        "messages",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a", "name": LONG}]},
        "messages",
    ),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
]


@pytest.mark.timed
@pytest.mark.parametrize(("path", "body", "parameter"), TOO_LONG, ids=lambda value: str(value)[:40])
def test_too_long_texts_are_refused_before_they_are_tokenised(
    path: str, body: dict[str, Any], parameter: str, encoded: list[int]
) -> None:
    started = time.perf_counter()
    response = post(path, body)
    assert time.perf_counter() - started < 2
    assert response.status_code == 400
    assert response.json()["error"]["param"] == parameter
    limit = LIMIT * 4 if isinstance(body.get("prompt"), list) else LIMIT
    assert f"at most {limit}, also" in response.text
    assert encoded == []


def test_several_contexts_of_text_are_truncated_to_their_end() -> None:
    engine = MockEngine()
    text = "a" * (LIMIT - 3) + "xyz"
    body = {"prompt": text, "truncate_prompt_tokens": 10}
    assert post("/v1/completions", body, engine).status_code == 200
    assert engine.requests[0].prompt_ids == ids(text[-10:])
    assert LIMIT >= 100 * 4096


def test_a_batch_of_prompts_is_tokenised_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes meanwhile has a turn."""
    sizes: list[int] = []
    run = TOKENIZER.workers.run

    async def noting(size: int, work: Any, receive: Any) -> Any:
        sizes.append(size)
        return await run(size, work, receive)

    monkeypatch.setattr(TOKENIZER.workers, "run", noting)
    engine = MockEngine()
    prompts = [str(i) + "a" * 4000 for i in range(200)]
    body = {"prompt": prompts, "truncate_prompt_tokens": 4001}
    assert post("/v1/completions", body, engine).status_code == 200
    kept = [ids(prompt[-4001:]) for prompt in prompts]
    assert [request.prompt_ids for request in engine.requests] == kept
    _, *pieces = sizes  # the body comes first
    assert len(pieces) == 12
    assert max(pieces) < 70_000


def test_long_contexts_have_longer_texts() -> None:
    assert most_text_bytes(131_072) == 16 * 131_072


def test_what_a_template_makes_of_a_text_is_bounded_too(encoded: list[int]) -> None:
    tokenizer = byte_tokenizer("{% for i in range(9) %}{{ messages[0].content }}{% endfor %}")

    async def check(client: Client) -> None:
        message = {"role": "user", "content": "a" * (LIMIT // 8)}
        response = await client.post("/tokenize", json={"messages": [message]})
        assert response.status_code == 400
        assert f"at most {LIMIT}, also" in response.text

    serve(check, tokenizer=tokenizer)


def test_what_a_normaliser_makes_of_a_text_is_bounded_too() -> None:
    tokenizer = byte_tokenizer()
    tokenizer._backend.normalizer = normalizers.NFKC()
    assert tokenizer.normalized_bytes("\ufdfa") == 33

    async def check(client: Client) -> None:
        body = {"prompt": "\ufdfa" * (LIMIT // 4), "truncate_prompt_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 400

    serve(check, tokenizer=tokenizer)


def test_template_arguments_are_bounded() -> None:
    deep: Any = 0
    for _ in range(300):
        deep = [deep]
    for value, parameter in (("x" * 70_000, "chat_template_kwargs"), (deep, None)):
        body = {"messages": HELLO, "chat_template_kwargs": {"a": value}}
        response = post("/v1/chat/completions", body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == parameter


def test_detokenize_takes_as_many_ids_as_a_text_may_have() -> None:
    most = LIMIT // 4
    assert post("/detokenize", {"tokens": [97] * most}).json() == {"prompt": "a" * most}
    response = post("/detokenize", {"tokens": [97] * (most + 1)})
    assert response.status_code == 400
    assert str(most) in response.text


def test_no_more_ids_are_allowed_than_there_are() -> None:
    body = {"prompt": "a", "allowed_token_ids": [1] * (VOCABULARY + 1)}
    response = post("/v1/completions", body)
    assert response.json()["error"]["param"] == "allowed_token_ids"


def test_the_fast_call_makes_the_same_ids() -> None:
    demo = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json")))
    texts = ("Once upon a time\n\n  there <|user|>was", "aé漢🙂 \u0301x  ", "don't 1234.5 !?", "")
    for tokenizer in (demo, TOKENIZER):
        for text in texts:
            slow = tokenizer._backend.encode(text, add_special_tokens=True)
            assert tokenizer.encode(text, add_special_tokens=True) == slow.ids


TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
CONVERSATIONS = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/responses": {"input": TURNS},
    "/v1/messages": {"messages": TURNS, "model": "mock", "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": TURNS, "model": "mock"},
    "/tokenize": {"messages": TURNS},
}


@pytest.mark.parametrize("path", CONVERSATIONS)
def test_of_a_long_conversation_the_loop_does_as_much_as_of_a_shorter_one(path: str) -> None:
    """What takes longer for more messages is done beside it: no stream waits for that."""

    async def calls(client: Client, repeats: int) -> int:
        body = {name: value * repeats if value is TURNS else value for name, value in asked.items()}
        count = 0

        def noting(*_: Any) -> None:
            nonlocal count
            count += 1

        sys.setprofile(noting)  # of this thread alone
        response = await client.post(path, json=body)
        sys.setprofile(None)
        assert response.status_code == 200, response.text
        return count

    async def check(client: Client) -> None:
        await calls(client, 1)  # what is done once
        shorter, longer = await calls(client, 600), await calls(client, 2400)
        assert abs(longer - shorter) < 1800, (shorter, longer)  # one for each message more is 3,600

    asked = CONVERSATIONS[path]
    serve(check, MockEngine(max_model_len=100_000))


def test_a_long_call_in_a_response_is_read_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[str] = set()

    def noting(text: str, place: str) -> dict[str, Any]:
        threads.add(threading.current_thread().name)
        return read_object(text, place)

    monkeypatch.setattr(items, "read_object", noting)
    call = {"type": "function_call", "call_id": "1", "name": "f"}
    asked = [{**call, "arguments": '{"a": [' + "0," * 5000 + "0]}"}]
    said = {"type": "function_call_output", "call_id": "1", "output": "x"}
    post("/v1/responses", {"input": [*asked, said]})
    assert threads
    assert all(name.startswith("text") for name in threads)


# -- threads ---------------------------------------------------------------------------------------


class Job:
    """Runs until it is let go, and counts how many of its kind do."""

    running = 0
    most = 0
    started = 0

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self) -> int:
        Job.started += 1
        Job.running += 1
        Job.most = max(Job.most, Job.running)
        self.go.wait(5)
        Job.running -= 1
        return 7


@pytest.fixture
def _no_jobs() -> None:
    Job.running = Job.most = Job.started = 0


async def stays() -> dict[str, Any]:
    """The ``receive`` of a client that stays."""
    await asyncio.Event().wait()
    return {}


def run(check: Callable[[TextWorkers], Any], **limits: int) -> None:
    asyncio.run(check(TextWorkers(**limits)))


@pytest.mark.usefixtures("_no_jobs")
def test_long_texts_wait_for_a_thread_and_short_ones_for_nothing() -> None:
    async def check(workers: TextWorkers) -> None:
        jobs = [Job() for _ in range(6)]
        tasks = [asyncio.ensure_future(workers.run(10_000, job, stays)) for job in jobs]
        await until(lambda: Job.running == 2)
        assert await workers.run(SHORT_TEXT, lambda: 1, stays) == 1
        assert workers.waiting_bytes == 60_000
        for job in jobs:
            job.go.set()
        assert await asyncio.gather(*tasks) == [7] * 6
        assert Job.most == 2
        assert workers.waiting_bytes == 0

    run(check, threads=2)


@pytest.mark.usefixtures("_no_jobs")
def test_what_waits_for_a_client_that_left_never_runs() -> None:
    async def check(workers: TextWorkers) -> None:
        first, second = Job(), Job()
        gone = asyncio.Event()

        async def leaves() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        running = asyncio.ensure_future(workers.run(10_000, first, stays))
        await until(lambda: Job.running == 1)
        waiting = asyncio.ensure_future(workers.run(10_000, second, leaves))
        await asyncio.sleep(0.01)
        gone.set()
        with pytest.raises(ClientDisconnectedError):
            await waiting
        assert workers.waiting_bytes == 10_000
        first.go.set()
        assert await running == 7
        assert Job.started == 1

    run(check, threads=1)


@pytest.mark.usefixtures("_no_jobs")
def test_more_than_may_wait_is_sent_away() -> None:
    async def check(workers: TextWorkers) -> None:
        first = Job()
        running = asyncio.ensure_future(workers.run(90_000, first, stays))
        await until(lambda: Job.running == 1)
        with pytest.raises(ApiError, match="90000 bytes of text") as refused:
            await workers.run(20_000, Job(), stays)
        assert refused.value.status == 503
        first.go.set()
        await running
        last = Job()
        last.go.set()
        assert await workers.run(200_000, last, stays) == 7

    run(check, max_waiting_bytes=100_000)


def test_a_disconnect_while_a_text_is_tokenised_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = MockEngine(script=lambda _: Script([], hangs=True))
    go = threading.Event()

    def slow(text: str, add_special_tokens: bool) -> list[int]:
        go.wait(5)
        return [1]

    async def check() -> None:
        wire = Wire("/v1/completions", {"prompt": "a" * 10_000}, engine)
        monkeypatch.setattr(TOKENIZER, "encode", slow)
        task = asyncio.ensure_future(wire.run())
        await until(lambda: TOKENIZER.workers.waiting_bytes > 0)
        wire.gone.set()
        await asyncio.wait_for(task, 5)
        assert TOKENIZER.workers.waiting_bytes == 0
        assert wire.writes == []
        assert engine.requests == []
        go.set()

    asyncio.run(check())


def test_bad_words_are_tokenised_beside_the_loop() -> None:
    """A thousand of them take a tenth of a second."""
    threads: set[str] = set()
    tokenizer = byte_tokenizer()
    encode = tokenizer.encode

    def noting(text: str, add_special_tokens: bool) -> list[int]:
        threads.add(threading.current_thread().name)
        return encode(text, add_special_tokens)

    tokenizer.encode = noting  # type: ignore[method-assign]

    async def check(client: Client) -> None:
        body = {"prompt": [1], "bad_words": ["a word"] * 1000}
        assert (await client.post("/v1/completions", json=body)).status_code == 200

    serve(check, tokenizer=tokenizer)
    assert all(name.startswith("text") for name in threads)
