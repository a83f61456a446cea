"""``/v1/edge``: what a device must know (GET), and its texts (WebSocket).

Each text is one sequence of the engine that waits for a device's guesses, and ends with its
connection. Its session outlives that for a while: the device says how much of the text it has, and
the rest is another sequence. It is lost with its API process; the device then begins a new one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from lexshard.actors.edge.frames import VERSION, FrameCodec, FrameError
from lexshard.actors.edge.ledger import VerifiedText, in_few
from lexshard.actors.messages import SequenceEvent
from lexshard.serve_app.admission import Ticket
from lexshard.serve_app.authentication import ApiKeys
from lexshard.serve_app.edge import wire
from lexshard.serve_app.engine_client import EventStream
from lexshard.serve_app.middleware import log_request
from lexshard.serve_app.openai.completions import read_completion, wanted_of
from lexshard.serve_app.openai.errors import (
    ApiError,
    bad_request,
    context_length_exceeded,
    json_response,
    overloaded,
    shortened,
)
from lexshard.serve_app.openai.generation import failure_of
from lexshard.serve_app.openai.preparation import Preparation, Wanted
from lexshard.serve_app.openai.prompts import Prompt
from lexshard.serve_app.openai.protocol import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_CHOICES,
    CompletionRequest,
)
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState
from lexshard.serve_app.structured.applying import asks_for_constraint

logger = logging.getLogger("lexshard.edge")

SILENT_SECONDS = 120.0  # between two messages of a device
LEFT = 1000  # close code of a device that wants no more
GONE = WebSocketDisconnect, RuntimeError  # what sending to a device raises that has left


class EdgeEndpoint:
    """Both methods, and the sessions of one API process."""

    def __init__(self, state: ServerState, keys: ApiKeys) -> None:
        self._state = state
        self._keys = keys
        self._sessions: dict[str, EdgeSession] = {}

    def _check_origin(self, origin: str | None) -> None:
        """Raises `ApiError` for a page that is not named: browsers let every page open a WebSocket
        wherever they can reach, and tell its origin. Devices tell none."""
        if origin is not None and not {origin, "*"} & {*self._state.config.cors_origins}:
            raise ApiError(403, f"pages of {shortened(origin)} may not ask: see --cors-origin")

    async def describe(self, state: ServerState, _: HttpRequest) -> Response:
        """What a device must know before it drafts."""
        self._check_enabled()
        names, template = state.config.model_names, state.tokenizer.chat_template
        cloud = wire.Cloud(names, await self._vocabulary(), template, state.information())
        return json_response(msgspec.to_builtins(cloud))

    async def serve(self, device: WebSocket) -> None:
        """One connection, from its first message to its end."""
        record = _record(device.client.host if device.client else "")
        session: EdgeSession | None = None
        try:
            self._check_origin(device.headers.get("origin"))
            record.is_of(self._keys.check(device.headers.get("authorization")))
            self._check_enabled()
            await device.accept()
            while True:
                try:
                    async with asyncio.timeout(SILENT_SECONDS):
                        content = await device.receive_bytes()
                except TimeoutError:
                    if session is None or session.ended or session.record.first_token_time:
                        raise ApiError(408, "the device says nothing") from None
                    continue  # it waits for its turn in the engine
                if session is not None and wire.is_frame(content):
                    await session.arrived(content, device)
                    continue
                if session is not None:  # the next text over the same connection
                    session.end()
                    session = None
                    record = _record(record.client, record.lowest_priority, record.cache_salt)
                session, length = await self._begun(content, record)
                session.go_on_with(device, length)
        except WebSocketDisconnect as error:
            if session is not None and error.code != LEFT:
                session.leave(device)
        except (FrameError, msgspec.DecodeError, KeyError, RuntimeError) as error:
            # KeyError: a message that is text; RuntimeError: another connection has taken over.
            await self._refuse(device, record, ApiError(400, f"a bad frame: {error}"))
        except ApiError as error:
            await self._refuse(device, record, error)
        finally:
            if session is not None and session.device is device:
                session.end()
            if not record.prompt_tokens:  # a session's own record is told of when that ends
                _observe(self._state, record)

    async def _begun(self, content: bytes, record: RequestRecord) -> tuple[EdgeSession, int]:
        """The session that a message asks for, and how much of its text the device has."""
        if len(content) > wire.MOST_MESSAGE_BYTES:  # where no server of ours has looked
            raise ApiError(413, f"an opening has {wire.MOST_MESSAGE_BYTES} bytes at most")
        asked = wire.decode_beginning(content)
        if isinstance(asked, wire.Opening):
            session = await self._opened(asked, record)
            return session, session.begin
        found = self._sessions.get(asked.session)
        if found is None or found.record.client != record.client or not found.has(asked.length):
            raise ApiError(404, "no such session")
        if found.ended:
            self._check_room()
            found.enter(asked.length)
        return found, asked.length

    async def _opened(self, opening: wire.Opening, record: RequestRecord) -> EdgeSession:
        """A new session. Raises `ApiError` or `FrameError` for what is wrong with what is asked."""
        codec = await self._codec(opening)
        self._check_length(opening, codec.token_bits)
        # Beside the loop: it may hold as many ids as a context, and as a vocabulary.
        prompt, said, fields, wanted = await asyncio.to_thread(self._read, opening, codec, record)
        self._check_room()  # from here on until its session is among the others, none begins
        preparation = Preparation(self._state, fields, wanted, record)
        ticket = preparation.admitted()
        with ticket.released_on_error():
            generation, _ = preparation.made([Prompt(prompt, None)], opening.bad_words, ticket)
            request = generation.choices[0].request
            labels = bool(opening.parameters.get("labels"))
            parameters = replace(request.parameters, labels=labels)
            asked = replace(request, choice=opening.choice, parameters=parameters, resumed_ids=said)
            text = VerifiedText(codec, asked)
            return EdgeSession(self._sessions, self._state, text, ticket, record)

    def _read(
        self, opening: wire.Opening, codec: FrameCodec, record: RequestRecord
    ) -> tuple[tuple[int, ...], tuple[int, ...], CompletionRequest, Wanted]:
        """Prompt, output so far, and what is asked. Raises `ApiError`."""
        prompt = wire.unpack_ids(opening.prompt, codec.token_bits)
        said = wire.unpack_ids(opening.said, codec.token_bits)
        body = opening.parameters | {"prompt": list(prompt), "labels": None}
        fields = read_completion(self._state, body, record)
        if asks_for_constraint(fields):
            reason = "the text of a device cannot be held to a grammar"
            raise bad_request(reason, "structured_outputs")
        if not 0 <= opening.choice < MAX_CHOICES or fields.choices != 1 or fields.stop:
            raise bad_request("a session has one choice, and its device looks for 'stop'", "n")
        banned = [token for word in opening.bad_words for token in word]
        # As many tokens as `TextReader.bad_words` may make of words.
        if len(banned) > 16 * MAX_BAD_WORD_CHARACTERS:
            raise bad_request("'bad_words' are too many", "bad_words")
        for name, ids in (("said", said), ("bad_words", banned)):
            if not all(0 <= each < codec.vocabulary_size for each in ids):
                raise bad_request(f"'{name}' hold ids that are none", name)
        if len(said) >= (fields.max_tokens or 1):
            raise bad_request(f"{len(said)} tokens are said already", "said")
        return prompt, said, fields, wanted_of(fields)

    async def _codec(self, opening: wire.Opening) -> FrameCodec:
        """Of a device for which there is room, and which fits the model. Raises as `_opened`."""
        if opening.version != VERSION:
            raise FrameError(f"version {opening.version}; this server has {VERSION}")
        if opening.vocabulary != await self._vocabulary():
            reason = "the device's draft model has another tokenizer than the model served here"
            raise bad_request(reason, "vocabulary")
        self._check_room()
        size = self._state.information().vocabulary_size
        return FrameCodec(opening.mode, size, opening.resolution, opening.size)

    def _check_room(self) -> None:
        """Raises `ApiError` where no other text may be said."""
        served = sum(not session.ended for session in self._sessions.values())
        if served >= self._state.config.edge_sessions:
            raise overloaded(f"{served} texts of devices are being said; try again")

    def _check_length(self, opening: wire.Opening, token_bits: int) -> None:
        """Raises `ApiError` for more ids than fit the context: unpacked, they are many times as
        long."""
        context = self._state.information().context
        ids = sum(8 * len(each) // token_bits for each in (opening.prompt, opening.said))
        if ids > context:
            reason = f"the text of the device has {ids}."
            raise context_length_exceeded(context, reason, "prompt")

    async def _vocabulary(self) -> str:
        return await asyncio.to_thread(lambda: self._state.tokenizer.vocabulary_hash)

    def _check_enabled(self) -> None:
        """Raises `ApiError`, 404 on a server without sessions, 503 while there is no engine."""
        if not self._state.config.edge_sessions:
            raise ApiError(404, "this server takes no drafts of devices (--edge-sessions 0)")
        self._state.information()

    async def _refuse(self, device: WebSocket, record: RequestRecord, error: ApiError) -> None:
        """Says what is wrong, and ends the connection."""
        record.status = error.status
        with suppress(*GONE):
            if device.application_state is WebSocketState.CONNECTING:
                await device.send_denial_response(error.response())
                return
            await device.send_bytes(wire.encode(wire.Refused(error.status, error.message)))
            reason = error.message.encode()[:120].decode(errors="ignore")  # it has room for 123
            await device.close(4000 + error.status, reason)


@dataclass(slots=True, eq=False)
class EdgeSession:
    """One text of one device, which may be away: then it does not go on. It is among ``sessions``,
    by its name, from the beginning until `end`, which must be called."""

    sessions: dict[str, EdgeSession]
    state: ServerState
    text: VerifiedText
    ticket: Ticket
    record: RequestRecord
    name: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    device: WebSocket | None = None
    ended: bool = False  # the text has, and takes no place
    observed: bool = False  # it is counted, and in the log
    begin: int = field(init=False)  # length of the text when it began
    running: ExitStack = field(default_factory=ExitStack)  # what stops when its device has left

    def __post_init__(self) -> None:
        self.begin = len(self.text.said)
        self.sessions[self.name] = self

    def has(self, length: int) -> bool:
        """Whether the text can go on behind so many tokens; behind its last one nothing does."""
        return self.begin <= length < len(self.text.said) + (not self.ended)

    def enter(self, length: int) -> None:
        """A text that has ended takes a place again, to be said behind its first ``length`` tokens.
        Raises `ApiError` where it cannot."""
        self.ticket = self.state.admission.admit(self.record.client, 1, length)
        self.ended = False

    async def arrived(self, content: bytes, device: WebSocket) -> None:
        """A frame over the connection to ``device``, one that was on its way when another took over
        perhaps, which the other sends again. Raises `FrameError`."""
        if len(content) > wire.MOST_FRAME_BYTES:
            raise FrameError(f"a frame of {len(content)} bytes")
        codec = self.text.codec
        if codec.mode == "same-token":
            batch = codec.decode(content)
        else:  # distributions may take seconds, in which other sessions go on
            batch = await asyncio.to_thread(codec.decode, content)
        if device is not self.device:
            raise FrameError("the session goes on over another connection")
        self.state.client.draft(self.text.arrived(batch))

    def go_on_with(self, device: WebSocket, length: int) -> None:
        """Tells ``device``, which has ``length`` tokens of the text, how it goes on behind them:
        what else was drawn has not arrived, and is drawn again."""
        self.device = device
        self.running.close()
        self.text = self.text.behind(length)
        stream = self.state.client.submit([self.text.request])
        self.running.callback(stream.close)
        following = asyncio.get_running_loop().create_task(self._follow(stream, device))
        self.running.callback(following.cancel)

    def leave(self, device: WebSocket) -> None:
        """The connection is lost; the session waits for another, but not for ever."""
        if self.device is device:
            self.device = None
            self.running.close()
            patience = self.state.config.edge_resume_seconds
            expiry = asyncio.get_running_loop().call_later(patience, self.end)
            self.running.callback(expiry.cancel)

    def end(self) -> None:
        """Nothing of it stays; twice does no harm."""
        if self.sessions.pop(self.name, None) is not None:
            self.running.close()
            self._leave()

    def _leave(self) -> None:
        """The text has come to an end, and takes no place any more; it is counted once."""
        self.ticket.release()
        self.ended = True
        if not self.observed:
            self.observed = True
            self.record.completion_tokens = len(self.text.said) - self.begin
            _observe(self.state, self.record)

    async def _follow(self, stream: EventStream, device: WebSocket) -> None:
        """Tells ``device`` that the text goes on, and of every event until it has ended."""
        end = None
        try:
            await _send(device, wire.encode(wire.Opened(self.name)))
            while end is None:
                for event in in_few(await stream.arrived()):
                    end = event.finish_reason
                    await _send(device, self._heard(event))
        except Exception:
            logger.exception("id=%s: the session fails", self.record.request_id)
            self.record.status = 500
            with suppress(*GONE):
                await device.close(wire.BROKEN, "internal error")
            self.end()

    def _heard(self, event: SequenceEvent) -> bytes:
        """The text goes on: what tells of it."""
        self.ticket.set_waiting(0)
        if event.timing is not None:
            self.record.note_timing(event.timing)
        if event.token_ids and self.record.first_token_time is None:
            self.record.first_token_time = time.monotonic()
        verdict = self.text.happened(event)
        if event.finish_reason is not None:
            if event.finish_reason in ("error", "abort"):
                self.record.status = failure_of(event, self.record.request_id).status
            self._leave()
        return verdict or wire.encode(wire.Told.of(event))


async def _send(device: WebSocket, content: bytes) -> None:
    """To a connection that may be gone, of which its handler hears, too."""
    with suppress(*GONE):
        await device.send_bytes(content)


def _record(client: str, lowest_priority: int = 0, cache_salt: str = "") -> RequestRecord:
    """Of the next text of a client."""
    return RequestRecord(uuid.uuid4().hex, "GET", wire.PATH, client, lowest_priority, cache_salt)


def _observe(state: ServerState, record: RequestRecord) -> None:
    """Counts a session, or what was to be one, and writes its line in the log."""
    record.status = record.status or 200
    state.metrics.observe(record)
    log_request(record)
