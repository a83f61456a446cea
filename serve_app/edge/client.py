"""What stands behind the application of a device in the place of an engine: a draft model here, and
a server that verifies elsewhere."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from lexshard.actors.configuration import EngineInformation
from lexshard.actors.drafter.protocol import GuessingModel
from lexshard.actors.edge.drafting import EdgeDrafter
from lexshard.actors.edge.frames import VERSION, EdgeMode, FrameCodec
from lexshard.actors.edge.pace import DraftPace
from lexshard.actors.edge.threshold import ConformalThreshold
from lexshard.actors.faults import LoggedFault
from lexshard.actors.messages import Drafts, Request, SamplingParameters, SequenceEvent
from lexshard.actors.role import RunningRole, here
from lexshard.actors.states.sequence_state import SequenceState
from lexshard.cluster.engine.journal import JournalStream
from lexshard.cluster.engine.supervisor import until
from lexshard.serve_app.edge import wire
from lexshard.serve_app.edge.alone import LoneDrafter
from lexshard.serve_app.edge.device import CloudLink, EdgeText
from lexshard.serve_app.edge.statistics import EdgeCounters, EdgeStatistics

logger = logging.getLogger("lexshard.edge")

LOOK_SECONDS = 2.0  # for a server that is away


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """How a device drafts; ``alpha``, ``eta`` and ``first_threshold`` are mode ``csqs``'s, ``size``
    is ``ksqs``'s. See `actors.edge`."""

    mode: EdgeMode = "same-token"
    size: int = 32
    resolution: int = 100
    budget_bits: int = 5_000
    longest: int = 16
    thrift: float = 0.1
    alpha: float = 0.05
    eta: float = 0.01
    first_threshold: float = 0.01

    def threshold(self) -> ConformalThreshold | None:
        """One for a text; raises ValueError for values that bound nothing."""
        if self.mode != "csqs":
            return None
        return ConformalThreshold(self.alpha, self.eta, self.first_threshold)


@dataclass(frozen=True, slots=True)
class Cloud:
    """What a server says of itself to devices."""

    models: tuple[str, ...]
    vocabulary: str
    chat_template: str | None
    information: EngineInformation


class CloudError(Exception):
    """The server is away (``final`` False), or never will do."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


def ask_cloud(url: str, headers: dict[str, str], timeout: float = 10.0) -> Cloud:
    """Raises `CloudError`."""
    request = urllib.request.Request(url.rstrip("/") + wire.PATH, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            told: dict[str, Any] = json.load(reply)
        if told["version"] != VERSION:
            raise CloudError(f"{url} speaks version {told['version']}, not {VERSION}", final=True)
        return Cloud(
            tuple(told["models"]),
            told["vocabulary"],
            told["chat_template"],
            msgspec.convert(told["engine"], EngineInformation),
        )
    except urllib.error.HTTPError as error:
        final = error.code in (401, 403, 404)
        raise CloudError(f"{url} answers {error.code}: {_message(error)}", final=final) from None
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise CloudError(f"{url} does not answer as lexshard does: {error}", final=False) from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


class EdgeClient:
    """See `serve_app.engine_client.EngineClient`. Lives in one event loop.

    ``drafter`` is called in a thread of ``executor``, which has one; the server at ``url`` must
    have the tokens of its ``vocabulary`` (`wire.vocabulary_hash`). ``found`` hears of the server.
    Without ``alone`` nothing is said while it is away; with it, what the draft model says alone.
    """

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        drafter: GuessingModel,
        vocabulary: str,
        settings: EdgeSettings,
        executor: Executor,
        found: Callable[[Cloud], None] = lambda _: None,
        alone: LoneDrafter | None = None,
    ) -> None:
        self.failure: str | None = None
        self.restarts = 0
        self._away: str | None = f"looking for {url}"
        self._url = url
        self._headers = headers
        self._drafter = drafter
        self._vocabulary = vocabulary
        self._settings = settings
        self._found = found
        self._alone = alone
        self._cloud: Cloud | None = None
        address = "ws" + url.rstrip("/").removeprefix("http") + wire.PATH
        self._link = CloudLink(address, headers, vocabulary)
        self.pace = DraftPace(longest=settings.longest, thrift=settings.thrift)
        self.counters = EdgeCounters()
        self._executor = executor
        self._texts: dict[str, asyncio.Task[None]] = {}
        self._sequences = 0
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Looks for the server; call once, inside the event loop."""
        self._looking = asyncio.get_running_loop().create_task(self._look())

    @property
    def ready(self) -> bool:
        return self.health_reason is None

    @property
    def health_reason(self) -> str | None:
        return None if self.offline else self._away

    @property
    def away(self) -> str | None:
        """Why the server is not there; None where it is."""
        return self._away

    @property
    def offline(self) -> bool:
        """Whether the draft model answers alone."""
        return self._alone is not None and self._away is not None

    @property
    def information(self) -> EngineInformation:
        """What the server's engine decided. Raises RuntimeError before it was found."""
        if self._alone is not None and (self._cloud is None or self.offline):
            return self._alone.information
        if self._cloud is None:
            raise RuntimeError(f"no server yet: {self._away}")
        return self._cloud.information

    @property
    def statistics(self) -> EdgeStatistics:
        return self.counters.statistics()

    async def roles(self) -> Sequence[RunningRole]:
        settings = self._settings
        words = f"{settings.mode}, up to {settings.longest} tokens a batch"
        return [RunningRole("drafter", 0, here(), "cpu", f"{words}, verified at {self._url}")]

    async def faults(self) -> Sequence[LoggedFault]:
        return []

    def submit(self, requests: Sequence[Request]) -> JournalStream:
        stream = JournalStream([request.request_id for request in requests], self._close)
        for request in requests:
            emit = partial(self._emit, stream)
            if self._alone is not None and self.offline:
                saying = self._alone.say(request, emit)
            elif self._away is not None or self._cloud is None:
                emit(_away(request, self._away or "no server"))
                continue
            else:
                saying = self._text(request, self._cloud, emit).run()
            task = asyncio.get_running_loop().create_task(saying)
            self._texts[request.request_id] = task
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
        self._away, self._alone = "the device is shutting down", None
        await until(lambda: not self._texts, grace_seconds)
        texts = list(self._texts.values())
        for task in texts:
            task.cancel()
        await asyncio.gather(*texts, return_exceptions=True)
        await self._link.close()

    def _text(
        self,
        request: Request,
        cloud: Cloud,
        emit: Callable[[SequenceEvent], None],
    ) -> EdgeText:
        settings, information = self._settings, cloud.information
        self._sequences += 1
        codec = FrameCodec(
            settings.mode, information.vocabulary_size, settings.resolution, settings.size
        )
        state = SequenceState(request, information.vocabulary_size, information.eos_token_ids)
        drafting = EdgeDrafter(
            self._drafter,
            codec,
            state,
            self._sequences,
            budget_bits=settings.budget_bits,
            longest=settings.longest,
            threshold=settings.threshold(),
        )
        return EdgeText(
            request, self._link, codec, drafting, self.pace, self._executor, self.counters, emit
        )

    def _emit(self, stream: JournalStream, event: SequenceEvent) -> None:
        stream.put(event)
        if event.finish_reason == "abort" and self._away is None:
            self._away = event.error
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
        while True:
            try:
                cloud = await asyncio.to_thread(ask_cloud, self._url, self._headers)
                if cloud.vocabulary != self._vocabulary:
                    raise CloudError(
                        f"the draft model's tokenizer is not that of {', '.join(cloud.models)}, "
                        f"which {self._url} serves: use a draft model that was made for it",
                        final=True,
                    )
            except CloudError as error:
                self._away = str(error)
                if error.final:
                    self.failure = self._away
                    return
                await asyncio.sleep(LOOK_SECONDS)
                continue
            self.restarts += self._cloud is not None
            self._cloud = cloud
            self._found(cloud)
            self._away = self._looking = None
            return


def warm_up(drafter: GuessingModel, settings: EdgeSettings, vocabulary_size: int) -> None:
    """Compiles what drafting in this mode takes: the first text is not to take it for its price."""
    codec = FrameCodec(settings.mode, vocabulary_size, settings.resolution, settings.size)
    request = Request("warm up", 0, (0, 1), SamplingParameters())
    state = SequenceState(request, vocabulary_size, ())
    drafting = EdgeDrafter(drafter, codec, state, 0, threshold=settings.threshold())
    codec.decode(codec.encode(drafting.draft([0, 1], 2)))
    drafting.close()


def _away(request: Request, reason: str) -> SequenceEvent:
    return SequenceEvent(
        request.request_id, request.choice, (), finish_reason="abort", error=reason
    )
