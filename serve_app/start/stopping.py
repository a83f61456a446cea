"""How a server is told to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from lexshard.cluster.process_tree import end_descendants

INTERRUPTED = 130


class StopRequest:
    """Made by the first SIGINT or SIGTERM; the second one ends everything at once."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def listen(self) -> None:
        """Take over both signals; call in the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)

    def then(self, act: Callable[[], object]) -> None:
        """Calls ``act`` once it is made, in a thread that waits for that."""

        def wait() -> None:
            self._event.wait()
            act()

        threading.Thread(target=wait, daemon=True).start()

    def _hear(self, signal_number: int, frame: FrameType | None) -> None:
        if self._event.is_set():
            end_descendants()
            os._exit(INTERRUPTED)
        self._event.set()

    @property
    def made(self) -> bool:
        return self._event.is_set()
