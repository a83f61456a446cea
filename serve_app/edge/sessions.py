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
from dataclasses import replace
from importlib import import_module
from typing import Any

import orjson
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from lexshard.actors.edge.frames import FrameCodec, FrameError
from lexshard.actors.edge.verifying import VerifiedText, drafting_of
from lexshard.actors.messages import Request, SequenceEvent
from lexshard.serve_app.admission import Ticket
from lexshard.serve_app.edge import wire
from lexshard.serve_app.edge.wire import Opened, Opening, Resumed, Told
from lexshard.serve_app.openai.completions import CompletionWriter, read_completion
from lexshard.serve_app.openai.errors import bad_request, overloaded
from lexshard.serve_app.openai.preparation import Preparation, Wanted
from lexshard.serve_app.openai.prompts import Prompt
from lexshard.serve_app.openai.protocol import MAX_CHOICES, MAX_LIST_ENTRIES
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState
from lexshard.serve_app.structured.applying import asks_for_constraint

logger = logging.getLogger("lexshard.edge")

MOST_RESOLUTION = 10_000  # parts of a distribution: what coding it takes grows with them


class EdgeSession:
    """One text of one device, which may be away. Runs in the event loop from the beginning; `end`
    must be called."""

    def __init__(
        self,
        state: ServerState,
        codec: FrameCodec,
        request: Request,
        ticket: Ticket,
        record: RequestRecord,
    ) -> None:
        self.name = secrets.token_urlsafe(16)
        self.owner = record.client
        self.text = VerifiedText(codec, request)
        self.device: WebSocket | None = None
        self.left_at: float | None = None  # by the loop's clock
        self._state = state
        self._codec = codec
        self._ticket = ticket
        self._record = record
        self._events: list[tuple[int, Told]] = []  # with the length of the text after each
        self._saying = asyncio.Lock()
        self._over = False
        self._stream = state.client.submit([request])
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def begin(self, device: WebSocket) -> None:
        """Tells ``device`` of the session, and then of its text."""
        async with self._saying:
            await device.send_bytes(wire.encode_reply(Opened(self.name)))
            self.device = device

    def arrived(self, content: bytes) -> None:
        """A frame of the device. Raises `FrameError`."""
        if len(content) > wire.MOST_FRAME_BYTES:
            raise FrameError(f"a frame of {len(content)} bytes")
        self._state.client.draft(self.text.arrived(content))

    async def come_back(self, device: WebSocket, length: int) -> None:
        """Goes on with ``device``, which has ``length`` tokens of the text.

        Raises:
            FrameError: it has another text.
        """
        async with self._saying:
            missed = self.text.since(length)
            events = tuple(told for end, told in self._events if end > length)
            if sum(len(told.token_ids) for told in events) != len(missed):
                raise FrameError(f"no word has ended after {length} tokens")
            ending = self._events[-1:] if not events and self.ended else []
            before, self.device, self.left_at = self.device, device, None
            resumed = Resumed(
                self.text.last,
                self.text.unanswered,
                (*events, *(told for _, told in ending)),
            )
            try:
                await device.send_bytes(wire.encode_reply(resumed))
            except BaseException:
                self.leave(device)
                raise
        if before is not None:
            await closed(before, wire.TAKEN_OVER, "the session goes on over another connection")

    def leave(self, device: WebSocket) -> None:
        """The connection is lost; the session waits for another."""
        if self.device is device:
            self.device = None
            self.left_at = asyncio.get_running_loop().time()

    def end(self) -> None:
        """Nothing of it stays; twice does no harm."""
        if not self._over:
            self._over = True
            self._following.cancel()
            self._stream.close()
            self._ticket.release()
            self._record.completion_tokens = len(self.text.output)
            observe(self._state, self._record)

    @property
    def ended(self) -> bool:
        return bool(self._events) and self._events[-1][1].finish_reason is not None

    async def _follow(self) -> None:
        """Tells the device of every event, until the text has ended."""
        try:
            while not self.ended:
                for event in await self._stream.arrived():
                    async with self._saying:
                        content = self._note(event)
                        if self.device is not None:
                            await self._say(self.device, content)
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
        verdict = self.text.happened(event)
        told = wire.told(event)
        self._events.append((self.text.length, told))
        if event.finish_reason is not None:
            self._ticket.release()
        if verdict is None or wire.needs_telling(event):
            return wire.encode_reply(told)
        return self._codec.encode_verdict(verdict)

    async def _say(self, device: WebSocket, content: bytes) -> None:
        try:
            await device.send_bytes(content)
        except (WebSocketDisconnect, RuntimeError):  # its handler hears of it, too
            self.leave(device)


class EdgeSessions:
    """The sessions of one API process."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._sessions: dict[str, EdgeSession] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._vocabulary: str | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    async def vocabulary(self) -> str:
        """The hash of the model's tokens."""
        if self._vocabulary is None:
            tokenizer = self._state.tokenizer
            self._vocabulary = await asyncio.to_thread(
                lambda: wire.vocabulary_hash(tokenizer.vocabulary())
            )
        return self._vocabulary

    async def open(self, opening: Opening, record: RequestRecord) -> EdgeSession:
        """A session for a text that a device asks for.

        Raises:
            ApiError: whatever is wrong with what it asks for, or with the time.
            FrameError: what it says fits no model.
        """
        state = self._state
        served = sum(not session.ended for session in self._sessions.values())
        if served >= state.config.edge_sessions:
            raise overloaded(f"{served} texts of devices are being said; try again")
        if opening.vocabulary != await self.vocabulary():
            raise bad_request(
                "the device's draft model has another tokenizer than the model served here",
                "vocabulary",
            )
        if opening.mode != "same-token":  # takes a second the first time
            await asyncio.to_thread(import_module, "lexshard.kernels.lattice")
        size = state.information().vocabulary_size
        if not 1 <= opening.size <= size or not 1 <= opening.resolution <= MOST_RESOLUTION:
            raise FrameError(f"distributions of {opening.size} tokens, {opening.resolution} parts")
        codec = FrameCodec(opening.mode, size, opening.resolution, opening.size)
        request, ticket = self._asked(opening, codec, record)
        with ticket.released_on_error():
            session = EdgeSession(state, codec, request, ticket, record)
        self._sessions[session.name] = session
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep())
        return session

    def find(self, name: str, owner: str) -> EdgeSession | None:
        """The session of that name, for the client that opened it."""
        session = self._sessions.get(name)
        return session if session is not None and session.owner == owner else None

    def end(self, session: EdgeSession) -> None:
        self._sessions.pop(session.name, None)
        session.end()

    def _asked(
        self, opening: Opening, codec: FrameCodec, record: RequestRecord
    ) -> tuple[Request, Ticket]:
        prompt = wire.unpack_ids(opening.prompt, codec.token_bits)
        said = tuple(wire.unpack_ids(opening.said, codec.token_bits))
        try:
            body: dict[str, Any] = {**orjson.loads(opening.parameters), "prompt": prompt}
        except (orjson.JSONDecodeError, TypeError) as error:
            raise FrameError(f"'parameters' are no JSON object: {error}") from None
        fields = read_completion(self._state, body, record)
        if asks_for_constraint(fields):
            field = "structured_outputs"
            raise bad_request("the text of a device cannot be held to a grammar", field)
        if not 0 <= opening.choice < MAX_CHOICES or fields.choices != 1 or fields.stop:
            raise bad_request("a session has one choice, and its device looks for 'stop'", "n")
        entries = sum(map(len, opening.bad_words))
        ids = [*said, *(token for word in opening.bad_words for token in word)]
        if entries > MAX_LIST_ENTRIES or not all(0 <= each < codec.vocabulary_size for each in ids):
            raise bad_request("'bad_words' or 'said' hold ids that are none, or too many", "said")
        if len(said) >= (fields.max_tokens or 1):
            raise bad_request(f"{len(said)} tokens are said already", "said")
        wanted = Wanted(
            CompletionWriter,
            "prompt",
            texts=[prompt],
            encode=_never,
            max_tokens=fields.max_tokens,
            logprobs=fields.logprobs,
            prompt_logprobs=fields.prompt_logprobs,
        )
        preparation = Preparation(self._state, fields, wanted, record)
        ticket = preparation.admitted()
        with ticket.released_on_error():
            generation, _ = preparation.made(
                [Prompt(tuple(prompt), None)], opening.bad_words, ticket
            )
        request = replace(
            generation.choices[0].request,
            choice=opening.choice,
            resumed_ids=said,
            drafting=drafting_of(opening.mode),
        )
        return request, ticket

    async def _sweep(self) -> None:
        """Ends the sessions whose devices have not come back in time."""
        patience = self._state.config.edge_resume_seconds
        while self._sessions:
            await asyncio.sleep(min(1.0, patience))
            now = asyncio.get_running_loop().time()
            for session in list(self._sessions.values()):
                if session.left_at is not None and now - session.left_at > patience:
                    logger.info("a device has not come back in %d s", patience)
                    self.end(session)
        self._sweeping = None


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


async def _never(_: object) -> list[Prompt]:
    raise AssertionError("prompts of sessions are ids")
