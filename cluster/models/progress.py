"""How far a download is: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Announce = Callable[[str], None]
LINE_SECONDS = 15.0


class FetchProgress:
    """Bytes of ``name`` that are there, of ``total``; ``there`` of them from an earlier start.

    Several threads may add to it. ``terminal`` None looks whether there is one.
    """

    def __init__(
        self, name: str, total: int, there: int, announce: Announce, *, terminal: bool | None = None
    ) -> None:
        self._name, self._total, self._there = name, total, there
        self._announce = announce
        self._lock = threading.Lock()
        self._told = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty() if terminal is None else terminal:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, initial=there, desc=name, unit="B", unit_scale=True, unit_divisor=1024
            )

    def add(self, count: int) -> None:
        """``count`` more bytes are there; fewer where some turned out useless."""
        with self._lock:
            self._there += count
            if self._bar is not None:
                self._bar.update(count)
            elif time.monotonic() - self._told >= LINE_SECONDS:
                self._told = time.monotonic()
                self._announce(
                    f"fetched {in_units(self._there)} of {in_units(self._total)} of {self._name}"
                )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def tell(text: str) -> None:
    """What commands announce whose output is something else."""
    print(f"lexshard: {text}", file=sys.stderr, flush=True)


def in_units(count: int) -> str:
    """Bytes in the unit that people would take."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
