"""What an earlier start found out and need not find out again where nothing has changed.

One small JSON file each in the home folder, with the fingerprint of everything that it depends on.
A file that is missing, stale or unreadable costs the time to find out again, nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from lexshard.actors.machine import processor_model
from lexshard.kernels.compile_cache import sources_digest
from lexshard.kernels.home import home_folder
from lexshard.kernels.team.cores import available_cores

logger = logging.getLogger("lexshard.remembered")

# What computes here, beside our own sources.
_LIBRARIES = ("llvmlite", "numba", "numpy", "safetensors", "tokenizers", "torch", "transformers")
_OWN_SOURCES = ("actors", "kernels")

Value = TypeVar("Value")


def recall(name: str, fingerprint: str, kind: type[Value]) -> Value | None:
    """What was remembered under ``name`` when ``fingerprint`` was the same; else None."""
    try:
        import msgspec
    except ImportError:  # a machine for benchmarks alone, where nothing was remembered
        return None
    path = _path(name)
    try:
        stored = json.loads(path.read_bytes())
        if stored["fingerprint"] != fingerprint:
            return None
        return msgspec.convert(stored["value"], kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s): it is found out again", path, error)
        return None


def remember(name: str, fingerprint: str, value: object) -> None:
    """Keep ``value``, a dataclass or what JSON has, in the place of what ``name`` had. Where the
    home folder cannot be written nothing is kept."""
    try:
        import msgspec
    except ImportError:
        return
    path = _path(name)
    content = msgspec.json.encode({"fingerprint": fingerprint, "value": value})
    unfinished = path.with_name(f"{path.name}.unfinished-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        logger.debug("%s cannot be kept: %s", path, error)
        with suppress(OSError):
            unfinished.unlink()


def fingerprint(*parts: object) -> str:
    """A name for the exact values of ``parts``, by what they print as."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=20).hexdigest()


@functools.cache
def software_and_machine() -> str:
    """A name for what computes: our sources, the libraries' versions, the processor and how many of
    its cores this process may use."""
    from llvmlite import binding
    from numba.core.config import CPU_FEATURES

    from lexshard.kernels.processor import processor_name

    root = Path(__file__).parents[1]
    return fingerprint(
        *(sources_digest(root / folder) for folder in _OWN_SOURCES),
        *(f"{library} {_version(library)}" for library in _LIBRARIES),
        platform.platform(),
        processor_model(),
        available_cores(),
        processor_name(),
        CPU_FEATURES or binding.get_host_cpu_features().flatten(),
    )


def files_fingerprint(paths: Iterable[Path]) -> str:
    """A name for files as they are now, by where they lie, their sizes and when they were written:
    their contents are not read. Raises OSError where one is missing."""
    known = []
    for path in sorted(paths):
        found = path.stat()
        known.append((str(path.resolve()), found.st_size, found.st_mtime_ns))
    return fingerprint(*known)


def _path(name: str) -> Path:
    return home_folder() / "remembered" / f"{name}.json"


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "none"
