"""A server of this machine alone, in plain processes: an engine, API processes, and HAProxy before
them. Nothing of Ray's is started or imported.

The process that owns them waits for what happens to them and does nothing else: one that ends is
started anew, and the others go on. An engine's successor is handed every unfinished request by the
API processes; what an API process has open is lost with it, and its successor takes the requests
that came meanwhile.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from bisect import insort
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

import msgspec

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.engine.own_process import EngineOrder
from lexshard.cluster.ingress import haproxy_binary
from lexshard.cluster.own_ingress import write_configuration
from lexshard.cluster.private_folder import PrivateFolder, remove_abandoned_folders
from lexshard.cluster.process_tree import adopt_orphans, end_descendants, reap_orphans
from lexshard.cluster.roles.process import KeptProcesses, ProcessRole, command_of
from lexshard.serve_app.api_processes.messages import ApiOrder, Said
from lexshard.serve_app.observability.logs import print_lines
from lexshard.serve_app.start.banner import banner
from lexshard.serve_app.start.preflight import certificate_with_key, check_listening
from lexshard.serve_app.start.stopping import StopRequest

ENGINE, INGRESS, API = "engine", "ingress", "api"
BACKLOG = 2048
PAUSE_SECONDS = 5.0  # before a process that has just been started anew is started once more
FAREWELL_SECONDS = 10.0  # for processes to end, after the streams have had their time
ENGINE_SECONDS = 3.0  # for the engine to end, after all others
STARTS = 3  # of an engine; one that has ended as often before it was ever ready never will be


@dataclass(frozen=True, slots=True)
class ServerModules:
    """What is run in the processes; without an engine's the API processes have their own."""

    api: str = "lexshard.serve_app.api_processes.api_process"
    engine: str | None = "lexshard.cluster.engine.main"


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that is kept has ended."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class Due:
    """The pause before a process is started again is over."""

    name: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The server has been told to stop, or the time it had for that is over."""


Event = Ended | Due | StopAsked | tuple[str, Said]


class EmbeddedServer:
    """One run of a server, which begins when it is made."""

    def __init__(self, config: ServeConfig, modules: ServerModules) -> None:
        self._config = config
        self._modules = modules
        self._began = time.monotonic()
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._awaited: list[tuple[float, Event]] = []  # with their times, the next one first
        self._roles: dict[str, ProcessRole] = {}
        self._started_anew: dict[str, float] = {}
        self._running: set[str] = set()
        self._ready: set[str] = set()
        self._failed_starts = 0
        self._announced = False
        self._told = ""

    def serve(self, stop: StopRequest) -> int:
        """The exit code, when everything has ended. Call it once, in the main thread. Raises
        StartupError where another program has taken the port meanwhile."""
        adopt_orphans()
        remove_abandoned_folders()
        with ExitStack() as ends:
            folder = PrivateFolder()
            ends.callback(folder.remove)
            output = _json_lines(ends) if self._config.log_format == "json" else None
            ends.callback(end_descendants)
            kept = KeptProcesses(lambda *ended: self._events.put(Ended(*ended)), output)
            self._tell("starting the engine")
            for role in self._make_roles(folder.path, ends):
                self._roles[role.name] = role
                self._start(kept, role.name)
            stop.then(lambda: self._events.put(StopAsked()))
            return self._keep(kept)

    # -- what happens -----------------------------------------------------------------------------

    def _keep(self, kept: KeptProcesses) -> int:
        """Starts anew what ends, until the server is to stop or cannot start; the exit code."""
        while True:
            match self._next():
                case StopAsked():
                    return self._stop(kept)
                case Due(name):
                    self._start_anew(kept, name)
                case Ended(name, code):
                    self._running.discard(name)
                    if not self._announced and code and name != ENGINE:
                        if name == INGRESS:
                            check_listening(self._config)
                        return self._failed(f"a process ({name}) ended with code {code}")
                    if name == ENGINE and not self._ready:
                        self._failed_starts += 1
                        how = f"the engine {_ending(code)} before it was ready"
                        if self._failed_starts == STARTS:
                            return self._failed(f"{how}, {STARTS} times: it cannot start")
                        self._tell(f"{how}; starting it again")
                    self._start_again(kept, name)
                case (name, said):
                    if said.failure is None:
                        self._hear(name, said)
                    elif self._announced:  # it looks for no other engine: it is to end this one
                        kept.let_go(name)
                    else:
                        return self._failed(said.failure)

    def _stop(self, kept: KeptProcesses) -> int:
        """API processes end when every open stream has ended or was told; the engine with the last
        of them, and HAProxy when there is none left to answer."""
        if not self._announced:  # no client is served: there is none to be told
            return 0
        for name in self._running - {ENGINE, INGRESS}:
            kept.let_go(name)
        self._later(self._config.shutdown_grace_seconds + FAREWELL_SECONDS, StopAsked())
        while left := self._running - {INGRESS}:
            if left == {ENGINE}:  # it has been told, unless it was just starting
                self._later(ENGINE_SECONDS, Due(ENGINE))
            match self._next():
                case Ended(name, _):
                    self._running.discard(name)
                case Due(name) if name == ENGINE and left == {ENGINE}:
                    break  # not the pause before a start, which may have been pending
                case StopAsked():
                    print("lexshard: not everything ends; killing it", file=sys.stderr, flush=True)
                    break
        return 0

    def _failed(self, reason: str) -> int:
        print_lines(f"lexshard: {reason}", self._config.log_format, sys.stderr)
        return 1

    def _hear(self, name: str, said: Said) -> None:
        if said.waiting is not None:
            if said.waiting != self._told and not self._announced:
                self._tell(said.waiting)
            self._told = said.waiting
        elif said.information is not None:
            self._ready.add(name)
            if len(self._ready) == self._config.api_processes and not self._announced:
                self._announced = True
                text = banner(self._config, said.information, said.has_chat)
                with suppress(OSError):  # a reader that leaves at its first line has left by now
                    print_lines(text, self._config.log_format)

    def _start(self, kept: KeptProcesses, name: str) -> None:
        kept.start(self._roles[name])
        self._running.add(name)

    def _start_again(self, kept: KeptProcesses, name: str) -> None:
        """At once, or after a pause where that has only just been done before."""
        reap_orphans(kept.process_ids())
        if time.monotonic() - self._started_anew.get(name, -math.inf) < PAUSE_SECONDS:
            self._later(PAUSE_SECONDS, Due(name))
        else:
            self._start_anew(kept, name)

    def _start_anew(self, kept: KeptProcesses, name: str) -> None:
        self._started_anew[name] = time.monotonic()
        try:
            self._start(kept, name)
        except OSError as error:  # no memory, or no room for a process, at the moment
            with suppress(OSError):  # what read the log may have gone
                self._tell(f"a process ({name}) cannot be started yet: {error}")
            self._later(PAUSE_SECONDS, Due(name))

    def _later(self, seconds: float, event: Event) -> None:
        """Without a thread of its own: there may be none to be had."""
        insort(self._awaited, (time.monotonic() + seconds, event), key=itemgetter(0))

    def _next(self) -> Event:
        """What happens next, when it does."""
        if not self._awaited:
            return self._events.get()
        try:
            return self._events.get(timeout=max(0.0, self._awaited[0][0] - time.monotonic()))
        except Empty:
            return self._awaited.pop(0)[1]

    def _tell(self, message: str) -> None:
        line = f"[{time.monotonic() - self._began:5.1f} s] {message}"
        print_lines(line, self._config.log_format)

    # -- what is run ------------------------------------------------------------------------------

    def _make_roles(self, folder: Path, ends: ExitStack) -> list[ProcessRole]:
        config = self._config
        engine_path = str(folder / "engine")
        roles: list[ProcessRole] = []
        if self._modules.engine is not None:  # first: nothing takes longer
            told = EngineOrder(msgspec.to_builtins(config.engine_configuration), engine_path)
            roles.append(_python(ENGINE, self._modules.engine, told))
        binary = haproxy_binary()
        paths = [str(folder / f"api-{index}") for index in range(config.api_processes)]
        listener: socket.socket | None = None
        if binary is None:
            self._tell("no HAProxy here: slow clients reach the API processes themselves")
            check_listening(config)
            listener = _listening(config.host, config.port)
        elif len(paths) == 1:  # of several, each listens for itself: HAProxy asks those that do
            listener = _listening_file(paths[0])
        if listener is not None:
            ends.callback(listener.close)
        for index, path in enumerate(paths):
            name = f"{API} {index}"
            order = ApiOrder(
                config=config.model_dump_json(by_alias=True),
                folder=str(folder),
                start_time=int(time.time()),
                engine=engine_path,
                told=self._listen(name, ends),
                behind_haproxy=binary is not None,
                listener=None if listener is None else listener.fileno(),
                path=path if listener is None else None,
            )
            files = (order.told,) if order.listener is None else (order.listener, order.told)
            roles.append(_python(name, self._modules.api, order, files))
        if binary is not None:
            certificate = certificate_with_key(config)
            written = write_configuration(folder, config.host, config.port, paths, certificate)
            own = binary, str(written), str(os.getpid())
            command = command_of("lexshard.cluster.own_ingress", *own)
            roles.append(ProcessRole(INGRESS, command))
        return roles

    def _listen(self, name: str, ends: ExitStack) -> int:
        """A pipe by which the process of that name, and those that follow it, are heard; where to
        write."""
        read, write = os.pipe()
        ends.callback(os.close, write)

        def hear() -> None:
            with os.fdopen(read, "rb") as lines:
                for line in lines:
                    self._events.put((name, msgspec.json.decode(line, type=Said)))

        threading.Thread(target=hear, daemon=True).start()
        return write


def serve_embedded(
    config: ServeConfig, stop: StopRequest, modules: ServerModules = ServerModules()
) -> int:
    """Starts the server and stays until it is told to stop; when it returns, with an exit code,
    everything has ended."""
    return EmbeddedServer(config, modules).serve(stop)


def _python(
    name: str, module: str, order: msgspec.Struct, files: tuple[int, ...] = ()
) -> ProcessRole:
    return ProcessRole(name, command_of(module), msgspec.json.encode(order), files)


def _ending(code: int) -> str:
    """How a process has ended, in words."""
    if code >= 0:
        return f"ended with code {code}"
    why = ": out of memory?" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.strsignal(-code)}{why})"


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def _listening_file(path: str) -> socket.socket:
    """Open in this process, too: a client that comes while an API process is replaced waits for
    the next one instead of being refused."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(BACKLOG)
    return listener


def _json_lines(ends: ExitStack) -> IO[bytes]:
    """Where processes print what is then printed here, one JSON object a line."""
    read, write = os.pipe()
    lines = os.fdopen(read, "rb")

    def pass_on() -> None:
        with lines:
            for line in lines:
                with suppress(OSError):  # what read the log may have gone: the processes go on
                    print_lines(line.decode(errors="replace"), "json")

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    output = os.fdopen(write, "wb")
    ends.callback(thread.join, FAREWELL_SECONDS)  # all has ended: so do the lines
    ends.callback(output.close)
    return output
