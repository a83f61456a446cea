"""``/v1/edge``: what a device must know (GET), and its sessions (WebSocket)."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import Any

import msgspec
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from lexshard.actors.edge.frames import VERSION, FrameCodec, FrameError
from lexshard.actors.edge.ledger import VerifiedText, drafting_of
from lexshard.actors.messages import Request
from lexshard.serve_app.admission import Ticket
from lexshard.serve_app.authentication import ApiKeys
from lexshard.serve_app.edge import wire
from lexshard.serve_app.edge.sessions import EdgeSession, closed, observe
from lexshard.serve_app.edge.wire import Cloud, Opening, Refused, Resuming
from lexshard.serve_app.openai.completions import read_completion, wanted_of
from lexshard.serve_app.openai.errors import ApiError, bad_request, json_response, overloaded
from lexshard.serve_app.openai.preparation import Preparation
from lexshard.serve_app.openai.prompts import Prompt
from lexshard.serve_app.openai.protocol import MAX_CHOICES, MAX_LIST_ENTRIES
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState
from lexshard.serve_app.structured.applying import asks_for_constraint

BEGIN_SECONDS = 10.0  # for a device's first message
SILENT_SECONDS = 120.0  # between two frames of a device
LEFT = 1000  # close code of a device that wants no more
MOST_RESOLUTION = 1_000  # parts of a distribution: 0.1 s to read one, ten times as many 40 s


class EdgeEndpoint:
    """Both methods, and the sessions of one API process."""

    def __init__(self, state: ServerState, keys: ApiKeys) -> None:
        self._state = state
        self._keys = keys
        self._sessions: dict[str, EdgeSession] = {}

    async def describe(self, state: ServerState, _: HttpRequest) -> Response:
        """What a device must know before it drafts."""
        self._check_enabled()
        cloud = Cloud(
            state.config.model_names,
            await self._vocabulary(),
            state.tokenizer.chat_template,
            state.information(),
        )
        return json_response(msgspec.to_builtins(cloud))

    async def serve(self, device: WebSocket) -> None:
        """One connection, from its first message to its end."""
        record = _record(device.client.host if device.client else "")
        try:
            record.is_of(self._keys.check(device.headers.get("authorization")))
            self._check_enabled()
        except ApiError as error:
            record.status = error.status
            observe(self._state, record)
            await device.send_denial_response(error.response())
            return
        await device.accept()
        session: EdgeSession | None = None
        try:
            seconds = BEGIN_SECONDS
            while True:
                async with asyncio.timeout(seconds):
                    content = await device.receive_bytes()
                seconds = SILENT_SECONDS
                if session is not None and wire.is_frame(content):
                    await session.arrived(content, device)
                    continue
                if session is not None:  # the next text over the same connection
                    session.end()
                    session = None
                    record = _record(record.client, record.lowest_priority, record.cache_salt)
                session = await self._begun(device, content, record)
        except WebSocketDisconnect as error:
            if session is not None and (error.code != LEFT or session.device is not device):
                session.leave(device)
                session = None
        except TimeoutError:
            await self._refuse(device, record, ApiError(408, "the device says nothing"))
        except (FrameError, KeyError, RuntimeError) as error:
            # KeyError: a message that is text; RuntimeError: another connection has taken over.
            if session is not None and session.device is not device:
                session = None
            await self._refuse(device, record, ApiError(400, f"a bad frame: {error}"))
        except ApiError as error:
            await self._refuse(device, record, error)
        finally:
            if session is not None:
                session.end()
            if not record.prompt_tokens:  # a session's own record is told of when that ends
                observe(self._state, record)

    async def _begun(self, device: WebSocket, content: bytes, record: RequestRecord) -> EdgeSession:
        """The session that a message asks for.

        Raises:
            ApiError, FrameError: what is wrong with it.
        """
        beginning = wire.decode_beginning(content, self._state.config.max_body_bytes)
        if isinstance(beginning, Resuming):
            found = self._sessions.get(beginning.session)
            if found is None or found.owner != record.client:
                raise ApiError(404, "no such session")
            await found.go_on_with(device, beginning.length)
            return found
        session = await self._opened(beginning, record)
        try:
            await session.go_on_with(device)
        except BaseException:
            session.end()
            raise
        return session

    async def _opened(self, opening: Opening, record: RequestRecord) -> EdgeSession:
        """A session for a text that a device asks for.

        Raises:
            ApiError: whatever is wrong with what it asks for, or with the time.
            FrameError: what it says fits no model.
        """
        if opening.version != VERSION:
            raise FrameError(f"version {opening.version}; this server has {VERSION}")
        state = self._state
        served = sum(not session.ended for session in self._sessions.values())
        if served >= state.config.edge_sessions:
            raise overloaded(f"{served} texts of devices are being said; try again")
        if opening.vocabulary != await self._vocabulary():
            raise bad_request(
                "the device's draft model has another tokenizer than the model served here",
                "vocabulary",
            )
        size = state.information().vocabulary_size
        if not 1 <= opening.size <= size or not 1 <= opening.resolution <= MOST_RESOLUTION:
            raise FrameError(f"distributions of {opening.size} tokens, {opening.resolution} parts")
        codec = FrameCodec(opening.mode, size, opening.resolution, opening.size)
        request, ticket = self._asked(opening, codec, record)
        with ticket.released_on_error():
            text = VerifiedText(codec, request)
            return EdgeSession(self._sessions, state, text, ticket, record)

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
        banned = [token for word in opening.bad_words for token in word]
        if len(banned) > MAX_LIST_ENTRIES or not all(
            0 <= each < codec.vocabulary_size for each in (*said, *banned)
        ):
            raise bad_request("'bad_words' or 'said' hold ids that are none, or too many", "said")
        if len(said) >= (fields.max_tokens or 1):
            raise bad_request(f"{len(said)} tokens are said already", "said")
        preparation = Preparation(self._state, fields, wanted_of(fields), record)
        ticket = preparation.admitted()
        with ticket.released_on_error():
            prompts = [Prompt(tuple(prompt), None)]
            generation, _ = preparation.made(prompts, opening.bad_words, ticket)
        request = replace(
            generation.choices[0].request,
            choice=opening.choice,
            resumed_ids=said,
            drafting=drafting_of(opening.mode),
        )
        return request, ticket

    async def _vocabulary(self) -> str:
        return await asyncio.to_thread(lambda: self._state.tokenizer.vocabulary_hash)

    def _check_enabled(self) -> None:
        """Raises:
        ApiError: 404 on a server without sessions, 503 while there is no engine.
        """
        if not self._state.config.edge_sessions:
            raise ApiError(404, "this server takes no drafts of devices (--edge-sessions 0)")
        if not self._state.client.ready:
            raise overloaded(f"not ready: {self._state.client.health_reason}")

    async def _refuse(self, device: WebSocket, record: RequestRecord, error: ApiError) -> None:
        """Says what is wrong, and ends the connection."""
        record.status = error.status
        try:
            await device.send_bytes(wire.encode_reply(Refused(error.status, error.message)))
        except (WebSocketDisconnect, RuntimeError):
            return
        await closed(device, 4000 + error.status, error.message)


def _record(client: str, lowest_priority: int = 0, cache_salt: str = "") -> RequestRecord:
    """Of the next text of a client."""
    return RequestRecord(uuid.uuid4().hex, "GET", wire.PATH, client, lowest_priority, cache_salt)
