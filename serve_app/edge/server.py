"""``lexshard edge``: a server's application on a device, whose draft model a server verifies."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import fields
from functools import partial

import uvloop

from lexshard.actors.edge.drafting import EdgeSettings, warm_up
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.config_sources import CLOUD_KEY, ConfigError, ConfigSources
from lexshard.cluster.models.folders import model_folder
from lexshard.cluster.models.progress import tell
from lexshard.serve_app.api_processes.api_process import HttpServer, http_config
from lexshard.serve_app.app import create_app
from lexshard.serve_app.edge.client import EdgeClient, load_model
from lexshard.serve_app.observability.logs import log_to, print_lines
from lexshard.serve_app.start.banner import base_url
from lexshard.serve_app.start.stopping import StopRequest

REFUSALS = (ConfigError, ValueError, OSError)


def run(arguments: argparse.Namespace) -> int:
    """Answers until SIGINT or SIGTERM; the process's exit code."""
    # What bounds nothing is refused before anything is loaded.
    names = {field.name for field in fields(EdgeSettings)}
    settings = EdgeSettings(**{name: it for name, it in vars(arguments).items() if name in names})
    given = {name: getattr(arguments, name) for name in ("host", "port", "log_format")}
    # The page shows what a head did, and a device has none.
    flags = {**given, "model": arguments.draft, "playground": False}
    config = ConfigSources(flags=flags).config()
    config = config.model_copy(update={"model": str(model_folder(arguments.draft, tell))})
    log_to(sys.stderr, config.log_format)
    stop = StopRequest()
    stop.listen()
    print_lines(f"lexshard: loading the draft model {config.model}", config.log_format)
    model = load_model(config.model, arguments.draft_head)
    warm_up(model.drafter, settings, model.information.vocabulary_size)
    alone, key = arguments.offline == "draft", os.environ.get(CLOUD_KEY)
    client = EdgeClient(arguments.cloud, key, model, settings, allowed_alone=alone)
    return uvloop.run(_serve(config, client, stop))


async def _serve(config: ServeConfig, client: EdgeClient, stop: StopRequest) -> int:
    stopped = asyncio.Event()
    app = create_app(config, client, client.model.tokenizer)
    state = app.state.server
    state.marks = lambda: {"offline": True} if client.offline else {}
    state.holds_grammars = False

    def say(text: str) -> None:
        print_lines(f"lexshard: {text}", config.log_format)

    def changed() -> None:
        if client.failure is not None:
            print_lines(f"lexshard: {client.failure}", config.log_format, sys.stderr)
            stopped.set()
        elif client.away is not None:
            say(client.away)
        elif client.cloud is not None:
            # It answers under the server's names.
            names, own = client.cloud.models, client.settings
            told = config.model_dump(by_alias=True) | {"served_model_name": list(names)}
            state.config = ServeConfig(**told)
            if client.cloud.chat_template != client.model.tokenizer.chat_template:
                say("the draft model's chat template is not the server's: chats read otherwise")
            say(f"drafts for {names[0]} at {client.url} ({own.mode}, {own.longest} at a time)")
            say(f"ready at {base_url(config)}/v1")

    client.start(changed)
    http = HttpServer(http_config(app, host=config.host, port=config.port))
    stop.then(partial(asyncio.get_running_loop().call_soon_threadsafe, stopped.set))
    serving = asyncio.create_task(http.serve())
    serving.add_done_callback(lambda _: stopped.set())
    await stopped.wait()
    await client.stop(config.shutdown_grace_seconds)
    http.stop()
    await serving
    return 0 if stop.made else 1
