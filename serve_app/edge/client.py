"""What stands behind the application of a device in the place of an engine: a draft model here, and
a server that verifies elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.edge.drafting import EdgeDrafter
from lexshard.actors.edge.pace import DraftPace
from lexshard.actors.edge.settings import EdgeSettings
from lexshard.actors.faults import LoggedFault
from lexshard.actors.messages import Drafts, Request, SequenceEvent
from lexshard.actors.role import RunningRole, here
from lexshard.cluster.engine.journal import JournalStream
from lexshard.cluster.engine.supervisor import until
from lexshard.serve_app.edge.alone import say_alone
from lexshard.serve_app.edge.device import EdgeText, failure
from lexshard.serve_app.edge.link import CloudError, CloudLink
from lexshard.serve_app.edge.model import EdgeModel
from lexshard.serve_app.edge.statistics import EdgeStatistics
from lexshard.serve_app.edge.wire import Cloud

logger = logging.getLogger("lexshard.edge")

LOOK_SECONDS = 2.0  # for a server that is away


class EdgeClient:
    """See `serve_app.engine_client.EngineClient`. Lives in one event loop.

    ``model`` is called in a thread of its own; the server at ``url``, which is asked with ``key``,
    must have its tokens. While that server is ``away``, for the reason given there, the model says
    texts alone where that is ``allowed_alone``; else nothing is said. ``changed`` hears of it when
    the server is found, is away, or never will do.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        model: EdgeModel,
        settings: EdgeSettings,
        *,
        allowed_alone: bool = False,
        changed: Callable[[EdgeClient], None] = lambda _: None,
    ) -> None:
        self.failure: str | None = None
        self.restarts = 0
        self.away: str | None = f"looking for {url}"
        self.cloud: Cloud | None = None
        pace = DraftPace(longest=settings.longest, thrift=settings.thrift)
        self._link = CloudLink(url, key, model.tokenizer.vocabulary_hash, pace)
        self._model = model
        self._settings = settings
        self._allowed_alone = allowed_alone
        self._changed = changed
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="draft")
        self._texts: dict[str, asyncio.Task[None]] = {}
        self._sequences = 0
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Looks for the server; call once, inside the event loop."""
        self._changed(self)
        self._looking = asyncio.get_running_loop().create_task(self._look())

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
        """What the server's engine decided. Raises RuntimeError before it was found."""
        if self.offline:
            return self._model.information
        if self.cloud is None:
            raise RuntimeError(f"no server yet: {self.away}")
        return self.cloud.engine

    @property
    def statistics(self) -> EdgeStatistics:
        return self._link.counters.statistics()

    async def roles(self) -> Sequence[RunningRole]:
        settings = self._settings
        words = f"{settings.mode}, up to {settings.longest} tokens a batch"
        return [RunningRole("drafter", 0, here(), "cpu", f"{words}, verified at {self._link.url}")]

    async def faults(self) -> Sequence[LoggedFault]:
        return []

    def submit(self, requests: Sequence[Request]) -> JournalStream:
        stream = JournalStream([request.request_id for request in requests], self._close)
        for request in requests:
            emit = partial(self._emit, stream)
            if not self.ready:
                emit(failure(request, self.away or "no server", "abort"))
                continue
            loop, information = asyncio.get_running_loop(), self.information
            self._sequences += 1
            drafter = EdgeDrafter(
                self._model.drafter,
                self._settings,
                request,
                self._sequences,
                information.vocabulary_size,
            )
            in_thread = partial(loop.run_in_executor, self._executor)
            if self.offline:
                saying = say_alone(request, drafter, information.eos_token_ids, in_thread, emit)
            else:
                saying = EdgeText(request, self._link, drafter, in_thread, emit).run()
            task = self._texts[request.request_id] = loop.create_task(saying)
            task.add_done_callback(partial(self._over, request.request_id))
        return stream

    def cancel(self, request_id: str) -> None:
        task = self._texts.get(request_id)
        if task is not None:
            task.cancel()

    def draft(self, drafts: Drafts) -> None:
        """No other device drafts for this one."""

    async def stop(self, grace_seconds: float = 0.0) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self.away, self._allowed_alone = "the device is shutting down", False
        await until(lambda: not self._texts, grace_seconds)
        texts = list(self._texts.values())
        for task in texts:
            task.cancel()
        await asyncio.gather(*texts, return_exceptions=True)
        await self._link.close()
        self._executor.shutdown()

    def _emit(self, stream: JournalStream, event: SequenceEvent) -> None:
        stream.put(event)
        if event.finish_reason == "abort" and self.away is None:
            self.away = event.error
            self.start()

    def _over(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._texts.pop(request_id, None)
        if not task.cancelled() and task.exception() is not None:
            logger.error("id=%s: the text fails", request_id, exc_info=task.exception())

    def _close(self, stream: JournalStream) -> None:
        for request_id in stream.request_ids:
            self.cancel(request_id)

    async def _look(self) -> None:
        """Until the server is there, or never will do."""
        while self.away is not None:
            before = self.away
            try:
                cloud = await asyncio.to_thread(self._link.ask)
                self.restarts += self.cloud is not None
                self.cloud, self.away = cloud, None
            except CloudError as error:
                self.away = str(error)
                self.failure = self.away if error.final else None
            if self.away != before:
                self._changed(self)
            if self.failure is not None:
                return
            if self.away is not None:
                await asyncio.sleep(LOOK_SECONDS)
