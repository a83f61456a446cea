"""Texts of ``/v1/edge``: each is one sequence of the engine that waits for a device's guesses.

A session outlives its connection for a while: what the device misses meanwhile is kept, and told
when it comes back. It is lost with its API process; the device then begins a new one, with the text
as far as it has it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from lexshard.actors.edge.frames import FrameError
from lexshard.actors.edge.ledger import VerifiedText
from lexshard.actors.messages import SequenceEvent
from lexshard.serve_app.admission import Ticket
from lexshard.serve_app.edge import wire
from lexshard.serve_app.edge.wire import Opened, Told
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState

logger = logging.getLogger("lexshard.edge")


class EdgeSession:
    """One text of one device, which may be away. It is among ``sessions``, by its name, and runs in
    the event loop from the beginning until `end`, which must be called."""

    def __init__(
        self,
        sessions: dict[str, EdgeSession],
        state: ServerState,
        text: VerifiedText,
        ticket: Ticket,
        record: RequestRecord,
    ) -> None:
        self.name = secrets.token_urlsafe(16)
        self.owner = record.client
        self.device: WebSocket | None = None
        self.ended = False  # the text has
        self._sessions = sessions
        self._state = state
        self._ticket = ticket
        self._record = record
        self._text = text
        self._begin = len(text.said)
        self._events: list[tuple[int, SequenceEvent]] = []  # with the length of the text after each
        self._saying = asyncio.Lock()
        self._expiry: asyncio.TimerHandle | None = None
        self._stream = state.client.submit([text.request])
        self._following = asyncio.get_running_loop().create_task(self._follow())
        sessions[self.name] = self

    async def arrived(self, content: bytes, device: WebSocket) -> None:
        """A frame over the connection to ``device``, one that was on its way when another took over
        perhaps, which the other sends again. Raises `FrameError`."""
        if len(content) > wire.MOST_FRAME_BYTES:
            raise FrameError(f"a frame of {len(content)} bytes")
        codec = self._text.codec
        if codec.mode == "same-token":
            batch = codec.decode(content)
        else:  # distributions may take seconds, in which other sessions go on
            batch = await asyncio.to_thread(codec.decode, content)
        if device is not self.device:
            raise FrameError("the session goes on over another connection")
        self._state.client.draft(self._text.arrived(batch))

    async def go_on_with(self, device: WebSocket, length: int | None = None) -> None:
        """Tells ``device``, which has ``length`` tokens of the text (None: those that it began
        with), what it has missed, and then of the text as it goes on.

        Raises:
            FrameError: it has another text.
        """
        async with self._saying:
            length = self._begin if length is None else length
            if length != self._begin and length not in (end for end, _ in self._events):
                raise FrameError(f"no word has ended after {length} tokens")
            missed = [event for end, event in self._events if end > length]
            if not missed and self.ended:
                missed = [self._events[-1][1]]
            before, self.device = self.device, device
            if self._expiry is not None:
                self._expiry.cancel()
            try:
                for event in missed:
                    await device.send_bytes(wire.encode_reply(Told.of(event)))
                opened = Opened(self.name, self._text.last, tuple(self._text.unanswered))
                await device.send_bytes(wire.encode_reply(opened))
            except BaseException:
                self.leave(device)
                raise
        if before is not None:
            await closed(before, wire.TAKEN_OVER, "the session goes on over another connection")

    def leave(self, device: WebSocket) -> None:
        """The connection is lost; the session waits for another, but not for ever."""
        if self.device is device:
            self.device = None
            patience = self._state.config.edge_resume_seconds
            self._expiry = asyncio.get_running_loop().call_later(patience, self.end)

    def end(self) -> None:
        """Nothing of it stays; twice does no harm."""
        if self._sessions.pop(self.name, None) is not None:
            if self._expiry is not None:
                self._expiry.cancel()
            self._following.cancel()
            self._stream.close()
            self._ticket.release()
            self._record.completion_tokens = len(self._text.said) - self._record.prompt_tokens
            observe(self._state, self._record)

    async def _follow(self) -> None:
        """Tells the device of every event, until the text has ended."""
        try:
            while not self.ended:
                for event in await self._stream.arrived():
                    async with self._saying:
                        content = self._note(event)
                        device = self.device
                        if device is not None:
                            try:
                                await device.send_bytes(content)
                            except (WebSocketDisconnect, RuntimeError):  # its handler hears, too
                                self.leave(device)
        except Exception:
            logger.exception("id=%s: the session fails", self._record.request_id)
            if self.device is not None:
                await closed(self.device, wire.BROKEN, "internal error")

    def _note(self, event: SequenceEvent) -> bytes:
        """What is to be said of it."""
        self._ticket.set_waiting(0)
        if event.timing is not None:
            self._record.note_timing(event.timing)
        if event.token_ids and self._record.first_token_time is None:
            self._record.first_token_time = time.monotonic()
        verdict = self._text.happened(event)
        self._events.append((len(self._text.said), event))
        if event.finish_reason is not None:
            self.ended = True
            self._ticket.release()
        return wire.encode_reply(Told.of(event)) if verdict is None else verdict


async def closed(device: WebSocket, code: int, reason: str) -> None:
    """Closes a connection that may be gone."""
    if device.application_state is not WebSocketState.DISCONNECTED:
        with suppress(WebSocketDisconnect, RuntimeError):
            await device.close(code, reason[:120])


def observe(state: ServerState, record: RequestRecord) -> None:
    """Counts a session, or what was to be one, and writes its line in the log."""
    record.status = record.status or 200
    state.metrics.observe(record)
    logger.info(
        "id=%s edge session status=%d prompt=%d completion=%d duration=%.3fs",
        record.request_id,
        record.status,
        record.prompt_tokens,
        record.completion_tokens,
        record.seconds,
    )
