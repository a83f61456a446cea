"""Serves the mock engine through Ray Serve and asks it with the openai package.

Run by ``test_serve_command.py`` in a process of its own:
``python -m tests.support.serve_mock FOLDER PORT``.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import httpx
import openai

from lexshard.actors.messages import Request
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.start.launch import running_server
from tests.support.exposition import metric
from tests.support.mock_engine import MockEngine, Script, ids, spell
from tests.support.real_server import wait

ADMITTED = "lexshard_admitted_sequences"


def scripted(request: Request) -> Script:
    """Prompts choose what happens."""
    prompt = bytes(request.prompt_ids).decode()
    if "hang" in prompt:
        return Script([ids("a")], hangs=True)
    if "break" in prompt:
        return Script([ids("a"), ids("b")], error="broken")
    return spell(f"one é {request.choice}")


def connect(config: ServeConfig) -> MockEngine:
    return MockEngine(script=scripted)


def ask_sync(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    model = client.models.list().data[0].id
    messages: Any = [{"role": "user", "content": "Hi"}]
    reply = client.chat.completions.create(
        model=model, messages=messages, n=2, seed=7, logprobs=True, top_logprobs=2, stop=["zzz"]
    )
    assert [choice.message.content for choice in reply.choices] == ["one é 0", "one é 1"]
    assert reply.choices[0].logprobs is not None
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2
    assert reply.usage is not None
    assert reply._request_id
    assert "," not in reply._request_id

    parts: dict[int, str] = {0: "", 1: ""}
    usage = None
    for chunk in client.chat.completions.create(
        model=model,
        messages=messages,
        n=2,
        stop="é",
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert parts == {0: "one ", 1: "one "}
    assert usage is not None
    assert usage.completion_tokens == 2 * len("one é".encode())

    completion = client.completions.create(
        model=model, prompt=["a", "b"], logprobs=1, echo=True, extra_body={"top_k": 5}
    )
    assert [choice.text for choice in completion.choices] == ["aone é 0", "bone é 0"]
    certified: Any = client.completions.create(
        model=model, prompt="a", extra_body={"certificate": True}
    )
    assert [entry["bytes_read"] for entry in certified.choices[0].certificates] == [*range(9)]
    streamed = client.completions.create(model=model, prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "one é 0"

    for bad, expected in (
        ({"temperature": -1}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
    ):
        arguments: dict[str, Any] = {"model": model, "prompt": "a", **bad}
        try:
            client.completions.create(**arguments)
        except expected:
            continue
        raise AssertionError(f"{bad} was not refused")
    failure = ""
    try:
        for _ in client.completions.create(model=model, prompt="break", stream=True):
            pass
    except openai.APIError as error:
        failure = error.message
    assert "Internal error" in failure, "the failure in the stream was not raised"
    try:
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was accepted")


async def ask_async(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="mock-model", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text == "one é 0"


def check_disconnect(url: str) -> None:
    """A client that leaves is forgotten, whatever headers it sent."""
    headers = {"Authorization": "Bearer secret", "x-request-disconnect-disabled": "?1"}
    for streaming in (True, False):
        body = {"prompt": "hang", "stream": streaming}
        try:
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=1.0
            ) as response:
                for line in response.iter_lines():
                    if line:
                        break
        except httpx.ReadTimeout:
            assert not streaming
        wait(lambda: not metric(url, ADMITTED), 30, "the end of a sequence whose client left")


def main(folder: str, port: int) -> None:
    config = ServeConfig(model=folder, port=port, api_keys=["secret"])
    url = f"http://127.0.0.1:{port}"
    with running_server(config, connect) as handle:
        assert handle.information.remote().result()["model"] == "mock"
        ask_sync(url)
        asyncio.run(ask_async(url))
        check_disconnect(url)
    print("all answered")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
