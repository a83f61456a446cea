"""One text at the device: drafts, sends, hears, and goes on where a lost connection left it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from lexshard.actors.edge.drafting import EdgeDrafter
from lexshard.actors.edge.frames import VERSION, GuessBatch
from lexshard.actors.edge.ledger import MOST_UNANSWERED, GuessChain
from lexshard.actors.edge.pace import Pace
from lexshard.actors.messages import FinishReason, Request, SequenceEvent, guesses_that_stand
from lexshard.serve_app.edge import wire
from lexshard.serve_app.edge.link import CloudError, CloudLink
from lexshard.serve_app.openai.parameters import completion_fields

logger = logging.getLogger("lexshard.edge")

MOST_GOING = 8  # batches on their way
PATIENCE_SECONDS = 30.0  # for a server that is away
DRAWING = ("temperature", "top_k", "top_p", "min_p", "seed", "draft")
ENDING = ("max_tokens", "stop_token_ids", "ignore_eos")
Emit = Callable[[SequenceEvent], None]
InThread = Callable[..., Awaitable[Any]]
"""Calls a function with arguments where the draft model lives, one call at a time."""


async def say_alone(
    request: Request, drafter: EdgeDrafter, ends: tuple[int, ...], in_thread: InThread, emit: Emit
) -> None:
    """What the draft model says by itself while the server is away: quick, and another model's
    text. What takes more than drawing is refused."""
    parameters, history = request.parameters, list(request.prompt_ids)
    others = (each for each in fields(parameters) if each.name not in DRAWING + ENDING)
    if asked := [each.name for each in others if getattr(parameters, each.name) != each.default]:
        reason = f"the server is away, and the draft model alone has no {', '.join(asked)}"
        emit(SequenceEvent.failure(request, reason, refused=True))
        return
    end: FinishReason | None = None
    while end is None:
        drafter.heard(len(history), goes_on=False)
        told, end, stop = await in_thread(drafter.tokens, history, 1), "length", None
        history.extend(told)
        for token in told:  # else there is no room for more
            end, stop = parameters.end_with(token, len(history) - len(request.prompt_ids), ends)
        name, choice = request.request_id, request.choice
        emit(SequenceEvent(name, choice, told, finish_reason=end, stop_reason=stop))


@dataclass(slots=True, eq=False)
class EdgeText:
    """``request``, as a session of ``link`` says it. Every event goes to ``emit``; `run` returns
    when the text has ended, and is cancelled where it is not wanted any more."""

    request: Request
    link: CloudLink
    drafter: EdgeDrafter
    in_thread: InThread
    emit: Emit
    chain: GuessChain = field(init=False)
    session: str | None = None
    timed: tuple[int, float] | None = None  # bits of a batch, when it was sent
    heard_at: float = 0.0
    opened_at: float = math.inf  # when the session began, or went on, over this connection
    runs_to: int = 0  # length of the text up to which the target goes on alone
    unsent: GuessBatch | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        self.chain = GuessChain(self.request.prompt_ids)

    async def run(self) -> None:
        """Raises `FrameError` or `msgspec.DecodeError` where the server says what cannot be, and
        `CloudError` where it is away."""
        away, heard = 0.0, -1
        while True:
            self.opened_at = math.inf
            try:
                async with self.link.connection() as connection:
                    await self._talk(connection)
                return
            except (OSError, ConnectionClosed, InvalidHandshake) as error:
                if isinstance(error, InvalidStatus) and error.response.status_code < 500:
                    raise CloudError(f"the server refuses the link: {error}", final=False) from None
                logger.info("the link is lost: %s", error or type(error).__name__)
            now = time.monotonic()
            if self.length > heard or now - self.opened_at > 1.0:  # it did more than to begin
                away, heard = now, self.length
            elif now - away > PATIENCE_SECONDS:
                raise CloudError("the server is away", final=False)
            self.link.count(edge_lost_links=1)
            await asyncio.sleep(min(1.0, max(0.1, now - away)) if now > away else 0.0)

    @property
    def length(self) -> int:
        return len(self.chain.said)

    @property
    def room(self) -> int:
        """Tokens that may be guessed, or drawn alone, behind all there is, before the last one."""
        end = len(self.request.prompt_ids) + self.request.parameters.max_tokens
        return max(0, end - len(self.chain.history) - 1)

    async def _talk(self, connection: ClientConnection) -> None:
        """Over one connection, until the text ends. Raises what ends it before."""
        self.timed, self.heard_at = None, 0.0
        await self._send(connection, self._beginning())
        waits = False
        while not self.ended:
            with suppress(TimeoutError):  # all that has come is heard first
                async with asyncio.timeout(None if waits else 0):
                    self._hear(await connection.recv(decode=False))
                waits = False
                continue
            if self.unsent is not None:
                batch, self.unsent = self.chain.note(self.unsent), None
                await self._send(connection, self._encoded(batch))
            elif (wanted := self._wanted()) is not None:
                self.unsent = await self._drafted(wanted)
            else:
                waits = True

    def _beginning(self) -> bytes:
        self.chain = GuessChain(self.chain.said)
        self.runs_to, self.unsent = 0, None
        self._settle()
        if self.session is not None:
            return wire.encode(wire.Resuming(self.session, self.length))
        request, codec = self.request, self.drafter.codec
        said = self.chain.said[len(request.prompt_ids) :]
        opening = wire.Opening(
            VERSION,
            codec.mode,
            self.link.vocabulary,
            prompt=wire.pack_ids(request.prompt_ids, codec.token_bits),
            parameters=completion_fields(request.parameters, request.priority),
            bad_words=request.parameters.bad_words,
            choice=request.choice,
            said=wire.pack_ids(said, codec.token_bits),
            resolution=codec.resolution,
            size=codec.size,
        )
        return wire.encode(opening)

    def _wanted(self) -> Pace | None:
        """What to send next; None: wait."""
        chain, pace, request = self.chain, self.link.pace, self.request
        going, guessed, room = chain.going, len(chain.history) - self.length, self.room
        most = room if request.drafting.most is None else min(room, request.drafting.most)
        if not going:
            left = self.runs_to - self.length
            wanted = Pace(0, pace.run) if request.drafting.most == 0 else pace.next()
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
        started, history = time.monotonic(), self.chain.history
        if not wanted.guesses:
            return GuessBatch(0, len(history), (), alone=wanted.alone)
        batch: GuessBatch = await self.in_thread(self.drafter.draft, history, wanted.guesses)
        count, seconds = len(batch.token_ids), time.monotonic() - started
        self.link.count(draft_steps=1, draft_seconds=seconds)
        if count:
            bits = self.drafter.codec.batch_bits(batch)
            self.link.count(draft_tokens=count, edge_guess_bits=bits)
            self.link.pace.drafted(count, seconds, bits)
            return batch
        return replace(batch, alone=min(self.link.pace.run, self.room))

    def _encoded(self, batch: GuessBatch) -> bytes:
        """A batch that is sent now."""
        started = time.monotonic()
        content = self.drafter.codec.encode(batch)
        now = time.monotonic()
        self.link.count(edge_encode_seconds=now - started)
        waits = self.length > max(len(self.request.prompt_ids), self.runs_to - 1)
        if len(self.chain.unanswered) == 1 and waits:
            self.timed = (8 * len(content), now)
        return content

    async def _send(self, connection: ClientConnection, content: bytes) -> None:
        self.link.count(edge_uplink_bits=8 * len(content))
        await connection.send(content)

    def _hear(self, content: bytes) -> None:
        """Raises as `run`."""
        self.link.count(edge_downlink_bits=8 * len(content))
        if wire.is_frame(content):
            self._take(self.chain.event_of(content, self.drafter.codec, self.request))
            return
        match wire.decode_reply(content):
            case wire.Told() as told:
                self._take(told.event_of(self.request))
            case wire.Opened(session):
                self.session, self.opened_at = session, time.monotonic()
            case wire.Refused(404) if self.session is not None:
                self.session = None  # begins anew, with the text as far as it is here
            case wire.Refused(408):  # it came over an idle connection when the server closed that
                raise ConnectionError("the server has closed an idle connection")
            case wire.Refused(status, message):
                passing = status >= 500 or status == 429
                reason: FinishReason = "abort" if passing else "error"
                self.ended = True
                self.emit(SequenceEvent.failure(self.request, message, reason, refused=not passing))

    def _take(self, event: SequenceEvent) -> None:
        """The text goes on, which says something of what was guessed, and of the time."""
        chain, pace, new = self.chain, self.link.pace, event.token_ids
        before, guessed = chain.answered, chain.history[self.length :]
        length, untold = self.length, chain.untold
        chain.told(new, event.answers)
        stood = guesses_that_stand(guessed, new)
        tested = min(len(guessed), len(new), stood + 1)
        if tested > stood:  # what is drafted is built on a guess that fell
            self.unsent = None
        self.link.count(edge_answers=1, generated_tokens=len(new))
        if tested:
            pace.heard(tested, stood)
            self.link.count(draft_accepted_tokens=stood, edge_rejections=tested - stood)
        now = time.monotonic()
        if chain.answered is not before:
            # The engine may have drawn what it was to test, where it had no room for guesses.
            stood_there = guesses_that_stand(untold[chain.answered.number], new)
            brought = min(stood_there + 1, len(new))
            self.runs_to = length + brought + chain.answered.alone
            if self.timed is not None:
                drawing = max(0, len(new) - brought) * pace.own_seconds
                pace.travelled(self.timed[0], now - self.timed[1] - drawing)
        elif new and self.heard_at:
            pace.drew((now - self.heard_at) / len(new))
        self.timed, self.heard_at = None, now
        self._settle()
        self.emit(event)
        self.ended = event.finish_reason is not None

    def _settle(self) -> None:
        """What was drafted on guesses that turned out wrong is forgotten."""
        if self.unsent is not None and not self.unsent.goes_on_from(self.chain.history):
            self.unsent = None
        goes_on = bool(self.chain.going) or self.unsent is not None
        self.drafter.heard(self.length, goes_on=goes_on)
        threshold = self.drafter.threshold
        if threshold.average > threshold.bound + 1e-9:
            self.link.count(edge_bounds_broken=1)
            logger.error("dropped %.4f, bound %.4f", threshold.average, threshold.bound)
