"""Folders for socket files: only this user enters them, and those of dead owners are found.

An owner holds a lock on a file in its folder. The system takes the lock from a process that ends,
however it ends, so a folder whose lock can be had has no owner. It holds one on the folder, too:
what clears temporary directories of old files (systemd-tmpfiles) leaves out those that are locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "lexshard-"
_UNFINISHED_PREFIX = ".lexshard-"
_LOCK = "owner"


class PrivateFolder:
    """A new folder in the temporary directory, for as long as this process needs it."""

    def __init__(self) -> None:
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED_PREFIX))
        self._lock = os.open(unfinished / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._folder = os.open(unfinished, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for descriptor in (self._lock, self._folder):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Under its own name only now: no process may find it before it is locked.
        self.path = unfinished.with_name(PREFIX + unfinished.name.removeprefix(_UNFINISHED_PREFIX))
        unfinished.rename(self.path)

    def remove(self) -> None:
        """Twice does no harm, nor that another program has cleared the temporary directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            os.close(self._folder)
            self._lock = -1


def remove_abandoned_folders() -> int:
    """Removes the folders of this user whose owners have ended; how many there were."""
    removed = 0
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # none of ours
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
        except OSError:  # its owner lives
            pass
        finally:
            os.close(lock)
    return removed
