"""The HTTP application over the mock engine, in this process: how tests ask it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.app import create_app
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from tests.support.mock_engine import MockEngine, byte_tokenizer, spell

TOKENIZER = byte_tokenizer()
HELLO = [{"role": "user", "content": "Hi"}]
Client = httpx.AsyncClient


def serve(
    test: Callable[[Client], Awaitable[Any]],
    engine: MockEngine | None = None,
    tokenizer: ModelTokenizer = TOKENIZER,
    **config: Any,
) -> Any:
    """Runs ``test`` against an application in this process."""
    app = create_app(ServeConfig(model="mock", **config), engine or MockEngine(), tokenizer)

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


@contextmanager
def listening(
    engine: MockEngine | None = None, tokenizer: ModelTokenizer = TOKENIZER, **config: Any
) -> Iterator[str]:
    """The application behind a real server on a real socket; yields its address."""
    app = create_app(ServeConfig(model="mock", **config), engine or MockEngine(), tokenizer)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def model_folder(path: Path) -> Path:
    """A folder that holds the byte tokenizer and looks like a model's."""
    folder = path / "mock-model"
    TOKENIZER._tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder
