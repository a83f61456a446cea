"""The engine as a plain process of this machine: how it is asked, and how it answers.

A question is a connection to a socket file that only this user can reach: one line with its name,
answered by one line of JSON. The connection that asks for ``presence`` stays open as long as the
process lives, so that its end is noticed at once, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import socketserver
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.faults import LoggedFault
from lexshard.actors.role import RunningRole
from lexshard.cluster.engine.handle import EngineLocation, EngineRaisedError, Suitability
from lexshard.cluster.engine.process import EngineProcess
from lexshard.cluster.link import PeerLostError

Question = Literal["presence", "locate", "roles", "faults"]
CONNECT_SECONDS = 0.02  # between two looks for a process that is being started
_NOT_NOW = (ConnectionError, BlockingIOError)  # the latter where many wait to be let in
MOST_ANSWER_BYTES = 16 * 1024 * 1024


class EngineOrder(msgspec.Struct, frozen=True):
    """What an engine's process is told: its configuration, and the file where it answers."""

    configuration: dict[str, Any]
    path: str


class EngineAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is answered; ``failure`` is why the engine could not be made."""

    process_id: int
    failure: str | None = None
    location: EngineLocation | None = None
    roles: tuple[RunningRole, ...] = ()
    faults: tuple[LoggedFault, ...] = ()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128  # all API processes ask at once, while this one imports


def answer_questions(process: EngineProcess, path: str) -> None:
    """Begins to answer, in threads of its own; what an earlier process left there is taken away."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            question = self.rfile.readline().decode().strip()
            with suppress(ConnectionError):
                self.wfile.write(msgspec.json.encode(_answer(process, question)) + b"\n")
                if question == "presence":
                    self.rfile.read()  # until the client has gone

    Path(path).unlink(missing_ok=True)
    server = _Server(path, Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def _answer(process: EngineProcess, question: str) -> EngineAnswer:
    own = os.getpid()
    if question == "locate":
        try:
            return EngineAnswer(own, location=process.locate())
        except Exception as error:
            return EngineAnswer(own, failure=str(error) or type(error).__name__)
    if question == "roles":
        return EngineAnswer(own, roles=tuple(process.roles()))
    if question == "faults":
        return EngineAnswer(own, faults=tuple(process.faults()))
    return EngineAnswer(own)


class OwnEngine:
    """An `EngineHandle` on the process that answers, or is about to, at ``path``. The keeper of the
    server's processes starts another one when it has ended."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._presence: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._process: psutil.Process | None = None

    async def suits(self, configuration: EngineConfiguration) -> Suitability:
        """Always: it was started for this server. Waits until it answers at all. A process that is
        just dying may still take a connection, and never answers: that is not yet its successor,
        and no death that was seen."""
        while self._presence is None:
            try:
                presence = await asyncio.open_unix_connection(self._path, limit=MOST_ANSWER_BYTES)
            except (FileNotFoundError, *_NOT_NOW):
                await asyncio.sleep(CONNECT_SECONDS)
                continue
            try:
                answer = await _ask(*presence, "presence")
            except PeerLostError:
                presence[1].close()
                await asyncio.sleep(CONNECT_SECONDS)
                continue
            self._presence = presence
            with suppress(psutil.NoSuchProcess):
                self._process = psutil.Process(answer.process_id)
        return Suitability.SUITABLE

    async def located(self) -> EngineLocation | None:
        answer = await self._answer("locate")
        if answer.failure is not None:
            raise EngineRaisedError(answer.failure)
        return answer.location

    async def ended(self) -> None:
        assert self._presence is not None, "it is asked first whether it suits"
        with suppress(ConnectionError):
            await self._presence[0].read()
        raise PeerLostError("its process has ended")

    async def roles(self) -> Sequence[RunningRole]:
        return (await self._answer("roles")).roles

    async def faults(self) -> Sequence[LoggedFault]:
        return (await self._answer("faults")).faults

    def kill(self) -> None:
        if self._presence is not None:
            self._presence[1].close()
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                self._process.kill()

    async def _answer(self, question: Question) -> EngineAnswer:
        """Raises:
        PeerLostError: there is no answer.
        """
        while True:
            try:
                connection = asyncio.open_unix_connection(self._path, limit=MOST_ANSWER_BYTES)
                reader, writer = await connection
                break
            except BlockingIOError:
                await asyncio.sleep(CONNECT_SECONDS)
            except OSError as error:
                raise PeerLostError("its process has ended") from error
        try:
            return await _ask(reader, writer, question)
        finally:
            writer.close()


class OwnEngines:
    """An `EngineHost`: the one engine that another process keeps running at ``path``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find(self) -> None:
        """An engine that is there is waited for like one that is about to be."""

    def start(self, configuration: EngineConfiguration) -> OwnEngine:
        return OwnEngine(self._path)


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: Question
) -> EngineAnswer:
    try:
        writer.write(f"{question}\n".encode())
        await writer.drain()
        line = await reader.readline()
    except ConnectionError as error:
        raise PeerLostError("its process has ended") from error
    if not line:
        raise PeerLostError("its process has ended")
    return msgspec.json.decode(line, type=EngineAnswer)
