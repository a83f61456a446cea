"""One text at the device: drafts, sends, hears, and goes on where a lost connection left it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.protocol import State

from lexshard.actors.edge.chain import GuessChain
from lexshard.actors.edge.drafting import EdgeDrafter
from lexshard.actors.edge.frames import VERSION, FrameCodec, FrameError, GuessBatch
from lexshard.actors.edge.pace import DraftPace, Pace
from lexshard.actors.edge.verifying import MOST_UNANSWERED
from lexshard.actors.messages import Request, SequenceEvent
from lexshard.serve_app.edge import wire
from lexshard.serve_app.edge.statistics import EdgeCounters
from lexshard.serve_app.edge.wire import Opened, Opening, Refused, Resumed, Resuming, Told

logger = logging.getLogger("lexshard.edge")

MOST_GOING = 8  # batches on their way
PATIENCE_SECONDS = 30.0  # for a server that is away
RETRY_SECONDS = (0.0, 0.1, 0.3, 1.0)  # before each attempt to come back; then the last
PROBE_GUESSES, PROBE_EVERY = 4, 32  # while the target goes on alone
MOST_IDLE = 4  # connections that are kept for the next text
OPEN_SECONDS = 10.0


@dataclass(slots=True)
class CloudLink:
    """Where sessions are held: the WebSocket's address, and the headers that go with it. A
    connection whose text has ended is kept for the next one."""

    url: str
    headers: dict[str, str]
    vocabulary: str
    _idle: list[ClientConnection] = field(default_factory=list)

    async def take(self) -> ClientConnection:
        """Raises what `websockets.connect` raises."""
        while self._idle:
            connection = self._idle.pop()
            if connection.state is State.OPEN:
                return connection
        return await connect(
            self.url,
            additional_headers=self.headers,
            compression=None,
            max_size=None,
            open_timeout=OPEN_SECONDS,
            user_agent_header=None,
        )

    async def give_back(self, connection: ClientConnection) -> None:
        if len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            await connection.close()

    async def close(self) -> None:
        for connection in self._idle:
            await connection.close()


class EdgeText:
    """``request``, as a session of ``link`` says it. Every event goes to ``emit``; `run` returns
    when the text has ended, and is cancelled where it is not wanted any more."""

    def __init__(
        self,
        request: Request,
        link: CloudLink,
        codec: FrameCodec,
        drafter: EdgeDrafter,
        pace: DraftPace,
        executor: Executor,
        counters: EdgeCounters,
        emit: Callable[[SequenceEvent], None],
    ) -> None:
        self._request = request
        self._link = link
        self._codec = codec
        self._drafter = drafter
        self._pace = pace
        self._executor = executor
        self._counters = counters
        self._emit = emit
        self._chain = GuessChain(request.prompt_ids)
        self._prompt_length = len(request.prompt_ids)
        self._session: str | None = None
        self._timed: tuple[int, float] | None = None  # bits of a batch, when it was sent
        self._heard_at = 0.0
        self._runs_to = 0  # length of the text up to which the target goes on alone
        self._probe: tuple[int, tuple[int, ...]] = (0, ())  # guesses that were not sent, from where
        self._unsent: GuessBatch | None = None
        self._comes_back = False  # and has not heard yet what it missed
        self._ended = False
        self._reusable = False  # its connection

    async def run(self) -> None:
        away: float | None = None
        attempt = 0
        try:
            while not self._ended:
                heard = len(self._chain.said)
                try:
                    asked = time.monotonic()
                    connection = await self._link.take()
                    self._pace.connected(time.monotonic() - asked)
                    try:
                        await self._talk(connection)
                    finally:
                        if self._reusable:
                            await self._link.give_back(connection)
                        else:
                            await connection.close()
                except InvalidStatus as error:
                    if error.response.status_code < 500:
                        self._fail(f"the server refuses the link: {error}", refused=True)
                        return
                except (OSError, TimeoutError, ConnectionClosed, InvalidHandshake) as error:
                    logger.info("the link is lost: %s", error or type(error).__name__)
                except FrameError as error:
                    logger.error("the server says what cannot be: %s", error)
                    self._fail(str(error))
                    return
                if self._ended:
                    return
                now = time.monotonic()
                if len(self._chain.said) > heard or away is None:
                    away, attempt = now, 0
                elif now - away > PATIENCE_SECONDS:
                    self._fail("the server is away", reason="abort")
                    return
                self._counters.lost_links += 1
                await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
                attempt += 1
        except Exception:
            logger.exception("id=%s: the text fails", self._request.request_id)
            self._fail("internal error of the device; its log has it")
        finally:
            self._drafter.close()
            self._counters.ended(self._drafter.threshold)

    async def _talk(self, connection: ClientConnection) -> None:
        """Over one connection, until it or the text ends. Raises what ends it."""
        self._timed, self._heard_at = None, 0.0
        inbox: deque[bytes] = deque()
        news = asyncio.Event()

        async def read() -> None:
            try:
                async for message in connection:
                    if isinstance(message, bytes):
                        inbox.append(message)
                        news.set()
            finally:
                news.set()

        await self._send(connection, self._beginning())
        reading = asyncio.get_running_loop().create_task(read())
        try:
            while not self._ended:
                news.clear()
                while inbox and not self._ended:
                    self._hear(inbox.popleft())
                if self._ended:
                    self._reusable = True
                    return
                if reading.done():
                    if connection.close_code == wire.UNKNOWN_SESSION:
                        self._session = None  # begins anew, with the text as far as it is here
                    reading.result()
                    return
                if self._comes_back:
                    await news.wait()
                elif self._unsent is not None:
                    batch = self._chain.send(self._unsent)
                    self._unsent = None
                    await self._send_guesses(connection, batch)
                elif (wanted := self._wanted()) is not None:
                    self._unsent = await self._drafted(wanted)
                else:
                    await news.wait()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _beginning(self) -> bytes:
        self._comes_back = self._session is not None
        if self._session is not None:
            resuming = Resuming(self._session, len(self._chain.said))
            return wire.encode_beginning(resuming)
        self._chain.restarted()
        self._runs_to, self._unsent = 0, None
        self._settle()
        request, codec = self._request, self._codec
        said = self._chain.said[self._prompt_length :]
        opening = Opening(
            version=VERSION,
            mode=codec.mode,
            vocabulary=self._link.vocabulary,
            prompt=wire.pack_ids(request.prompt_ids, codec.token_bits),
            parameters=wire.completion_fields(request.parameters, request.priority),
            bad_words=request.parameters.bad_words,
            choice=request.choice,
            said=wire.pack_ids(said, codec.token_bits),
            resolution=codec.resolution,
            size=codec.size,
        )
        return wire.encode_beginning(opening)

    def _wanted(self) -> Pace | None:
        """What to send next; None: wait."""
        chain, pace = self._chain, self._pace
        guessed = len(chain.history) - len(chain.said)
        said = len(chain.said) - self._prompt_length
        room = max(0, self._request.parameters.max_tokens - said - guessed - 1)
        if not chain.going:
            left = self._runs_to - len(chain.said)
            wanted = pace.next()
            if left > pace.lead or (left > 0 and wanted.guesses):
                return None
            return Pace(min(wanted.guesses, room, self._most), min(wanted.alone, room))
        full = chain.going >= MOST_GOING or chain.unanswered >= MOST_UNANSWERED - 1
        if full or chain.alone or not guessed:
            return None
        count = min(pace.ahead(guessed), room, self._most)
        return Pace(count) if count else None

    @property
    def _most(self) -> int:
        most = self._request.drafting.most
        return 255 if most is None else most

    async def _drafted(self, wanted: Pace) -> GuessBatch:
        """A batch behind all there is."""
        started = time.monotonic()
        history, count = self._chain.history, wanted.guesses
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._executor)
        if not count:
            if wanted.alone and len(history) >= self._probe[0] + PROBE_EVERY:
                probed = await in_thread(self._drafter.probe, history, PROBE_GUESSES)
                self._probe = len(history), probed
            return GuessBatch(0, len(history), (), alone=wanted.alone)
        batch = await in_thread(self._drafter.draft, history, count)
        guesses, seconds = len(batch.token_ids), time.monotonic() - started
        bits = self._bits(batch)
        self._counters.drafted(guesses, bits, seconds)
        if guesses:
            self._pace.drafted(guesses, seconds, bits)
        return replace(batch, alone=wanted.alone)

    def _bits(self, batch: GuessBatch) -> int:
        """Of its guesses."""
        told = batch.lattices or (None,) * len(batch.token_ids)
        return sum(map(self._codec.guess_bits, told))

    async def _send_guesses(self, connection: ClientConnection, batch: GuessBatch) -> None:
        started = time.monotonic()
        content = self._codec.encode(batch)
        self._counters.encode_seconds += time.monotonic() - started
        waits = len(self._chain.said) > max(self._prompt_length, self._runs_to - 1)
        if self._chain.unanswered == 1 and waits:
            self._timed = (8 * len(content), time.monotonic())
        await self._send(connection, content)

    async def _send(self, connection: ClientConnection, content: bytes) -> None:
        self._counters.uplink_bits += 8 * len(content)
        await connection.send(content)

    def _hear(self, content: bytes) -> None:
        """Raises `FrameError` for what cannot be."""
        self._counters.downlink_bits += 8 * len(content)
        if wire.is_frame(content):
            guessed, before = self._guessed(), self._chain.answered
            new, answered = self._chain.heard(self._codec.decode_verdict(content))
            self._learn(guessed, new, answered != before)
            event = SequenceEvent(self._request.request_id, self._request.choice, new)
            self._emit(event)
            return
        match wire.decode_reply(content):
            case Opened(session):
                self._session = session
            case Told() as told:
                self._take(told)
            case Resumed() as resumed:
                for told in resumed.events:
                    self._heard_at = 0.0  # they come at once, which says nothing of their drawing
                    self._take(told)
                self._chain.resumed(resumed.last, resumed.unanswered)
                self._comes_back = False
                self._settle()
            case Refused() as refused:
                message = str(refused.error.get("message"))
                if refused.status >= 500 or refused.status == 429:
                    self._fail(message, reason="abort")
                else:
                    self._fail(message, refused=True)

    def _take(self, told: Told) -> None:
        guessed = self._guessed()
        self._chain.told(told.token_ids, told.answers)
        self._learn(guessed, told.token_ids, told.answers is not None)
        self._emit(wire.event_of(told, self._request.request_id, self._request.choice))
        self._ended = told.finish_reason is not None

    def _guessed(self) -> Sequence[int]:
        """What was guessed to follow, sent or not."""
        position, guesses = self._probe
        if position == len(self._chain.said) and not self._chain.going:
            return guesses
        return self._chain.history[len(self._chain.said) :]

    def _learn(self, guessed: Sequence[int], new: tuple[int, ...], answers: bool) -> None:
        """What the text's going on with ``new`` says of what was guessed, and of the time."""
        pairs = list(zip(guessed, new, strict=False))
        stood = 0
        for guess, token in pairs:
            if guess != token:
                break
            stood += 1
        tested = min(len(pairs), stood + 1)
        if tested:
            self._pace.heard(tested, stood)
        self._counters.heard(len(new), tested, stood)
        now = time.monotonic()
        if answers:
            self._runs_to = len(self._chain.said) + self._chain.granted
            if self._timed is not None:
                self._pace.travelled(self._timed[0], now - self._timed[1])
        elif len(new) == 1 and self._heard_at:
            self._pace.drew(now - self._heard_at)
        self._timed, self._heard_at = None, now
        self._settle()

    def _settle(self) -> None:
        """What was drafted on guesses that turned out wrong is forgotten."""
        if self._unsent is not None and not self._chain.goes_on(self._unsent):
            self._unsent = None
        goes_on = bool(self._chain.going) or self._unsent is not None
        self._drafter.heard(len(self._chain.said), goes_on=goes_on)
        threshold = self._drafter.threshold
        if threshold is not None and threshold.average > threshold.bound + 1e-9:
            self._counters.bounds_broken += 1
            logger.error("dropped %.4f, bound %.4f", threshold.average, threshold.bound)

    def _fail(self, message: str, *, refused: bool = False, reason: str = "error") -> None:
        self._ended = True
        self._emit(
            SequenceEvent(
                self._request.request_id,
                self._request.choice,
                (),
                finish_reason="abort" if reason == "abort" else "error",
                error=message,
                refused=refused,
            )
        )
