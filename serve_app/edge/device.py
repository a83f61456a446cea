"""One text at the device: drafts, sends, hears, and goes on where a lost connection left it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from lexshard.actors.edge.chain import GuessChain
from lexshard.actors.edge.drafting import EdgeDrafter
from lexshard.actors.edge.frames import VERSION, FrameCodec, FrameError, GuessBatch
from lexshard.actors.edge.pace import DraftPace
from lexshard.actors.edge.verifying import MOST_UNANSWERED
from lexshard.actors.messages import Request, SequenceEvent
from lexshard.serve_app.edge import wire
from lexshard.serve_app.edge.statistics import EdgeCounters
from lexshard.serve_app.edge.wire import Opened, Opening, Refused, Resumed, Resuming, Told

logger = logging.getLogger("lexshard.edge")

MOST_GOING = 8  # batches on their way
PATIENCE_SECONDS = 30.0  # for a server that is away
RETRY_SECONDS = (0.0, 0.1, 0.3, 1.0)  # before each attempt to come back; then the last
READING_CALLS = 1000  # of the draft model, that reads a long prompt in pieces
OPEN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CloudLink:
    """Where sessions are held: the WebSocket's address, and the headers that go with it."""

    url: str
    headers: dict[str, str]
    vocabulary: str

    def connect(self) -> connect:
        return connect(
            self.url,
            additional_headers=self.headers,
            compression=None,
            max_size=None,
            open_timeout=OPEN_SECONDS,
            user_agent_header=None,
        )


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
        self._timed: tuple[int, int, float] | None = None  # batch, its bits, when it was sent
        self._unsent: GuessBatch | None = None
        self._comes_back = False  # and has not heard yet what it missed
        self._ended = False

    async def run(self) -> None:
        away: float | None = None
        attempt = 0
        try:
            while not self._ended:
                heard = len(self._chain.said)
                try:
                    async with self._link.connect() as connection:
                        await self._talk(connection)
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
        self._timed = None
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
                    await connection.close()
                    return
                if reading.done():
                    reading.result()
                    if connection.close_code == wire.UNKNOWN_SESSION:
                        self._session = None  # begins anew, with the text as far as it is here
                        self._chain.restarted()
                    return
                if self._comes_back:
                    await news.wait()
                elif self._unsent is not None:
                    batch = self._chain.send(self._unsent)
                    self._unsent = None
                    await self._send_guesses(connection, batch)
                elif (count := self._wanted()) is not None:
                    self._unsent = await self._drafted(count)
                else:
                    await news.wait()
        finally:
            reading.cancel()

    def _beginning(self) -> bytes:
        self._comes_back = self._session is not None
        if self._session is not None:
            resuming = Resuming(self._session, len(self._chain.said))
            return wire.encode_beginning(resuming)
        request, codec = self._request, self._codec
        said = self._chain.said[self._prompt_length :]
        opening = Opening(
            version=VERSION,
            mode=codec.mode,
            vocabulary=self._link.vocabulary,
            prompt=wire.pack_ids(request.prompt_ids, codec.token_bits),
            parameters=wire.completion_fields(request.parameters),
            bad_words=request.parameters.bad_words,
            choice=request.choice,
            said=wire.pack_ids(said, codec.token_bits),
            resolution=codec.resolution,
            size=codec.size,
        )
        return wire.encode_beginning(opening)

    def _wanted(self) -> int | None:
        """How many guesses to draft now, 0: to ask for a token; None: to wait."""
        chain, pace = self._chain, self._pace
        ahead = len(chain.history) - self._prompt_length  # output, guesses with it
        room = self._request.parameters.max_tokens - ahead - 1
        if not chain.going:
            return max(0, min(pace.length(), room, self._most))
        if chain.going >= MOST_GOING or chain.unanswered >= MOST_UNANSWERED - 1:
            return None
        guessed = len(chain.history) - len(chain.said)
        return min(pace.ahead(guessed), room, self._most) if room > 0 and guessed else None

    @property
    def _most(self) -> int:
        most = self._request.drafting.most
        return 255 if most is None else most

    async def _drafted(self, count: int) -> GuessBatch:
        """A batch of so many guesses at most behind all there is."""
        started = time.monotonic()
        history = self._chain.history
        if count:
            loop = asyncio.get_running_loop()
            batch = await loop.run_in_executor(self._executor, self._drafter.draft, history, count)
        else:
            batch = GuessBatch(0, len(history), ())
        guesses, seconds = len(batch.token_ids), time.monotonic() - started
        self._counters.drafted(guesses, seconds)
        if guesses:
            self._pace.drafted(guesses, seconds, self._bits(batch))
        return batch

    def _bits(self, batch: GuessBatch) -> int:
        """Of its guesses."""
        told = batch.lattices or (None,) * len(batch.token_ids)
        return sum(map(self._codec.guess_bits, told))

    async def _send_guesses(self, connection: ClientConnection, batch: GuessBatch) -> None:
        started = time.monotonic()
        content = self._codec.encode(batch)
        self._counters.encode_seconds += time.monotonic() - started
        if self._chain.unanswered == 1 and len(self._chain.said) > self._prompt_length:
            self._timed = (batch.number, 8 * len(content), time.monotonic())
        await self._send(connection, content)

    async def _send(self, connection: ClientConnection, content: bytes) -> None:
        self._counters.uplink_bits += 8 * len(content)
        await connection.send(content)

    def _hear(self, content: bytes) -> None:
        """Raises `FrameError` for what cannot be."""
        self._counters.downlink_bits += 8 * len(content)
        if wire.is_verdict(content):
            guessed = self._guessed()
            new, answered = self._chain.heard(self._codec.decode_verdict(content))
            self._learn(guessed, new, answered)
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
        self._learn(guessed, told.token_ids, told.answers)
        self._emit(wire.event_of(told, self._request.request_id, self._request.choice))
        self._ended = told.finish_reason is not None

    def _guessed(self) -> list[int]:
        return self._chain.history[len(self._chain.said) :]

    def _learn(self, guessed: list[int], new: tuple[int, ...], answered: int | None) -> None:
        """What the text's going on with ``new`` says of what was guessed."""
        pairs = list(zip(guessed, new, strict=False))
        stood = 0
        for guess, token in pairs:
            if guess != token:
                break
            stood += 1
        tested = min(len(pairs), stood + 1)
        if tested:
            self._pace.heard(tested, stood)
        self._counters.heard(len(new), stood)
        if self._timed is not None and answered == self._timed[0]:
            _, bits, sent = self._timed
            self._pace.travelled(bits, time.monotonic() - sent)
            self._timed = None
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
