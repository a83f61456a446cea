"""Where files are that lexshard makes for a user: compiled kernels, indexes."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "LEXSHARD_HOME"


def home_folder() -> Path:
    """``LEXSHARD_HOME``, else a folder in the user's cache. It need not exist yet."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lexshard"
