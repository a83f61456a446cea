"""Where compiled kernels are kept between runs, and when they are stale.

numba renews a cached function when its own file changes, but not when a function it calls from
another file does. A kernel compiled from yesterday's sources could then decide today's tokens. So
the cache lives in a folder named after the contents of every kernel source.

Nor does numba keep processes apart that fill the cache together. Each looks for a free number in a
function's index, notes it there and then writes the code to the file of that number: two that
compile the function for different arguments may take the same one, and whoever loads it later runs
the code of the other's arguments. So one at a time writes here.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from kernels.home import VARIABLE, home_folder


def sources_digest(folder: Path) -> str:
    """A name for the exact contents of every Python file below ``folder``."""
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def keep_writers_apart() -> None:
    """From now on this process saves what it compiled while no other does."""
    from numba.core.caching import IndexDataCacheFile

    save = IndexDataCacheFile.save
    if hasattr(save, "__wrapped__"):
        return

    @functools.wraps(save)
    def save_alone(self: Any, key: Any, data: Any) -> None:
        with open(f"{self._index_path}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            save(self, key, data)

    IndexDataCacheFile.save = save_alone


def choose_cache_folder() -> None:
    """Point numba at the folder of these sources, unless the user named one; Triton, whose own
    cache knows when it is stale, at one beside it where the user named a home for all."""
    if VARIABLE in os.environ:
        os.environ.setdefault("TRITON_CACHE_DIR", str(home_folder() / "triton"))
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    folder = home_folder() / f"kernels-{sources_digest(Path(__file__).parent)}"
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    import numba  # reads the variable when first imported; set it again where it already was

    numba.config.CACHE_DIR = str(folder)
