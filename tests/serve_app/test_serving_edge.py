"""Devices at a real server: the text is its own, whatever becomes of links and processes."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from lexshard.actors.edge.drafting import EdgeSettings
from lexshard.actors.messages import Request, SamplingParameters
from lexshard.cluster.ports import free_port
from lexshard.loadtest.shaped_link import LinkShape, ShapedLink
from lexshard.serve_app.edge.client import EdgeClient
from lexshard.serve_app.openai.parameters import completion_fields
from tests.support.edge_device import device, model, text_of
from tests.support.faults import processes_of
from tests.support.paths import DEMO_DRAFT, ROOT
from tests.support.real_server import Server, healthy, running_server, wait

SCORED = {"query": "Once", "items": [" upon", " there"], "label_token_ids": [300, 301, 5_000]}
STORY = "Once upon a time there was a little girl who lived in a house near the"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("cloud"), "--edge-resume-seconds", "3") as running:
        yield running


def requests(count: int, tokens: int = 40) -> list[Request]:
    """Of every kind: greedy, drawn, truncated, penalised."""
    kinds = (
        SamplingParameters(temperature=0.0),
        SamplingParameters(temperature=0.8),
        SamplingParameters(temperature=1.0, top_k=20, top_p=0.9),
        SamplingParameters(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3),
    )
    prompts = [tuple(model().tokenizer.encode(f"{STORY} {i}", True)) for i in range(count)]
    return [
        Request(
            str(i), 0, prompt, replace(kinds[i % 4], max_tokens=tokens, seed=i, ignore_eos=True)
        )
        for i, prompt in enumerate(prompts)
    ]


async def own_texts(server: Server, asked: Sequence[Request]) -> list[tuple[int, ...]]:
    """What the server says to each by itself."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        turns = asyncio.Semaphore(32)

        async def one(request: Request) -> tuple[int, ...]:
            body = completion_fields(request.parameters)
            body |= {"prompt": request.prompt_ids, "return_token_ids": True}
            async with turns:
                reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            return tuple(reply.json()["choices"][0]["token_ids"])

        return list(await asyncio.gather(*map(one, asked)))


async def texts_of(client: EdgeClient, asked: Sequence[Request]) -> list[tuple[int, ...]]:
    return list(await asyncio.gather(*(text_of(client, request) for request in asked)))


def link_to(server: Server, shape: LinkShape) -> ShapedLink:
    address = urlsplit(server.url)
    return ShapedLink(address.hostname or "", address.port or 0, shape)


def share_that_stood(client: EdgeClient) -> float:
    """Of the guesses that were tested, of which there must be some."""
    stood, fell = client.statistics.draft_accepted_tokens, client.statistics.edge_rejections
    return stood / (stood + fell)


def is_at_rest(server: Server) -> bool:
    counted = ("admitted_sequences", "running", "kv_blocks_used")
    return not any(server.metric(f"lexshard_{name}") for name in counted)


@pytest.mark.parametrize(
    ("count", "thrifts"),
    [(24, (0.0, 0.5, 1.0)), pytest.param(200, (0.5,), marks=pytest.mark.slow)],
)
def test_the_text_is_the_server_s_own_at_any_pace(
    server: Server, count: int, thrifts: tuple[float, ...]
) -> None:
    """Drafts that are waited for, drafts ahead, and a target that goes on alone; plain requests
    beside them."""

    async def run() -> None:
        asked = requests(count)
        expected = await own_texts(server, asked)
        for thrift in thrifts:
            async with device(server.url, EdgeSettings(thrift=thrift)) as client:
                plain = asyncio.ensure_future(own_texts(server, asked[: count // 5]))
                assert await texts_of(client, asked) == expected
                assert await plain == expected[: count // 5]
                if thrift == 1.0:  # how many are drafted depends on how busy the machine is
                    assert share_that_stood(client) > 0.5

    asyncio.run(run())
    wait(lambda: is_at_rest(server), 10, "the sessions to be freed")


def test_the_first_text_takes_one_round_trip(server: Server) -> None:
    """Its connection is there, and the device knows that a server which is quick is not to wait:
    what it sends, a text's beginning and so many tokens to draw, it sends at once."""

    async def run() -> None:
        [asked] = requests(1)
        expected = await own_texts(server, [asked])
        async with (
            link_to(server, LinkShape(delay=0.15)) as link,
            device(f"http://127.0.0.1:{link.port}") as client,
        ):
            link.reset()
            assert [await text_of(client, asked)] == expected
            assert link.up.packets <= 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("count", "lost"),
    [(12, 0.2), *(pytest.param(200, lost, marks=pytest.mark.slow) for lost in (0.2, 0.05))],
)
def test_lost_connections_change_no_token(server: Server, count: int, lost: float) -> None:
    """Of all links so many are cut whenever as many answers have come as there are texts, in the
    midst of frames too, of 300 kbit/s in all: by the clock, a busy machine loses them too soon."""

    async def run() -> None:
        asked = requests(count)
        expected = await own_texts(server, asked)
        chance = random.Random(int(100 * lost))
        async with link_to(server, LinkShape(3e5, 0.005)) as link:
            url = f"http://127.0.0.1:{link.port}"
            async with device(url, EdgeSettings(thrift=1.0)) as client:
                saying = asyncio.ensure_future(texts_of(client, asked))
                cut_at = 0
                while not saying.done():
                    await asyncio.sleep(0.01 * chance.uniform(0.2, 1.8))
                    if client.statistics.edge_answers >= cut_at:
                        link.cut(lost)
                        cut_at = client.statistics.edge_answers + count
                assert await saying == expected
                assert client.statistics.edge_lost_links > 0

    asyncio.run(run())
    wait(lambda: is_at_rest(server), 15, "the sessions to be freed")


@pytest.mark.slow
@pytest.mark.parametrize(("role", "thrift"), [("engine", 1.0), ("engine", 0.1), ("api", 1.0)])
def test_texts_go_on_when_a_process_is_killed(server: Server, role: Any, thrift: float) -> None:
    """The engine's successor is told the guesses again, and what is left of a run of its own; with
    the API process the sessions are lost, and begun anew behind what the device has."""

    async def run() -> None:
        asked = requests(8, tokens=200 if thrift == 1.0 else 1_000)
        expected = await own_texts(server, asked)
        async with device(server.url, EdgeSettings(thrift=thrift)) as client:
            saying = asyncio.ensure_future(texts_of(client, asked))
            await asyncio.sleep(0.3)
            processes_of(server, role)[0].send_signal(signal.SIGKILL)
            assert await asyncio.wait_for(saying, 120) == expected

    asyncio.run(run())
    wait(lambda: healthy(server.url), 60, "the server to be well")
    wait(lambda: is_at_rest(server), 15, "the sessions to be freed")


@pytest.mark.parametrize("mode", ["ksqs", "csqs"])
def test_sparse_distributions_are_sent_and_their_bound_kept(server: Server, mode: Any) -> None:
    """Over a link that is long enough for guesses to pay."""

    async def run() -> None:
        async with (
            link_to(server, LinkShape(1e7, 0.03)) as link,
            device(f"http://127.0.0.1:{link.port}", EdgeSettings(mode=mode, thrift=1.0)) as client,
        ):
            texts = await texts_of(client, requests(8))
            assert all(len(text) == 40 for text in texts)
            counted = client.statistics
            assert share_that_stood(client) > 0.5
            assert counted.edge_bounds_broken == 0
            assert counted.edge_dropped_mass <= counted.edge_dropped_bound

    asyncio.run(run())


def test_a_device_that_stops_tells_its_texts_why(server: Server) -> None:
    async def run() -> None:
        async with device(server.url) as client:
            stream = client.submit(requests(1, tokens=1_000))
            await stream.arrived()
            await client.stop()
            async with asyncio.timeout(10):
                while (event := (await stream.arrived())[-1]).finish_reason is None:
                    pass
            assert (event.finish_reason, event.error) == ("abort", "the device is shutting down")

    asyncio.run(run())


def test_the_command_answers_as_the_server_does(server: Server, tmp_path: Path) -> None:
    """`lexshard edge`: the same reply, but for its id, to whatever a client asks; 503 while the
    server is away, or the draft model alone, which says so."""
    port, offline_port = free_port(), free_port()
    command = [sys.executable, "-m", "lexshard.serve_app.cli", "edge", "--draft", str(DEMO_DRAFT)]
    away = f"http://127.0.0.1:{free_port()}"
    with (tmp_path / "log").open("wb") as log:
        start = partial(subprocess.Popen, cwd=ROOT, stderr=log, stdout=log)
        there = start([*command, "--cloud", server.url, "--port", str(port)])
        command += ["--offline", "draft"]
        alone = start([*command, "--cloud", away, "--port", str(offline_port)])
    try:
        wait(lambda: healthy(f"http://127.0.0.1:{port}"), 120, "the device")
        wait(lambda: healthy(f"http://127.0.0.1:{offline_port}"), 120, "the other")
        chat = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 60}
        text: dict[str, Any] = {"prompt": STORY, "seed": 4}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {**text, "max_tokens": 50, "stop": ["\n", "."]}),
            ("/v1/completions", {**text, "logprobs": 3, "certificate": True}),
            ("/v1/completions", {**text, "n": 3, "bad_words": ["the", "she"]}),
            ("/v1/completions", {**text, "max_tokens": 0}),
            ("/generative_scoring", SCORED),
            ("/v1/chat/completions", {**chat, "seed": 9, "min_tokens": 20}),
            ("/v1/chat/completions", {**chat, "seed": 9, "stream": True}),
            ("/v1/chat/completions", {**chat, "temperature": 9e9}),
        ]
        for path, body in bodies:
            mine = httpx.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=60)
            own = httpx.post(f"{server.url}{path}", json=body, timeout=60)
            assert mine.status_code == own.status_code
            assert comparable(mine.text) == comparable(own.text)
        body = {**text, "receipt": True}
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert (reply.status_code, "ask its server" in reply.text) == (400, True)
        body = {**text, "max_tokens": 20}
        reply = httpx.post(f"http://127.0.0.1:{offline_port}/v1/completions", json=body, timeout=60)
        assert reply.json()["offline"] is True
        assert reply.json()["usage"]["completion_tokens"] == 20
        body["logit_bias"] = {"5": 1}
        reply = httpx.post(f"http://127.0.0.1:{offline_port}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 400
        assert "draft model alone" in reply.text
        body = {"prompt": STORY, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with (
            suppress(httpx.HTTPError),
            httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as stream,
        ):
            for line in stream.iter_lines():
                assert line != "data: [DONE]"
                there.kill()
        wait(lambda: is_at_rest(server), 15, "the session of the dead device to be freed")
    finally:
        for process in (there, alone):
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(30) for process in (there, alone)]
        print((tmp_path / "log").read_text())
    assert codes == [-9, 0]


def comparable(text: str) -> list[Any]:
    """What a reply says, without its id and time; a stream without where it is cut."""
    if not text.startswith("data:"):
        told = json.loads(text)
        for name in ("id", "created", "system_fingerprint"):
            told.pop(name, None)
        for choice in told.get("choices", ()):
            for certificate in choice.get("certificates", ()):
                certificate.clear()  # what was read depends on the batch
        told.get("usage", {}).pop("prompt_tokens_details", None)
        return [told]
    chunks = [json.loads(each[5:]) for each in text.split("\n\n") if each.startswith("data: {")]
    pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    said = "".join(piece["delta"].get("content") or "" for piece in pieces)
    return [said, [piece["finish_reason"] for piece in pieces if piece["finish_reason"]]]


@pytest.mark.slow
def test_a_device_that_the_server_cannot_use_is_told_why(server: Server, tmp_path: Path) -> None:
    """A draft model with another tokenizer, and a server that is away."""
    other = tmp_path / "draft"
    shutil.copytree(DEMO_DRAFT, other)
    told = json.loads((other / "tokenizer.json").read_text())
    vocabulary = told["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(told))
    command = [sys.executable, "-m", "lexshard.serve_app.cli", "edge", "--cloud", server.url]
    command += ["--draft", str(other), "--port", str(free_port())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "tokenizer is not that of lexshard-demo" in done.stderr.decode()
