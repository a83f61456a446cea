"""The device's server: the application of every other one, in one process, on a link."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import uvicorn
import uvloop
from transformers.utils.logging import disable_progress_bar

from lexshard.actors.body.loading import LoadedModel
from lexshard.actors.configuration import DraftHeadChoice, EngineConfiguration, EngineInformation
from lexshard.actors.drafter.build import drafter_of
from lexshard.actors.drafter.loading import load_draft_model
from lexshard.actors.drafter.protocol import GuessingModel
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.api_processes.api_process import HttpServer
from lexshard.serve_app.app import create_app
from lexshard.serve_app.edge import wire
from lexshard.serve_app.edge.alone import LoneDrafter
from lexshard.serve_app.edge.client import Cloud, EdgeClient, EdgeSettings, warm_up
from lexshard.serve_app.observability.logs import log_to, print_lines
from lexshard.serve_app.openai.tokenization import ModelTokenizer
from lexshard.serve_app.start.banner import base_url
from lexshard.serve_app.start.stopping import StopRequest

LOOK_SECONDS = 0.25
TEXTS = 8  # of full length, that the draft model's cache holds at once
MOST_BLOCKS = 16_384


def load_drafter(
    folder: str, head: DraftHeadChoice = "auto"
) -> tuple[GuessingModel, EngineInformation]:
    """The draft model in ``folder``, and what it is by itself."""
    disable_progress_bar()
    configuration = EngineConfiguration(model=folder, draft=folder, draft_head=head)
    model = load_draft_model(folder, folder)
    blocks = _blocks(model)
    drafter = drafter_of(model, configuration, blocks=blocks, vocabulary_size=model.vocabulary_size)
    return drafter, EngineInformation(
        model=folder,
        dtype=model.dtype,
        device="cpu",
        body="draft model alone",
        head=head,
        batch_invariant=True,
        threads=1,
        max_model_len=model.max_positions,
        vocabulary_size=model.vocabulary_size,
        eos_token_ids=model.eos_token_ids,
        default_sampling=dict(model.default_sampling),
        kv_blocks=blocks,
        kv_tokens=blocks * BLOCK_TOKENS,
        kv_bytes=0,
        parameters=model.parameters,
        process_id=0,
    )


def _blocks(model: LoadedModel) -> int:
    return min(MOST_BLOCKS, -(-model.max_positions // BLOCK_TOKENS) * TEXTS)


class _HttpServer(HttpServer):
    """One that leaves signals to the process."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class EdgeServer:
    """One run of ``lexshard edge``; the arguments are its options."""

    def __init__(
        self,
        cloud: str,
        draft: str,
        settings: EdgeSettings,
        *,
        key: str | None = None,
        host: str = "127.0.0.1",
        port: int = 8100,
        offline: bool = False,
        draft_head: DraftHeadChoice = "auto",
        log_format: Literal["text", "json"] = "text",
    ) -> None:
        self._cloud = cloud
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._draft = draft
        self._settings = settings
        self._offline = offline
        self._draft_head: DraftHeadChoice = draft_head
        self._config = ServeConfig(model=draft, host=host, port=port, log_format=log_format)

    def serve(self) -> int:
        """Returns the exit code when it has been told to stop. Call it in the main thread."""
        log_to(sys.stderr, self._config.log_format)
        stop = StopRequest()
        stop.listen()
        self._say(f"loading the draft model {self._draft}")
        drafter, information = load_drafter(self._draft, self._draft_head)
        warm_up(drafter, self._settings, information.vocabulary_size)
        tokenizer = ModelTokenizer.load(self._draft)
        return uvloop.run(self._serve(stop.then, drafter, information, tokenizer))

    async def _serve(
        self,
        when_stopped: Callable[[Callable[[], None]], None],
        drafter: GuessingModel,
        information: EngineInformation,
        tokenizer: ModelTokenizer,
    ) -> int:
        loop, config = asyncio.get_running_loop(), self._config
        with ThreadPoolExecutor(1, thread_name_prefix="draft") as executor:
            client = EdgeClient(
                self._cloud,
                self._headers,
                drafter,
                wire.vocabulary_hash(tokenizer.vocabulary()),
                self._settings,
                executor,
                found=lambda cloud: self._found(cloud, tokenizer),
                alone=LoneDrafter(drafter, information, executor) if self._offline else None,
            )
            app = create_app(config, client, tokenizer)
            self._state = app.state.server
            self._state.marks = lambda: {"offline": True} if client.offline else {}
            self._state.holds_grammars = False
            client.start()
            http = _HttpServer(
                uvicorn.Config(
                    app,
                    loop="uvloop",
                    http="httptools",
                    host=config.host,
                    port=config.port,
                    server_header=False,
                    access_log=False,
                    log_config=None,
                    log_level="error",
                )
            )
            stopped = asyncio.Event()

            def stop() -> None:
                loop.call_soon_threadsafe(stopped.set)

            when_stopped(stop)
            serving = asyncio.create_task(http.serve())
            telling = asyncio.create_task(self._tell(client))
            ending = asyncio.create_task(stopped.wait())
            await asyncio.wait((serving, ending, telling), return_when=asyncio.FIRST_COMPLETED)
            code = 0 if stopped.is_set() else 1
            telling.cancel()
            ending.cancel()
            await client.stop(config.shutdown_grace_seconds)
            http.stop()
            await serving
            return code

    async def _tell(self, client: EdgeClient) -> None:
        """Says what is waited for, and ends where that will never be."""
        before: str | None = None
        while client.failure is None:
            if client.away != before:
                before = client.away
                if before is not None:
                    self._say(before)
            await asyncio.sleep(LOOK_SECONDS)
        print_lines(f"lexshard: {client.failure}", self._config.log_format, sys.stderr)

    def _found(self, cloud: Cloud, tokenizer: ModelTokenizer) -> None:
        """Answers under the server's names from now on."""
        settings = {**self._config.model_dump(by_alias=True)}
        self._state.config = ServeConfig(**{**settings, "served_model_name": list(cloud.models)})
        if cloud.chat_template != tokenizer.chat_template:
            self._say("the draft model's chat template is not the server's: chats read otherwise")
        mode, longest = self._settings.mode, self._settings.longest
        self._say(f"drafts for {cloud.models[0]} at {self._cloud} ({mode}, {longest} at a time)")
        self._say(f"ready at {base_url(self._config)}/v1")

    def _say(self, text: str) -> None:
        print_lines(f"lexshard: {text}", self._config.log_format)
