"""Processes that are kept: the end of one is known at once, and it can be started anew.

Each is told what to do by the first line of its standard input, which stays open: its end tells a
process that its keeper has gone.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO


@dataclass(frozen=True, slots=True)
class ProcessRole:
    """A process to keep: what is run, the line it is told, and files it is to have open."""

    name: str
    command: tuple[str, ...]
    order: bytes = b""
    files: tuple[int, ...] = ()


class KeptProcesses:
    """``ended`` is called with the name and the exit code of each process that has ended, in a
    thread of its own; ``output`` is where all print, None where this process does.

    A process is started in the thread that calls, and may end with it: let that be the main one.
    """

    def __init__(self, ended: Callable[[str, int], None], output: IO[bytes] | None = None) -> None:
        self._ended = ended
        self._output = output
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: ProcessRole) -> None:
        process = subprocess.Popen(
            role.command,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output and subprocess.STDOUT,
            pass_fds=role.files,
            start_new_session=True,  # a terminal's Ctrl-C is heard by their keeper alone
        )
        self._processes[role.name] = process
        assert process.stdin is not None
        try:
            process.stdin.write(role.order + b"\n")
            process.stdin.flush()
        except BrokenPipeError:  # it has ended already, which is told below
            pass
        threading.Thread(target=self._wait, args=[role.name, process], daemon=True).start()

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
