"""The device's server: the application of every other one, in one process, on a link."""

from __future__ import annotations

import asyncio
import sys
from contextlib import nullcontext
from functools import partial

import uvloop

from lexshard.actors.configuration import DraftHeadChoice
from lexshard.actors.edge.drafting import warm_up
from lexshard.actors.edge.settings import EdgeSettings
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.api_processes.api_process import HttpServer, http_config
from lexshard.serve_app.app import create_app
from lexshard.serve_app.edge.client import EdgeClient, load_model
from lexshard.serve_app.observability.logs import log_to, print_lines
from lexshard.serve_app.start.banner import base_url
from lexshard.serve_app.start.stopping import StopRequest


def serve_edge(
    config: ServeConfig,
    settings: EdgeSettings,
    cloud: str,
    key: str | None,
    head: DraftHeadChoice,
    *,
    offline: bool,
) -> int:
    """``lexshard edge`` with the draft model of ``config``; see `EdgeClient`. Returns the exit code
    when it has been told to stop. Call it in the main thread."""
    log_to(sys.stderr, config.log_format)
    stop = StopRequest()
    stop.listen()
    _say(config, f"loading the draft model {config.model}")
    model = load_model(config.model, head)
    warm_up(model.drafter, settings, model.information.vocabulary_size)
    client = EdgeClient(cloud, key, model, settings, allowed_alone=offline)
    return uvloop.run(_serve(config, client, stop))


async def _serve(config: ServeConfig, client: EdgeClient, stop: StopRequest) -> int:
    stopped = asyncio.Event()
    app = create_app(config, client, client.model.tokenizer)
    state = app.state.server
    state.marks = lambda: {"offline": True} if client.offline else {}
    state.holds_grammars = False

    def changed() -> None:
        if client.failure is not None:
            print_lines(f"lexshard: {client.failure}", config.log_format, sys.stderr)
            stopped.set()
        elif client.away is not None:
            _say(config, client.away)
        else:
            state.config = _found(config, client)

    client.start(changed)
    http = HttpServer(http_config(app, host=config.host, port=config.port))
    http.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
    stop.then(partial(asyncio.get_running_loop().call_soon_threadsafe, stopped.set))
    serving = asyncio.create_task(http.serve())
    ending = asyncio.create_task(stopped.wait())
    await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    await client.stop(config.shutdown_grace_seconds)
    http.stop()
    await serving
    return 0 if stop.made else 1


def _found(config: ServeConfig, client: EdgeClient) -> ServeConfig:
    """One that answers under the server's names."""
    assert client.cloud is not None
    names = list(client.cloud.models)
    if client.cloud.chat_template != client.model.tokenizer.chat_template:
        _say(config, "the draft model's chat template is not the server's: chats read otherwise")
    mode, longest = client.settings.mode, client.settings.longest
    _say(config, f"drafts for {names[0]} at {client.url} ({mode}, {longest} at a time)")
    _say(config, f"ready at {base_url(config)}/v1")
    return ServeConfig(**{**config.model_dump(by_alias=True), "served_model_name": names})


def _say(config: ServeConfig, text: str) -> None:
    print_lines(f"lexshard: {text}", config.log_format)
