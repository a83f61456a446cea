"""A clock that stands still until a sleep."""

from __future__ import annotations

from types import ModuleType

import pytest


class ManualClock:
    """In the place of what modules call ``time``: what is measured does not depend on what else
    the machine does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self._now = 0.0
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
