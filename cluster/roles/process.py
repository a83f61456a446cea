"""A role as a plain process of this machine, and several that are kept.

Each is told what to do by the first line of its standard input, which stays open: its end tells a
process that its owner has gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TypeVar

import msgspec

Order = TypeVar("Order", bound=msgspec.Struct)


def command_of(module: str, *arguments: str) -> tuple[str, ...]:
    """What runs a ``module`` of ours; the folder where it is started shadows nothing of it."""
    return (sys.executable, "-P", "-m", module, *arguments)


@dataclass(frozen=True, slots=True)
class ProcessRole:
    """A process to start: what is run, the line it is told, and files it is to have open."""

    name: str
    command: tuple[str, ...]
    order: bytes = b""
    files: tuple[int, ...] = ()


def start_process(
    role: ProcessRole, output: IO[bytes] | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """The process, told its order. ``output`` is where it prints, None where this process does;
    ``environment`` adds to this process's."""
    process = subprocess.Popen(
        role.command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output and subprocess.STDOUT,
        pass_fds=role.files,
        env=None if environment is None else {**os.environ, **environment},
        start_new_session=True,  # a terminal's Ctrl-C is heard by its owner alone
    )
    assert process.stdin is not None
    try:
        process.stdin.write(role.order + b"\n")
        process.stdin.flush()
    except BrokenPipeError:  # it has ended already, as its owner will see
        pass
    return process


def read_order(kind: type[Order]) -> Order:
    """In a process that was started: what it was told."""
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


def end_with_owner() -> None:
    """From now on this process ends with its standard input."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


class KeptProcesses:
    """Several whose ends are known at once, and that can be started anew.

    ``ended`` is called with the name and the exit code of each that has ended, in a thread of its
    own; ``output`` is where all print, None where this process does. A process is started in the
    thread that calls, and may end with it: let that be the main one.
    """

    def __init__(self, ended: Callable[[str, int], None], output: IO[bytes] | None = None) -> None:
        self._ended = ended
        self._output = output
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: ProcessRole) -> None:
        """Raises OSError where there is no room for a process, or for the thread that waits."""
        process = start_process(role, self._output)
        try:
            threading.Thread(target=self._wait, args=[role.name, process], daemon=True).start()
        except RuntimeError as error:
            process.kill()
            process.wait()
            raise OSError(str(error)) from error
        self._processes[role.name] = process

    def process_ids(self) -> set[int]:
        """Of those that were started last, by name."""
        return {process.pid for process in self._processes.values()}

    def let_go(self, name: str) -> None:
        """Ends its standard input, by which it is to end in its own time."""
        process = self._processes.get(name)
        if process is not None and process.stdin is not None:
            process.stdin.close()

    def _wait(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._ended(name, process.wait())
