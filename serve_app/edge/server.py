"""The device's server: the application of every other one, in one process, on a link."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import uvloop

from lexshard.actors.configuration import DraftHeadChoice
from lexshard.actors.edge.drafting import warm_up
from lexshard.actors.edge.settings import EdgeSettings
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.api_processes.api_process import HttpServer, http_config
from lexshard.serve_app.app import create_app
from lexshard.serve_app.edge.client import EdgeClient
from lexshard.serve_app.edge.model import EdgeModel, load_model
from lexshard.serve_app.edge.wire import Cloud
from lexshard.serve_app.observability.logs import log_to, print_lines
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.start.banner import base_url
from lexshard.serve_app.start.stopping import StopRequest


class _HttpServer(HttpServer):
    """One that leaves signals to the process."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class EdgeServer:
    """One run of ``lexshard edge`` with the draft model of ``config``; see `EdgeClient`."""

    def __init__(
        self,
        config: ServeConfig,
        settings: EdgeSettings,
        cloud: str,
        key: str | None,
        head: DraftHeadChoice,
        *,
        offline: bool,
    ) -> None:
        self._config = config
        self._settings = settings
        self._cloud = cloud
        self._key = key
        self._head = head
        self._offline = offline

    def serve(self) -> int:
        """Returns the exit code when it has been told to stop. Call it in the main thread."""
        log_to(sys.stderr, self._config.log_format)
        stop = StopRequest()
        stop.listen()
        self._say(f"loading the draft model {self._config.model}")
        model = load_model(self._config.model, self._head)
        warm_up(model.drafter, self._settings, model.information.vocabulary_size)
        return uvloop.run(self._serve(model, stop))

    async def _serve(self, model: EdgeModel, stop: StopRequest) -> int:
        config, stopped = self._config, asyncio.Event()

        def changed(client: EdgeClient) -> None:
            if client.failure is not None:
                print_lines(f"lexshard: {client.failure}", config.log_format, sys.stderr)
                stopped.set()
            elif client.away is not None:
                self._say(client.away)
            elif client.cloud is not None:
                app.state.server.config = self._found(client.cloud, model.tokenizer)

        client = EdgeClient(
            self._cloud,
            self._key,
            model,
            self._settings,
            allowed_alone=self._offline,
            changed=changed,
        )
        app = create_app(config, client, model.tokenizer)
        app.state.server.marks = lambda: {"offline": True} if client.offline else {}
        app.state.server.holds_grammars = False
        client.start()
        http = _HttpServer(http_config(app, host=config.host, port=config.port))
        stop.then(partial(asyncio.get_running_loop().call_soon_threadsafe, stopped.set))
        serving = asyncio.create_task(http.serve())
        ending = asyncio.create_task(stopped.wait())
        await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        await client.stop(config.shutdown_grace_seconds)
        http.stop()
        await serving
        return 0 if stop.made else 1

    def _found(self, cloud: Cloud, tokenizer: ModelTokenizer) -> ServeConfig:
        """Answers under the server's names from now on."""
        if cloud.chat_template != tokenizer.chat_template:
            self._say("the draft model's chat template is not the server's: chats read otherwise")
        mode, longest = self._settings.mode, self._settings.longest
        self._say(f"drafts for {cloud.models[0]} at {self._cloud} ({mode}, {longest} at a time)")
        self._say(f"ready at {base_url(self._config)}/v1")
        return ServeConfig(
            **{**self._config.model_dump(by_alias=True), "served_model_name": list(cloud.models)}
        )

    def _say(self, text: str) -> None:
        print_lines(f"lexshard: {text}", self._config.log_format)
