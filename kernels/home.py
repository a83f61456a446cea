"""Where files are that lexshard makes for a user: compiled kernels, indexes."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLE = "LEXSHARD_HOME"

logger = logging.getLogger("lexshard.home")


def home_folder() -> Path:
    """``LEXSHARD_HOME``, else a folder in the user's cache. It need not exist yet."""
    given, base = os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME")
    try:
        if given:
            return Path(given).expanduser().absolute()
        return (Path(base) if base else Path.home() / ".cache") / "lexshard"
    except RuntimeError:  # a user who has none: `writable` finds another place for that
        if given:
            raise
        return Path("/lexshard")


@functools.cache
def writable(folder: Path) -> Path:
    """``folder``, made where it is not there; if it cannot be written, one for it in a temporary
    folder of this user alone, which is told when that is made. Raises OSError where it is not."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return folder
    own = Path(tempfile.gettempdir()) / f"lexshard_{os.getuid()}"
    with suppress(FileExistsError):
        own.mkdir(0o700)
        logger.warning(
            "%s cannot be written: what is compiled and indexed is kept in %s, and made anew where "
            "that does not last; set %s to a folder that can be written",
            *(folder, own, VARIABLE),
        )
    found = own.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{own} is not this user's alone: set {VARIABLE} to another folder")
    there = own / folder.relative_to(folder.anchor)
    there.mkdir(parents=True, exist_ok=True)
    return there
