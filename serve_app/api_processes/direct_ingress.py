"""From HAProxy straight to the application, past what Ray Serve does for each request.

HAProxy speaks to a replica's own HTTP server, where Serve stands before the application: two ids,
two tasks that watch the connection, counts for autoscaling, a pass of the application's routes for
the name of the one that will answer. The application does all it needs of that itself, so here
Serve keeps its own paths, by which it is asked for its health, and passes on the rest.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

SERVES_OWN = "/-/"


@dataclass(frozen=True, slots=True)
class LocalApplication:
    """The application of this process, to be called in ``loop`` alone."""

    application: ASGIApp
    loop: asyncio.AbstractEventLoop


_local: LocalApplication | None = None


def answer_here(application: ASGIApp) -> None:
    """This process is a replica with that application; call in the loop it belongs to."""
    global _local
    _local = LocalApplication(application, asyncio.get_running_loop())


def application_here() -> ASGIApp | None:
    """The application that may be called in this loop; None in Serve's proxy, and where Serve runs
    the application in a loop of its own."""
    if _local is None or _local.loop is not asyncio.get_running_loop():
        return None
    return _local.application


class DirectIngress:
    """Stands in front of Serve in a replica. ``serve`` is what Serve would do with a request."""

    def __init__(self, serve: ASGIApp, application: ASGIApp) -> None:
        self._serve = serve
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] in ("http", "websocket")
        if asks and not scope["path"].startswith(SERVES_OWN):
            await self._application(scope, receive, send)
        else:
            await self._serve(scope, receive, send)
