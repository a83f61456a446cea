"""One text at the device: drafts, sends, hears, and goes on where a lost connection left it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from lexshard.actors.edge.drafting import EdgeDrafter
from lexshard.actors.edge.frames import VERSION, GuessBatch
from lexshard.actors.edge.ledger import MOST_UNANSWERED, GuessChain
from lexshard.actors.edge.pace import Pace
from lexshard.actors.messages import FinishReason, Request, SequenceEvent
from lexshard.serve_app.edge import wire
from lexshard.serve_app.edge.link import CloudLink
from lexshard.serve_app.edge.wire import Opened, Opening, Refused, Resuming, Told

logger = logging.getLogger("lexshard.edge")

MOST_GOING = 8  # batches on their way
PATIENCE_SECONDS = 30.0  # for a server that is away
RETRY_SECONDS = (0.0, 0.1, 0.3, 1.0)  # before each attempt to come back; then the last
PROBE_GUESSES, PROBE_EVERY = 4, 32  # while the target goes on alone
InThread = Callable[..., Awaitable[Any]]
"""Calls a function with arguments where the draft model lives, one call at a time."""


def failure(
    request: Request, message: str, reason: FinishReason = "error", *, refused: bool = False
) -> SequenceEvent:
    """The end of a text that comes to nothing (more)."""
    name, choice = request.request_id, request.choice
    return SequenceEvent(name, choice, (), finish_reason=reason, error=message, refused=refused)


class EdgeText:
    """``request``, as a session of ``link`` says it. Every event goes to ``emit``; `run` returns
    when the text has ended, and is cancelled where it is not wanted any more."""

    def __init__(
        self,
        request: Request,
        link: CloudLink,
        drafter: EdgeDrafter,
        in_thread: InThread,
        emit: Callable[[SequenceEvent], None],
    ) -> None:
        self._request = request
        self._link = link
        self._drafter = drafter
        self._in_thread = in_thread
        self._emit = emit
        self._codec = drafter.codec
        self._pace = link.pace
        self._count = link.counters.add
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

    async def run(self) -> None:
        """Raises `FrameError` where the server says what cannot be."""
        away, attempt, heard = time.monotonic(), 0, -1
        while not self._ended:
            try:
                async with self._link.connection() as connection:
                    await self._talk(connection)
                return
            except InvalidStatus as error:
                if error.response.status_code < 500:
                    self._fail(f"the server refuses the link: {error}", refused=True)
                    return
            except (OSError, ConnectionClosed, InvalidHandshake) as error:
                logger.info("the link is lost: %s", error or type(error).__name__)
            if len(self._chain.said) > heard:
                away, attempt, heard = time.monotonic(), 0, len(self._chain.said)
            elif time.monotonic() - away > PATIENCE_SECONDS:
                self._fail("the server is away", "abort")
                return
            self._count(edge_lost_links=1)
            await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
            attempt += 1

    async def _talk(self, connection: ClientConnection) -> None:
        """Over one connection, until the text ends. Raises what ends it before."""
        self._timed, self._heard_at = None, 0.0
        await self._send(connection, self._beginning())
        waits = self._comes_back
        while self._comes_back or not self._ended:  # the next text begins behind the last word
            try:  # all that has come is heard first
                async with asyncio.timeout(None if waits else 0):
                    self._hear(await connection.recv(decode=False))
                waits = self._comes_back
                continue
            except TimeoutError:
                pass
            if self._unsent is not None:
                batch, self._unsent = self._chain.note(self._unsent), None
                await self._send_guesses(connection, batch)
            elif (wanted := self._wanted()) is not None:
                self._unsent = await self._drafted(wanted)
            else:
                waits = True

    def _beginning(self) -> bytes:
        self._comes_back = self._session is not None
        if self._session is not None:
            resuming = Resuming(self._session, len(self._chain.said))
            return wire.encode_beginning(resuming)
        self._chain = GuessChain(self._chain.said)
        self._runs_to, self._unsent = 0, None
        self._settle()
        request, codec = self._request, self._codec
        opening = Opening(
            version=VERSION,
            mode=codec.mode,
            vocabulary=self._link.vocabulary,
            prompt=wire.pack_ids(request.prompt_ids, codec.token_bits),
            parameters=wire.completion_fields(request.parameters, request.priority),
            bad_words=request.parameters.bad_words,
            choice=request.choice,
            said=wire.pack_ids(self._chain.said[self._prompt_length :], codec.token_bits),
            resolution=codec.resolution,
            size=codec.size,
        )
        return wire.encode_beginning(opening)

    def _wanted(self) -> Pace | None:
        """What to send next; None: wait."""
        chain, pace = self._chain, self._pace
        going = chain.going
        guessed = len(chain.history) - len(chain.said)
        said = len(chain.said) - self._prompt_length
        room = max(0, self._request.parameters.max_tokens - said - guessed - 1)
        asked = self._request.drafting.most
        most = room if asked is None else min(room, asked)
        if not going:
            left = self._runs_to - len(chain.said)
            wanted = pace.next()
            if left > pace.lead or (left > 0 and wanted.guesses):
                return None
            return Pace(min(wanted.guesses, most), min(wanted.alone, room))
        full = len(going) >= MOST_GOING or len(chain.unanswered) >= MOST_UNANSWERED - 1
        if full or not guessed or any(batch.alone for batch in going):
            return None
        count = min(pace.ahead(guessed), most)
        return Pace(count) if count else None

    async def _drafted(self, wanted: Pace) -> GuessBatch:
        """A batch behind all there is."""
        started = time.monotonic()
        history, count = self._chain.history, wanted.guesses
        if not count:
            if wanted.alone and len(history) >= self._probe[0] + PROBE_EVERY:
                probed = await self._in_thread(self._drafter.tokens, history, PROBE_GUESSES)
                self._probe = len(history), probed
            return GuessBatch(0, len(history), (), alone=wanted.alone)
        batch: GuessBatch = await self._in_thread(self._drafter.draft, history, count)
        guesses, seconds = len(batch.token_ids), time.monotonic() - started
        bits = self._codec.batch_bits(batch)
        self._count(
            draft_steps=1, draft_tokens=guesses, draft_seconds=seconds, edge_guess_bits=bits
        )
        if guesses:
            self._pace.drafted(guesses, seconds, bits)
        return replace(batch, alone=wanted.alone)

    async def _send_guesses(self, connection: ClientConnection, batch: GuessBatch) -> None:
        started = time.monotonic()
        content = self._codec.encode(batch)
        self._count(edge_encode_seconds=time.monotonic() - started)
        waits = len(self._chain.said) > max(self._prompt_length, self._runs_to - 1)
        if len(self._chain.unanswered) == 1 and waits:
            self._timed = (8 * len(content), time.monotonic())
        await self._send(connection, content)

    async def _send(self, connection: ClientConnection, content: bytes) -> None:
        self._count(edge_uplink_bits=8 * len(content))
        await connection.send(content)

    def _hear(self, content: bytes) -> None:
        """Raises `FrameError` for what cannot be."""
        self._count(edge_downlink_bits=8 * len(content))
        if wire.is_frame(content):
            verdict = self._codec.decode_verdict(content)
            self._take(self._chain.event_of(verdict, self._request))
            return
        match wire.decode_reply(content):
            case Told() as told:
                self._take(told.event_of(self._request))
            case Opened(session, last, unanswered):
                self._session = session
                if self._comes_back:
                    self._chain.resumed(last, unanswered)
                    self._comes_back = False
                    self._settle()
            case Refused(404) if self._comes_back:
                self._session = None  # begins anew, with the text as far as it is here
            case Refused(status, message) if status >= 500 or status == 429:
                self._fail(message, "abort")
            case Refused(_, message):
                self._fail(message, refused=True)

    def _take(self, event: SequenceEvent) -> None:
        guessed, before = self._guessed(), self._chain.answered
        self._chain.told(event.token_ids, event.answers)
        self._learn(guessed, event.token_ids, answers=self._chain.answered is not before)
        self._emit(event)
        self._ended = event.finish_reason is not None

    def _guessed(self) -> Sequence[int]:
        """What was guessed to follow, sent or not."""
        position, guesses = self._probe
        if position == len(self._chain.said) and not self._chain.going:
            return guesses
        return self._chain.history[len(self._chain.said) :]

    def _learn(self, guessed: Sequence[int], new: tuple[int, ...], *, answers: bool) -> None:
        """What the text's going on with ``new`` says of what was guessed, and of the time."""
        pairs = list(zip(guessed, new, strict=False))
        wrong = (place for place, (guess, token) in enumerate(pairs) if guess != token)
        stood = next(wrong, len(pairs))
        tested = min(len(pairs), stood + 1)
        if tested:
            self._pace.heard(tested, stood)
        self._count(
            edge_answers=1,
            generated_tokens=len(new),
            draft_accepted_tokens=stood,
            edge_rejections=tested - stood,
        )
        now = time.monotonic()
        if answers and self._chain.answered is not None:
            self._runs_to = len(self._chain.said) + self._chain.answered.alone
            if self._timed is not None:
                self._pace.travelled(self._timed[0], now - self._timed[1])
        elif len(new) == 1 and self._heard_at and not self._comes_back:
            # What was missed comes at once, which says nothing of how it was drawn.
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
            self._count(edge_bounds_broken=1)
            logger.error("dropped %.4f, bound %.4f", threshold.average, threshold.bound)

    def _fail(self, message: str, reason: FinishReason = "error", *, refused: bool = False) -> None:
        self._ended, self._comes_back = True, False
        self._emit(failure(self._request, message, reason, refused=refused))
