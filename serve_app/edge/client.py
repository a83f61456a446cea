"""A device's engine, for its application: a draft model here, and a server that verifies."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import msgspec
from transformers.utils.logging import disable_progress_bar
from websockets.exceptions import WebSocketException

from lexshard.actors.configuration import DraftHeadChoice, EngineConfiguration, EngineInformation
from lexshard.actors.drafter.build import drafter_of
from lexshard.actors.drafter.loading import load_draft_model
from lexshard.actors.drafter.protocol import Drafter
from lexshard.actors.edge.drafting import EdgeDrafter, EdgeSettings
from lexshard.actors.edge.frames import FrameError
from lexshard.actors.edge.pace import DraftPace
from lexshard.actors.engine.start.information import describe_model
from lexshard.actors.faults import LoggedFault
from lexshard.actors.kv_cache import BLOCK_TOKENS
from lexshard.actors.messages import Drafts, Request, SequenceEvent
from lexshard.actors.role import RunningRole, here
from lexshard.cluster.engine.journal import JournalStream
from lexshard.cluster.engine.supervisor import until
from lexshard.serve_app.edge.device import EdgeText, Emit, say_alone
from lexshard.serve_app.edge.link import CloudError, CloudLink, EdgeStatistics
from lexshard.serve_app.edge.wire import Cloud
from lexshard.serve_app.openai.tokenization import ModelTokenizer

logger = logging.getLogger("lexshard.edge")

LOOK_SECONDS = 2.0  # for a server that is away
TEXTS = 8  # of full length, that its cache holds at once
MOST_BLOCKS = 16_384


class EdgeModel(NamedTuple):
    """What drafts, what it reads, and what an engine of it alone would say of itself."""

    drafter: Drafter
    tokenizer: ModelTokenizer
    information: EngineInformation


def load_model(folder: str, head: DraftHeadChoice = "auto") -> EdgeModel:
    """The draft model in ``folder``. Raises what `load_draft_model` raises."""
    disable_progress_bar()
    configuration = EngineConfiguration(model=folder, draft=folder, draft_head=head)
    model = load_draft_model(folder, folder)
    size = model.vocabulary_size
    blocks = min(MOST_BLOCKS, -(-model.max_positions // BLOCK_TOKENS) * TEXTS)
    drafter = drafter_of(model, configuration, blocks=blocks, vocabulary_size=size)
    information = replace(describe_model(model, folder, head, blocks), body="draft model alone")
    return EdgeModel(drafter, ModelTokenizer.load(folder), information)


class EdgeClient:
    """See `serve_app.engine_client.EngineClient`. Lives in one event loop.

    ``model`` is called in a thread of its own; the server at ``url``, which is asked with ``key``,
    must have its tokens. While that server is ``away``, for the reason given there, the model says
    texts alone where that is ``allowed_alone``; else nothing is said.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        model: EdgeModel,
        settings: EdgeSettings,
        *,
        allowed_alone: bool = False,
    ) -> None:
        self.failure: str | None = None
        self.restarts = 0
        self.away: str | None = f"looking for {url}"
        self.cloud: Cloud | None = None
        self.url = url
        self.model = model
        self.settings = settings
        pace = DraftPace(longest=settings.longest, thrift=settings.thrift)
        self._link = CloudLink(url, key, model.tokenizer.vocabulary_hash, pace)
        self._allowed_alone = allowed_alone
        self._changed: Callable[[], None] = lambda: None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="draft")
        self._texts: dict[str, asyncio.Task[None]] = {}
        self._sequences = itertools.count()
        self._looking: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None

    def start(self, changed: Callable[[], None] = lambda: None) -> None:
        """Looks for the server. ``changed`` hears when it is found, away, or never will do."""
        self._changed = changed
        self._looking = asyncio.create_task(self._look())

    @property
    def ready(self) -> bool:
        return self.health_reason is None

    @property
    def health_reason(self) -> str | None:
        return None if self.offline else self.away

    @property
    def offline(self) -> bool:
        """Whether the draft model answers alone."""
        return self._allowed_alone and self.away is not None

    @property
    def information(self) -> EngineInformation:
        """What the server's engine decided, but that receipts are the server's own to write.
        Raises RuntimeError before it was found."""
        if self.offline:
            return self.model.information
        if self.cloud is None:
            raise RuntimeError(f"no server yet: {self.away}")
        return replace(self.cloud.engine, processor="")

    @property
    def statistics(self) -> EdgeStatistics:
        return self._link.statistics

    async def roles(self) -> Sequence[RunningRole]:
        batches = f"{self.settings.mode}, up to {self.settings.longest} tokens a batch"
        return [RunningRole("drafter", 0, here(), "cpu", f"{batches}, verified at {self.url}")]

    async def faults(self) -> Sequence[LoggedFault]:
        return []

    def submit(self, requests: Sequence[Request]) -> JournalStream:
        stream = JournalStream([request.request_id for request in requests], self._close)
        for request in requests:
            name = request.request_id
            if not self.ready:
                stream.put(SequenceEvent.failure(request, self.away or "no server", "abort"))
                continue
            self._texts[name] = asyncio.create_task(self._say(request, partial(self._emit, stream)))
            self._texts[name].add_done_callback(partial(self._texts.pop, name))
        return stream

    def cancel(self, request_id: str) -> None:
        if request_id in self._texts:
            self._texts[request_id].cancel()

    def draft(self, drafts: Drafts) -> None:
        """No other device drafts for this one."""

    async def stop(self, grace_seconds: float = 0.0) -> None:
        for task in (self._looking, self._asking):
            if task is not None:
                task.cancel()
        self.away, self._allowed_alone = "the device is shutting down", False
        await until(lambda: not self._texts, grace_seconds)
        for name in self._texts:
            self.cancel(name)
        await asyncio.gather(*self._texts.values(), return_exceptions=True)
        await self._link.close()
        self._executor.shutdown()

    def _emit(self, stream: JournalStream, event: SequenceEvent) -> None:
        stream.put(event)
        lost = event.finish_reason == "abort" and self.away is None
        if lost and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask_again())

    async def _ask_again(self) -> None:
        """A server that has refused a text, or lost one, may be full, or there for none."""
        try:
            await asyncio.to_thread(self._link.ask)
        except CloudError as error:
            self._lost(str(error))

    def _lost(self, reason: str) -> None:
        if self.away is None:
            self.away = reason
            self.start(self._changed)

    async def _say(self, request: Request, emit: Emit) -> None:
        """One text, to its end."""
        size, number = self.information.vocabulary_size, next(self._sequences)
        drafter = EdgeDrafter(self.model.drafter, self.settings, request, number, size)
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._executor)
        try:
            if self.offline:
                ends = self.model.information.eos_token_ids
                await say_alone(request, drafter, ends, in_thread, emit)
            else:
                await EdgeText(request, self._link, drafter, in_thread, emit).run()
        except asyncio.CancelledError:
            if self.away is not None:  # the device stops; else the client has gone
                emit(SequenceEvent.failure(request, self.away, "abort"))
            raise
        except CloudError as error:
            self._lost(str(error))
            emit(SequenceEvent.failure(request, str(error), "abort"))
        except (FrameError, msgspec.DecodeError) as error:
            logger.error("the server says what cannot be: %s", error)
            emit(SequenceEvent.failure(request, str(error)))
        except Exception:
            logger.exception("id=%s: the text fails", request.request_id)
            emit(SequenceEvent.failure(request, "internal error of the device; its log has it"))
        finally:
            in_thread(drafter.close)  # behind what it drafts, if it does
            told = drafter.threshold
            bound = told.bound * told.tokens
            self._link.count(finished=1, edge_dropped_mass=told.dropped, edge_dropped_bound=bound)

    def _close(self, stream: JournalStream) -> None:
        for request_id in stream.request_ids:
            self.cancel(request_id)

    async def _look(self) -> None:
        """Until the server is there, or never will do."""
        self._changed()
        while self.away is not None and self.failure is None:
            before = self.away
            try:
                cloud = await asyncio.to_thread(self._link.ask)
                with suppress(OSError, WebSocketException):  # of which the first text hears
                    async with self._link.connection():
                        pass
                self.restarts += self.cloud is not None
                self.cloud, self.away = cloud, None
            except CloudError as error:
                self.away = str(error)
                self.failure = self.away if error.final else None
            if self.away != before:
                self._changed()
            if self.away is not None:
                await asyncio.sleep(LOOK_SECONDS)
