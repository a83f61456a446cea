"""A process of a server without Ray that ends: another one at once, unless it does so again."""

from __future__ import annotations

from typing import Any

import pytest

from lexshard.cluster.config import ServeConfig
from lexshard.cluster.roles.process import ProcessRole
from lexshard.serve_app.start import embedded
from lexshard.serve_app.start.embedded import (
    ENGINE,
    PAUSE_SECONDS,
    Due,
    EmbeddedServer,
    ServerModules,
)


class Kept:
    """Notes what is started."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(self, role: ProcessRole) -> None:
        self.started.append(role.name)

    def process_ids(self) -> set[int]:
        return set()


def test_a_first_death_is_answered_at_once_and_one_that_follows_it_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    later: list[tuple[float, Any]] = []
    monkeypatch.setattr(embedded, "reap_orphans", lambda known: None)
    monkeypatch.setattr(embedded.time, "monotonic", lambda: now[0])
    server = EmbeddedServer(ServeConfig(model="m"), ServerModules())
    monkeypatch.setattr(server, "_later", lambda seconds, event: later.append((seconds, event)))
    server._roles[ENGINE] = ProcessRole(ENGINE, ("engine",))
    kept: Any = Kept()

    server._start_again(kept, ENGINE)
    assert kept.started == [ENGINE]
    now[0] += 1.0
    server._start_again(kept, ENGINE)
    assert kept.started == [ENGINE]
    assert later == [(PAUSE_SECONDS, Due(ENGINE))]
    now[0] += PAUSE_SECONDS
    server._start_again(kept, ENGINE)
    assert kept.started == [ENGINE, ENGINE]
