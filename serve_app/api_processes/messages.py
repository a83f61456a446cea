"""What the owner of a server without Ray and its API processes tell each other."""

from __future__ import annotations

from typing import Any

import msgspec


class ApiOrder(msgspec.Struct, frozen=True):
    """What an API process is told. It listens, to HAProxy or to clients, at the socket
    ``listener``, which it finds open, or at the file ``path``. ``told`` is open, too: there it
    writes what it has to say of its start."""

    config: str
    folder: str
    start_time: int
    engine: str
    told: int
    behind_haproxy: bool
    listener: int | None = None
    path: str | None = None


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an API process says, a line of JSON each time: that it waits, and for what; that it can
    never serve; or that it serves, with the engine's information."""

    waiting: str | None = None
    failure: str | None = None
    information: dict[str, Any] | None = None
    has_chat: bool = False
