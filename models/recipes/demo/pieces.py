"""Training in pieces: when a piece is over, and the state that the next one begins with."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch


class UnfinishedError(Exception):
    """Training was stopped before its end; its state is kept."""


class Piece:
    """One call's share of a long training: over after ``minutes``, or when it is told to stop."""

    def __init__(self, minutes: float | None = None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60.0 * minutes
        self._told = False

    def stop(self) -> None:
        """Let the piece be over after the step that runs."""
        self._told = True

    def over(self) -> bool:
        """Whether the training has to keep its state and return."""
        return self._told or (self._end is not None and time.monotonic() >= self._end)

    @contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the piece instead of killing the process in a step."""

        def told(_signal: int, _frame: FrameType | None) -> None:
            self.stop()

        earlier = {each: signal.signal(each, told) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for each, handler in earlier.items():
                signal.signal(each, handler)


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Replace the file in one piece: a kill leaves the old state or the new."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def read_state(path: Path, made_by: dict[str, Any]) -> dict[str, Any] | None:
    """The state kept there, or nothing. Raises ValueError where another recipe made it."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    others = [
        f"{name} was {state['made_by'].get(name)}, is {value}"
        for name, value in made_by.items()
        if state["made_by"].get(name) != value
    ]
    if others:
        raise ValueError(f"the state in {path} is of another recipe: {'; '.join(others)}")
    return state
