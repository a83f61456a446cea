"""An API process of a server without Ray, as `serve_app.start.embedded` keeps it:
``python -m lexshard.serve_app.api_processes.api_process``.

Standard input brings an `ApiOrder` as one line of JSON and stays open: its end is the request to
stop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI

from lexshard.actors.faults import listen_for_faults
from lexshard.actors.machine import settle
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.engine.own_process import OwnEngines
from lexshard.cluster.engine.supervisor import EngineSupervisor, until
from lexshard.cluster.process_tree import die_with_parent, leave
from lexshard.serve_app.api_processes.messages import ApiOrder, Said
from lexshard.serve_app.api_processes.seats import Seats
from lexshard.serve_app.app import create_app
from lexshard.serve_app.edge.wire import MOST_MESSAGE_BYTES
from lexshard.serve_app.engine_client import EngineClient, EngineConnector
from lexshard.serve_app.observability.logs import log_to
from lexshard.serve_app.openai.tokenization import ModelTokenizer

FIND_SECONDS = 0.5
LOOK_SECONDS = 0.02  # until the engine is ready for the first time
TICK_SECONDS = 1.0


class HttpServer(uvicorn.Server):
    """One that looks at the clock once a second instead of ten times, and hears no signals."""

    capture_signals = nullcontext  # type: ignore[assignment]

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), TICK_SECONDS)

    def stop(self) -> None:
        self.should_exit = True
        self._stopped.set()


def http_config(app: FastAPI, **settings: Any) -> uvicorn.Config:
    """How an application is served: as fast as can be, and silently."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="error",
        **settings,
    )


def connect_own_engine(config: ServeConfig, path: str) -> EngineClient:
    """The client of the engine that is kept at ``path``."""
    supervisor = EngineSupervisor(config.engine_configuration, OwnEngines(path))
    supervisor.start()
    return supervisor


async def serve(order: ApiOrder, config: ServeConfig, connect: EngineConnector) -> None:
    """Returns when standard input has ended and every open stream has come to its end or has been
    told that it will not."""
    client = connect(config)
    tokenizer = ModelTokenizer.load(config.model, config.tool_format)
    seats = Seats(Path(order.folder) / "api-processes", config.api_processes)
    app = create_app(config, client, tokenizer, seats, order.start_time)
    # A successor finds an engine that runs: clients that waited for it are not sent away.
    await until(lambda: client.ready, FIND_SECONDS)
    settle()
    settings = {} if order.behind_haproxy else _own_certificate(config)
    http = HttpServer(
        http_config(
            app,
            fd=order.listener,
            uds=order.path,
            proxy_headers=order.behind_haproxy,
            forwarded_allow_ips="*" if order.behind_haproxy else None,
            ws="websockets-sansio",
            ws_max_size=min(config.max_body_bytes, MOST_MESSAGE_BYTES),
            ws_per_message_deflate=False,  # distributions are as short as can be
            **settings,
        )
    )
    serving = asyncio.create_task(http.serve())
    await until(lambda: http.started or serving.done(), FIND_SECONDS)  # it listens
    telling = asyncio.create_task(_tell(order.told, client, tokenizer.chat_template is not None))
    ending = asyncio.create_task(_end_of_standard_input())
    await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    await client.stop(config.shutdown_grace_seconds)
    http.stop()
    await serving


def _own_certificate(config: ServeConfig) -> dict[str, Any]:
    if config.ssl_certfile is None:
        return {}
    return {"ssl_certfile": config.ssl_certfile, "ssl_keyfile": config.ssl_keyfile}


async def _tell(told: int, client: EngineClient, has_chat: bool) -> None:
    """Says every new reason for waiting, until the engine is ready or never will be."""
    before = None
    while client.health_reason is not None and client.failure is None:
        if client.health_reason != before:
            before = client.health_reason
            _say(told, Said(waiting=f"not ready: {before}"))
        await asyncio.sleep(LOOK_SECONDS)
    if client.failure is not None:
        _say(told, Said(failure=client.health_reason or client.failure))
    else:
        _say(told, Said(information=asdict(client.information), has_chat=has_chat))


def _say(told: int, said: Said) -> None:
    os.write(told, msgspec.json.encode(said) + b"\n")


async def _end_of_standard_input() -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    descriptor = sys.stdin.fileno()

    def read() -> None:
        if not os.read(descriptor, 4096) and not ended.done():
            loop.remove_reader(descriptor)
            ended.set_result(None)

    loop.add_reader(descriptor, read)
    await ended


def main(connect: EngineConnector | None = None) -> int:
    """Serves what standard input says; the exit code. ``connect`` None takes the engine that is
    kept beside it."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # the server's own process is told to stop
        signal.signal(number, lambda *_: None)  # ignored ones would be in what it starts, too
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=ApiOrder)
    config = ServeConfig.model_validate_json(order.config, strict=True)
    log_to(sys.stderr, config.log_format)
    listen_for_faults()

    def connect_own(config: ServeConfig) -> EngineClient:
        return connect_own_engine(config, order.engine)

    uvloop.run(serve(order, config, connect or connect_own))
    return 0


if __name__ == "__main__":
    leave(main())
