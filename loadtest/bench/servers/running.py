"""A server in processes of its own: started, waited for, and ended with all that it started."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import psutil

from lexshard.cluster.ports import free_port
from lexshard.loadtest.bench.servers.command import ServerCommand
from lexshard.loadtest.bench.servers.processes import role_of
from lexshard.loadtest.client import is_healthy

START_SECONDS = 900.0  # a first start compiles kernels
STOP_SECONDS = 60.0
REST_SECONDS = 5.0  # that other processes have to end after the first one
CONNECT_SECONDS = 10.0
# Between two looks whether a server is there: short beside any start, and little work for it.
POLL_SECONDS = 0.05


class RunningServer:
    """A server that has been started. Its output is kept line by line, each with the seconds from
    the start of the process to its arrival."""

    def __init__(self, server: ServerCommand) -> None:
        port = free_port()
        self.name, self.url = server.name, f"http://127.0.0.1:{port}"
        self.lines: list[tuple[float, str]] = []
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            server.at(port),
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

    def roles(self) -> dict[int, str]:
        """What each of its processes is, by their ids."""
        found = {}
        for process in self.tree():
            with suppress(psutil.Error):
                found[process.pid] = role_of(process)
        return found

    def count(self, wanted: Sequence[str]) -> Counter[str]:
        """How many processes there are of each of the ``wanted`` roles."""
        return Counter(role for role in self.roles().values() if role in wanted)

    def find(self, role: str) -> psutil.Process:
        """The process of a role, the first of them where there are several.

        Raises RuntimeError where there is none.
        """
        for process_id, found in self.roles().items():
            if found == role:
                return psutil.Process(process_id)
        raise RuntimeError(f"no process of {self.name} is the {role}")

    def wait_for_port(self) -> float:
        """Seconds from the start until something listens at its address.

        Raises RuntimeError with the end of its output where it ends or takes too long.
        """
        while not listens(self.url):
            self._pause()
        return self.seconds()

    def wait_until_healthy(self) -> float:
        """Seconds from the start until it says that it is well; raises as above."""
        self.wait_for_port()
        while not is_healthy(self.url):
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
    processes is left is killed."""
    started = RunningServer(server)
    try:
        yield started
    finally:
        _end(started)


def listens(url: str) -> bool:
    """Whether connections are taken there."""
    address = urlsplit(url)
    place = (address.hostname or "127.0.0.1", address.port or 80)
    with suppress(OSError), socket.create_connection(place, timeout=CONNECT_SECONDS):
        return True
    return False


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    living = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def _end(server: RunningServer) -> None:
    known = set(server.tree())
    with suppress(ProcessLookupError):
        server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while server.process.poll() is None and time.monotonic() < deadline:
        known.update(server.tree())  # one that is ending may still start another
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(0.1)
    _, left = psutil.wait_procs(known, timeout=REST_SECONDS)
    if left := alive(left):
        print(f"{server.name}: {len(left)} processes did not end: killed", file=sys.stderr)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    server.process.wait()
