"""Processes that end with their parent, and one that leaves no orphans.

On systems without Linux's process control the promises are Ray's own: its workers notice the death
of their node within some ten seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from typing import NoReturn

import psutil

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LAST_WAIT_SECONDS = 2.0


def die_with_parent(parent: int | None = None) -> None:
    """From now on the kernel kills this process when the one that started it ends. Ends at once
    where that is known to be process ``parent`` and has ended already."""
    _control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if parent not in (None, os.getppid()):
        os._exit(1)


def adopt_orphans() -> None:
    """From now on every descendant whose parent ends becomes a child of this process."""
    _control(_SET_CHILD_SUBREAPER, 1)


def reap_orphans(own: Collection[int]) -> None:
    """Forgets the adopted children that have ended; those of this process's ``own`` are waited for
    by others."""
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid not in own and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def end_descendants() -> None:
    """Kills every process that this one or a descendant of it started."""
    this = psutil.Process()
    deadline = time.monotonic() + _LAST_WAIT_SECONDS
    while (left := this.children(recursive=True)) and time.monotonic() < deadline:
        for process in left:  # again and again: a dying one may still start another
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)


def leave(code: int) -> NoReturn:
    """Ends this process, all of whose work is done, without what libraries would tidy up in it:
    with torch and numba that takes a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _control(operation: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(operation, value, 0, 0, 0)
