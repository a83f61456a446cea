"""`lexshard serve` as a stranger meets it: the real command, HTTP and the `openai` client."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.support.backends import PROCESS_AND_SLOW_RAY
from tests.support.exposition import unlabelled
from tests.support.faults import processes_of
from tests.support.real_server import Server, healthy, running_server, wait

PROMPT = "Once upon a time there was a little girl who"
CHAT = [{"role": "user", "content": "I want to book a table for two tonight."}]


@pytest.fixture(scope="module", params=PROCESS_AND_SLOW_RAY)
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("server"), backend=request.param) as running:
        yield running


@pytest.mark.timed
def test_the_first_request_when_ready_is_no_slower_than_the_tenth(server: Server) -> None:
    """Every kernel is compiled and warm: to compile one takes a second and more."""
    wait(lambda: "lexshard is ready" in server.log.read_text(), 30, "the banner")
    times = []
    with httpx.Client(base_url=server.url) as client:
        client.get("/health")  # the connection itself is not what is measured
        for seed in range(20):
            body = {"model": "lexshard-demo", "prompt": f"{PROMPT} {seed}", "max_tokens": 8}
            started = time.perf_counter()
            assert client.post("/v1/completions", json=body | {"seed": seed}).status_code == 200
            times.append(time.perf_counter() - started)
    print(f"first {times[0] * 1000:.0f} ms, tenth {times[9] * 1000:.0f} ms")
    assert times[0] <= max(times[9:]) + 0.5, times


def test_banner_names_model_capacity_and_a_curl(server: Server) -> None:
    wait(lambda: "lexshard is ready" in server.log.read_text(), 30, "the banner")
    text = server.log.read_text()
    for expected in ("lexshard-demo", "KV cache", "batch-invariant", "curl ", server.url):
        assert expected in text


def test_completions(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["lexshard-demo"]
    arguments: dict[str, Any] = {
        "model": "lexshard-demo",
        "prompt": PROMPT,
        "max_tokens": 32,
        "seed": 5,
        "temperature": 0.8,
    }
    whole = client.completions.create(**arguments, n=2, logprobs=3)
    assert len(whole.choices) == 2
    assert whole.choices[0].text != whole.choices[1].text
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)
    assert whole.usage is not None
    again = client.completions.create(**arguments)
    assert again.choices[0].text == whole.choices[0].text, "same seed, same tokens"
    pieces = client.completions.create(**arguments, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == again.choices[0].text
    word = again.choices[0].text.split()[4]
    stopped = client.completions.create(**arguments, stop=[word])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == again.choices[0].text.split(word)[0]
    echoed = client.completions.create(
        model="lexshard-demo", prompt=PROMPT, max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    assert echoed.choices[0].text.startswith(PROMPT)
    assert echoed.choices[0].logprobs is not None
    assert echoed.choices[0].logprobs.token_logprobs is not None
    assert echoed.choices[0].logprobs.token_logprobs[0] is None


def test_chat_streams_and_ends_by_itself(server: Server) -> None:
    client = server.client()
    arguments: dict[str, Any] = {"model": "lexshard-demo", "messages": CHAT, "seed": 3}
    whole = client.chat.completions.create(**arguments, logprobs=True, top_logprobs=2)
    assert whole.choices[0].finish_reason == "stop"
    text = whole.choices[0].message.content
    assert text
    assert "<|" not in text
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert all(len(entry.top_logprobs) == 2 for entry in whole.choices[0].logprobs.content)
    stream = client.chat.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    spoken = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert spoken == text


def test_certificates_are_told_and_counted_by_tier(server: Server) -> None:
    client = server.client()
    arguments: dict[str, Any] = {
        "model": "lexshard-demo",
        "prompt": PROMPT,
        "max_tokens": 16,
        "seed": 5,
        "extra_body": {"certificate": True},
    }
    whole: Any = client.completions.create(**arguments, n=2)
    for choice in whole.choices:
        assert len(choice.certificates) > 1
        assert all(entry["rescored_rows"] >= 1 for entry in choice.certificates)
        assert all(
            entry["guarantee"] in ("deterministic", "dense") for entry in choice.certificates
        )
    told = sum(len(choice.certificates) for choice in whole.choices)
    assert whole.usage is not None
    assert told == whole.usage.completion_tokens
    pieces: Any = client.completions.create(**arguments, stream=True)
    streamed = [entry for piece in pieces for entry in piece.choices[0].certificates]
    assert len(streamed) == len(whole.choices[0].certificates)
    wait(lambda: server.metric("lexshard_running") == 0, 5, "the last count")
    lines = unlabelled(httpx.get(f"{server.url}/metrics").text).splitlines()
    by_tier = [line for line in lines if line.startswith("lexshard_head_rows_by_tier_total{")]
    assert sum(float(line.split()[-1]) for line in by_tier) == server.metric(
        "lexshard_head_rows_total"
    )


def test_32_asynchronous_streams_say_what_each_says_alone(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(
            model="lexshard-demo",
            prompt=f"{PROMPT} {seed % 5}",
            max_tokens=24,
            seed=seed,
            stream=True,
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def both() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            together = await asyncio.gather(*(one(client, seed) for seed in range(32)))
            alone = [await one(client, seed) for seed in range(32)]
            return list(together), alone

    together, alone = asyncio.run(both())
    assert together == alone
    assert len(set(alone)) == 32


def test_a_client_that_leaves_frees_its_blocks(server: Server) -> None:
    before = server.metric("lexshard_cancelled_total")
    body = {"model": "lexshard-demo", "prompt": PROMPT, "max_tokens": 1500, "stream": True}
    body |= {"ignore_eos": True, "n": 16}  # so that it takes a while
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()  # held: a dropped iterator closes the connection
        next(lines)
        wait(lambda: server.metric("lexshard_running") >= 1, 5, "the sequence to run")
    wait(lambda: server.metric("lexshard_running") == 0, 5, "the sequence to be cancelled")
    wait(lambda: server.metric("lexshard_kv_blocks_used") == 0, 5, "its blocks")
    assert server.metric("lexshard_cancelled_total") == before + 16


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": "lexshard-demo", "prompt": ', 400),
        (b'{"model": "unknown", "prompt": "x"}', 404),
        (b'{"prompt": "' + b"x" * 20_000_000 + b'"}', 413),
    ],
    ids=["no JSON", "no model", "large"],
)
def test_bad_requests_get_a_clear_error_and_harm_no_other(
    server: Server, body: bytes, status: int
) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert healthy(server.url)


def test_killing_the_engine_keeps_streams_and_the_server_answers_again(
    server: Server,
) -> None:
    """kill -9 while four streams run: they go on with the same text; new requests are served."""

    def tell(seed: int, started: threading.Event | None = None) -> str:
        text = ""
        stream = server.client().completions.create(
            model="lexshard-demo",
            prompt=PROMPT,
            max_tokens=1200,
            seed=seed,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for chunk in stream:
            text += chunk.choices[0].text
            if started is not None and len(text) > 200:
                started.set()
        return text

    expected = [tell(seed) for seed in range(4)]
    [engine] = processes_of(server, "engine")
    events = [threading.Event() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(tell, seed, events[seed]) for seed in range(4)]
        for event in events:
            assert event.wait(30)
        engine.kill()
        killed = time.monotonic()
        wait(lambda: not healthy(server.url), 10, "the death to be noticed")
        wait(lambda: healthy(server.url), 60, "the new engine")
        server.client().completions.create(model="lexshard-demo", prompt="x", max_tokens=1)
        seconds = time.monotonic() - killed
        assert server.metric("lexshard_engine_restarts_total") == 1
        print(f"answered again {seconds:.1f} s after kill -9")
        assert [stream.result() for stream in streams] == expected
    assert seconds < 60


def test_metrics_are_prometheus_text(server: Server) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    assert "# TYPE lexshard_generated_tokens_total counter" in text
    assert server.metric("lexshard_generated_tokens_total") > 0
    version = httpx.get(f"{server.url}/version").json()
    assert version["version"]
    assert json.loads(httpx.get(f"{server.url}/nowhere").text)["error"]["code"] == "unknown_url"
    head = httpx.head(f"{server.url}/health")
    assert (head.status_code, head.content) == (200, b"")
    assert "POST /v1/completions" in httpx.get(f"{server.url}/docs").text
