"""Where compiled kernels are kept between runs, and when they are stale.

numba renews a cached function when its own file changes, but not when a function it calls from
another file does. A kernel compiled from yesterday's sources could then decide today's tokens. So
the cache lives in a folder named after the contents of every kernel source, and every checkout
and environment with these shares it.

Nor does numba keep processes apart that fill the cache together. Each looks for a free number in a
function's index, notes it there and then writes the code to the file of that number: two that
compile the function for different arguments may take the same one, and a process that loads it
later runs the code of the other's arguments. So one at a time writes here.

Whatever else this process compiles with numba is kept where numba keeps it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numba
from numba.core.caching import Cache, CacheImpl, IndexDataCacheFile, UserProvidedCacheLocator

from lexshard.kernels.home import VARIABLE, home_folder, writable

PACKAGE, KERNELS = "lexshard.", "lexshard.kernels."
TRITON_VARIABLE = "TRITON_CACHE_DIR"

_warn_once = functools.cache(logging.getLogger("lexshard.kernels").warning)


def sources_digest(folder: Path, *, triton: bool = True) -> str:
    """A name for the exact contents of every Python file below ``folder``, or of those without
    Triton, on which nothing that numba compiles depends."""
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        if triton or b"\nimport triton" not in content:
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(content)
    return digest.hexdigest()


@functools.cache
def _own_name() -> str:
    own = sources_digest(Path(__file__).parent, triton=False)
    # What another numba compiled it does not tell apart.
    return f"kernels-{own}-numba-{numba.__version__}"


def compiled_folder() -> Path:
    """Where compiled kernels are, by sources: in ``NUMBA_CACHE_DIR``, else in the home folder."""
    named = Path(numba.config.CACHE_DIR or home_folder())
    # Whoever names what this function gave means that.
    return named if named.name == _own_name() else named / _own_name()


@functools.cache
def _contents(file: str) -> str:
    return hashlib.blake2b(Path(file).read_bytes()).hexdigest()


class KernelLocator(UserProvidedCacheLocator):
    """Tells numba the folder of a function of this package; of any other it says nothing."""

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        super().__init__(py_func, py_file)
        module, folder = py_func.__module__, compiled_folder()
        # What is no kernel may differ between checkouts with the same kernels.
        shared = module.startswith(KERNELS)
        # Where none can be written numba would look beside the sources, and find yesterday's.
        self._cache_path = str(
            writable(folder / (module if shared else self.get_suitable_cache_subpath(py_file)))
        )

    def get_source_stamp(self) -> str:
        """By contents; older versions of numba go by the time of the last change."""
        return _contents(self._py_file)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> KernelLocator | None:
        if not py_func.__module__.startswith(PACKAGE):
            return None
        # As of the class above, which answers only where NUMBA_CACHE_DIR is set.
        return super(UserProvidedCacheLocator, cls).from_function(py_func, py_file)


def keep_compiled_kernels() -> None:
    """From now on functions of this package are kept in `compiled_folder`, written by one process
    at a time. Triton, whose own cache knows when it is stale, keeps its kernels beside it where
    ``LEXSHARD_HOME`` names a home for all, or the user's cannot be written."""
    home, named = home_folder(), os.environ.get(TRITON_VARIABLE)
    if named or VARIABLE in os.environ or writable(home) != home:
        found = writable(Path(named).expanduser()) if named else writable(home) / "triton"
        os.environ[TRITON_VARIABLE] = str(found)
    locators = CacheImpl._locator_classes
    if KernelLocator not in locators:
        locators.insert(0, KernelLocator)
        IndexDataCacheFile.save = _one_at_a_time(IndexDataCacheFile.save)
        IndexDataCacheFile._load_index = _of_whole_files(IndexDataCacheFile._load_index)
        Cache._guard_against_spurious_io_errors = _or_without


def compiled_as(name: str, function: Callable[..., Any]) -> Any:
    """A function that is made several times, of other numbers each, compiled under a ``name`` that
    tells these. numba tells functions of one name apart by a number that every process counts on
    its own: from a cache that several filled, one could be linked in the place of another.

    It may close over numbers; over compiled functions it must not, which no other process would
    find in the cache.
    """
    function.__qualname__ = name
    return numba.njit(nogil=True, cache=True, inline="never")(function)


def _one_at_a_time(save: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    @functools.wraps(save)
    def save_alone(self: Any, key: Any, data: Any) -> None:
        if _own_name() not in Path(self._index_path).parts:
            save(self, key, data)
            return
        with open(f"{self._index_path}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            save(self, key, data)

    return save_alone


def _of_whole_files(load_index: Callable[[Any], dict[Any, str]]) -> Callable[[Any], dict[Any, str]]:
    """Nothing where a loss of power has left an index or what it names empty or torn."""

    def load(self: Any) -> dict[Any, str]:
        whole: dict[Any, str] = {}
        with suppress(Exception):  # whatever a torn file makes of an unpickler
            for key, name in load_index(self).items():
                with suppress(OSError):
                    if os.path.getsize(self._data_path(name)):
                        whole[key] = name
        return whole

    return load


@contextmanager
def _or_without(_: Any) -> Iterator[None]:
    """Around what numba reads and writes: where that fails, as on a full disk, it compiles."""
    try:
        yield
    except (OSError, EOFError, UnpicklingError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        _warn_once("kernels are compiled that %s does not keep: %s", compiled_folder(), reason)
