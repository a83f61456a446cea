"""The steps of a build, each kept beside the output until the whole is done."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from lexshard.actors.index.container import (
    INDEX,
    FileKind,
    Header,
    Part,
    read_header,
    read_part,
    write,
)
from lexshard.actors.index.metadata import Weights


class Progress(Protocol):
    """Told what a build is doing."""

    def begin(self, step: str) -> None:
        """The next step begins, whatever the last one reported."""

    def advance(self, share: float) -> None:
        """``share`` of the current step is done."""

    def close(self) -> None:
        """Nothing more comes."""


class ProgressBar:
    """Progress of ``steps`` steps on the terminal, silent where there is none."""

    def __init__(self, steps: int) -> None:
        from tqdm import tqdm

        shape = "{desc:<22} {percentage:3.0f}%|{bar}| {elapsed}"
        self._bar = tqdm(total=steps, bar_format=shape, disable=None)
        self._begun = 0

    def begin(self, step: str) -> None:
        self._bar.n = self._begun
        self._begun += 1
        self._bar.set_description_str(step)

    def advance(self, share: float) -> None:
        self._bar.update(share)

    def close(self) -> None:
        self._bar.close()


class BuildSteps:
    """Parts made once: taken from an interrupted build, or from the file to be replaced, where
    what they were made from is the same.

    ``out`` is the file to be. One build at a time works in a folder: see `alone`.
    """

    def __init__(
        self, out: Path, weights: Weights, progress: Progress, kind: FileKind = INDEX
    ) -> None:
        self._out = out
        self._weights = weights
        self._progress = progress
        self._kind = kind
        self._parts: dict[str, Path] = {}

    def make(
        self, name: str, arguments: dict[str, Any], work: Callable[[], tuple[Any, dict[str, Any]]]
    ) -> Part:
        """The part ``name``, made by ``work() -> (about, tensors)`` unless it is there already.

        ``arguments`` is everything but the weights that it depends on, as plain data.
        """
        self._progress.begin(name)
        made_from = json.dumps([name, arguments, self._weights.hash], sort_keys=True)
        identity = hashlib.sha256(made_from.encode()).hexdigest()
        kept = self._out.with_name(f"{self._out.name}.part-{name}")
        for path in (kept, self._out):
            part = self._found(path, name, identity)
            if part is not None:
                self._parts[name] = path
                return part
        about, tensors = work()
        part = Part(identity, about, tensors)
        write(kept, self._weights, {name: part}, self._kind)
        self._parts[name] = kept
        return part

    def finish(self, kept: Collection[str] | None = None) -> Header:
        """The parts ``kept`` (None: all made) in one file; the pieces disappear."""
        self._progress.begin("writing")
        parts = {
            name: read_part(path, read_header(path, self._kind), name, self._kind)
            for name, path in self._parts.items()
            if kept is None or name in kept
        }
        header = write(self._out, self._weights, parts, self._kind)
        for ending in ("part-*", "unfinished-*"):  # the latter of builds that were killed
            for piece in self._out.parent.glob(f"{self._out.name}.{ending}"):
                piece.unlink()
        self._progress.advance(1.0)
        return header

    def _found(self, path: Path, name: str, identity: str) -> Part | None:
        if not path.is_file():
            return None
        try:
            header = read_header(path, self._kind)
            if name in header.parts and header.parts[name].identity == identity:
                return read_part(path, header, name, self._kind)
        except self._kind.error:
            return None  # damaged: made again
        return None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits until no other process builds in the folder, and keeps others waiting."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
