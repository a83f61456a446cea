"""One thread that clients take turns at: one that asks for much waits for itself."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lexshard.serve_app.openai.errors import overloaded
from lexshard.serve_app.openai.workers import Receive, Returned, run_unless_disconnected


class FairWorker:
    """Does one piece of work at a time. Between two of one client's, one of every other that waits
    is done. ``max_waiting_bytes`` are those of one client. Belongs to one event loop."""

    def __init__(self, max_waiting_bytes: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="turns")
        self._max_waiting_bytes = max_waiting_bytes
        self._bytes: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._busy = False

    async def run(
        self, client: str, size: int, work: Callable[[], Returned], receive: Receive
    ) -> Returned:
        """What ``work`` makes of ``size`` bytes of text of ``client``.

        Raises:
            ApiError: 503 where too many of this client wait, or whatever ``work`` raises.
            ClientDisconnectedError: the client left. What waits then never runs.
        """
        waiting = self._bytes.get(client, 0)
        if waiting and waiting + size > self._max_waiting_bytes:
            raise overloaded(f"{waiting} bytes of your grammars are waiting already; try again")
        self._bytes[client] = waiting + size
        try:
            return await run_unless_disconnected(receive, self._in_turn(client, work))
        finally:
            self._bytes[client] -= size
            if not self._bytes[client]:
                del self._bytes[client]

    async def _in_turn(self, client: str, work: Callable[[], Returned]) -> Returned:
        loop = asyncio.get_running_loop()
        if self._busy:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.setdefault(client, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it had come already
                    self._next()
                raise
        self._busy = True
        try:
            return await loop.run_in_executor(self._thread, work)
        finally:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # behind all others
            if not turn.done():  # its client is still there
                turn.set_result(None)
                return
        self._busy = False
