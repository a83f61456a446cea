"""``/v1/edge``: what a device must know (GET), and its sessions (WebSocket)."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from lexshard.actors.edge.frames import VERSION, FrameError
from lexshard.serve_app.authentication import ApiKeys
from lexshard.serve_app.edge import wire
from lexshard.serve_app.edge.sessions import EdgeSession, EdgeSessions, closed, observe
from lexshard.serve_app.edge.wire import Opening, Refused, Resuming
from lexshard.serve_app.openai.errors import ApiError, json_response, overloaded
from lexshard.serve_app.request_record import RequestRecord
from lexshard.serve_app.server_state import ServerState

BEGIN_SECONDS = 10.0  # for a device's first message
SILENT_SECONDS = 120.0  # between two frames of a device
LEFT = 1000  # close code of a device that wants no more


class EdgeEndpoint:
    """Both methods, for one server."""

    def __init__(self, state: ServerState, keys: ApiKeys) -> None:
        self._state = state
        self._keys = keys
        self.sessions = EdgeSessions(state)

    async def describe(self, state: ServerState, _: Request) -> Response:
        """What a device must know before it drafts."""
        self._check_enabled()
        information = state.information()
        told: dict[str, Any] = {
            "version": VERSION,
            "models": list(state.config.model_names),
            "vocabulary": await self.sessions.vocabulary(),
            "chat_template": state.tokenizer.chat_template,
            "engine": asdict(information),
        }
        return json_response(told)

    async def serve(self, device: WebSocket) -> None:
        """One connection, from its first message to its end."""
        record = self._record(device)
        try:
            owner = self._keys.check(device.headers.get("authorization"))
            self._check_enabled()
        except ApiError as error:
            record.status = error.status
            observe(self._state, record)
            await device.send_denial_response(error.response())
            return
        if owner is not None:
            record.client = record.cache_salt = owner.name
            record.lowest_priority = owner.lowest_priority
        await device.accept()
        session: EdgeSession | None = None
        try:
            seconds = BEGIN_SECONDS
            while True:
                async with asyncio.timeout(seconds):
                    content = await device.receive_bytes()
                seconds = SILENT_SECONDS
                if session is not None and wire.is_frame(content):
                    session.arrived(content)
                    continue
                if session is not None:  # the next text over the same connection
                    self.sessions.end(session)
                    session, record = None, self._next(record)
                session = await self._begun(device, content, record)
                if session is None:
                    return
        except WebSocketDisconnect as error:
            record.status = record.status or 200
            if session is not None and (error.code != LEFT or session.device is not device):
                session.leave(device)
                session = None
        except TimeoutError:
            await self._refuse(device, record, ApiError(408, "the device says nothing"))
        except (FrameError, KeyError, RuntimeError) as error:
            # KeyError: a message that is text; RuntimeError: another connection has taken over.
            record.status = 400
            if session is not None and session.device is not device:
                session = None
            await self._refuse(device, record, ApiError(400, f"a bad frame: {error}"))
        except ApiError as error:
            await self._refuse(device, record, error)
        finally:
            if session is not None:
                self.sessions.end(session)
            if not record.prompt_tokens:  # a session's own record is told of when that ends
                observe(self._state, record)

    async def _begun(
        self, device: WebSocket, content: bytes, record: RequestRecord
    ) -> EdgeSession | None:
        """The session that a message asks for; None where there is none any more.

        Raises:
            ApiError, FrameError: what is wrong with it.
        """
        beginning = wire.decode_beginning(content, self._state.config.max_body_bytes)
        match beginning:
            case Opening():
                if beginning.version != VERSION:
                    raise FrameError(f"version {beginning.version}; this server has {VERSION}")
                session = await self.sessions.open(beginning, record)
                try:
                    await session.begin(device)
                except BaseException:
                    self.sessions.end(session)
                    raise
                return session
            case Resuming(name, length):
                found = self.sessions.find(name, record.client)
                if found is None:
                    await closed(device, wire.UNKNOWN_SESSION, "no such session")
                    return None
                await found.come_back(device, length)
                return found

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
        refused = Refused(error.status, error.body()["error"])
        try:
            await device.send_bytes(wire.encode_reply(refused))
        except (WebSocketDisconnect, RuntimeError):
            return
        await closed(device, 4000 + error.status, error.message)

    def _record(self, device: WebSocket) -> RequestRecord:
        client = device.client.host if device.client else ""
        return RequestRecord(uuid.uuid4().hex, "GET", wire.PATH, client)

    def _next(self, record: RequestRecord) -> RequestRecord:
        """Of the next text of the same client."""
        return RequestRecord(
            uuid.uuid4().hex,
            "GET",
            wire.PATH,
            record.client,
            lowest_priority=record.lowest_priority,
            cache_salt=record.cache_salt,
        )
