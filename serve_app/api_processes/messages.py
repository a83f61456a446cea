"""What the owner of a server without Ray and its API processes tell each other."""

from __future__ import annotations

from typing import Any

import msgspec


class ApiOrder(msgspec.Struct, frozen=True):
    """What an API process is told. It finds two files open: the socket ``listener``, where it
    listens, to HAProxy or to clients; and ``told``, where it writes what it has to say of its
    start."""

    config: str
    folder: str
    start_time: int
    engine: str
    listener: int
    told: int
    behind_haproxy: bool


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an API process says, a line of JSON each time: that it waits, and for what; that it can
    never serve; or that it serves, with the engine's information."""

    waiting: str | None = None
    failure: str | None = None
    information: dict[str, Any] | None = None
    has_chat: bool = False
