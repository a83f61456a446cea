"""A server in processes of its own: started, waited for, and ended with all that it started."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from urllib.parse import urlsplit

import psutil

from lexshard.cluster.ports import free_port
from lexshard.loadtest.bench.servers.roles import role_of
from lexshard.loadtest.bench.servers.server_command import PORT, ServerCommand

START_SECONDS = 900.0  # a first start compiles kernels
STOP_SECONDS = 60.0
REST_SECONDS = 5.0  # that other processes have to end after the first one
ANSWER_SECONDS = 10.0
# Between two looks whether a server is there: short beside any start, and little work for it.
POLL_SECONDS = 0.05


class RunningServer:
    """A server that has been started. Its output is kept line by line, each with the seconds from
    the start of the process to its arrival."""

    def __init__(self, server: ServerCommand) -> None:
        fixed = PORT not in " ".join((*server.command, server.url))
        at = server.at(0 if fixed else free_port())
        self.name, self.url = at.name, at.url
        if listens(self.url):
            raise RuntimeError(f"{self.name}: somebody listens at {self.url} already")
        self.lines: list[tuple[float, str]] = []
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            at.command,
            env=server.whole_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C is heard here alone
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def seconds(self) -> float:
        """Since the process was started."""
        return time.perf_counter() - self.began

    def tree(self) -> list[psutil.Process]:
        """All of its processes, the first one included; none once that has ended."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def find(self, role: str) -> psutil.Process:
        """The process of a role, the first of them where there are several.

        Raises:
            RuntimeError: there is none.
        """
        for process in self.tree():
            with suppress(psutil.Error):
                if role_of(process) == role:
                    return process
        raise RuntimeError(f"no process of {self.name} is the {role}")

    def wait_for_port(self) -> float:
        """Seconds from the start until somebody listens at its address.

        Raises:
            RuntimeError: it has ended, or takes too long; with the last that it said.
        """
        while not listens(self.url):
            self._pause()
        return self.seconds()

    def wait_until_healthy(self) -> float:
        """Seconds from the start until it says that it is well.

        Raises:
            RuntimeError: as above.
        """
        self.wait_for_port()
        while not answers(self.url):
            self._pause()
        return self.seconds()

    def last_words(self) -> str:
        """The end of its output."""
        return "".join(line for _, line in self.lines[-20:])

    def _pause(self) -> None:
        if self.process.poll() is not None:
            time.sleep(POLL_SECONDS)  # for the last lines to arrive
            raise RuntimeError(f"{self.name} has ended:\n{self.last_words()}")
        if self.seconds() > START_SECONDS:
            raise RuntimeError(f"{self.name} does not serve:\n{self.last_words()}")
        time.sleep(POLL_SECONDS)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append((self.seconds(), line.decode(errors="replace")))


@contextmanager
def running(server: ServerCommand) -> Iterator[RunningServer]:
    """The server, just started; on the way out it is told to end and waited for, and what of its
    processes is left is killed.

    Raises:
        RuntimeError: somebody else is where it is to be.
    """
    started = RunningServer(server)
    try:
        yield started
    finally:
        _end(started)


def listens(url: str) -> bool:
    """Whether anybody takes connections there."""
    address = urlsplit(url)
    place = (address.hostname or "127.0.0.1", address.port or 80)
    with suppress(OSError), socket.create_connection(place, timeout=ANSWER_SECONDS):
        return True
    return False


def answers(url: str) -> bool:
    """Whether a server is well: what ``/health`` says, else whether there is ``/v1/models``."""
    address = urlsplit(url)
    for path in ("/health", "/v1/models"):
        connection = http.client.HTTPConnection(address.netloc, timeout=ANSWER_SECONDS)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("GET", address.path.rstrip("/") + path)
            status = connection.getresponse().status
            if status != 404:
                return status == 200
            continue
        return False
    return False


def _end(server: RunningServer) -> None:
    known = set(server.tree())
    with suppress(ProcessLookupError):
        server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while server.process.poll() is None and time.monotonic() < deadline:
        known.update(server.tree())  # whoever is ending may still start another
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(0.1)
    _, left = psutil.wait_procs(known, timeout=REST_SECONDS)
    if left := [process for process in left if not _is_zombie(process)]:
        print(f"{server.name}: {len(left)} processes did not end: killed", file=sys.stderr)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    server.process.wait()


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
