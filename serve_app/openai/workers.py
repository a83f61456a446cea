"""Work on long texts beside the event loop, for as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lexshard.serve_app.openai.errors import ClientDisconnectedError, overloaded

# Up to here a thread costs more than it spares the open streams.
SHORT_TEXT = 4096
THREADS = 2
MAX_WAITING_BYTES = 128 * 1024 * 1024
Returned = TypeVar("Returned")
Receive = Callable[[], Awaitable[Any]]


class TextWorkers:
    """A few threads for parsing, rendering and tokenising: the memory these need is multiplied by
    the number of threads, not by that of clients. Others wait for their turn.

    ``waiting_bytes`` are those of the texts that wait or are worked on.
    """

    def __init__(self, threads: int = THREADS, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._max_waiting_bytes = max_waiting_bytes
        self.waiting_bytes = 0

    async def run(self, size: int, work: Callable[[], Returned], receive: Receive) -> Returned:
        """What ``work`` makes of a text of ``size`` bytes: at once where it is short.

        Raises:
            ApiError: 503 where too many wait, or whatever ``work`` raises.
            ClientDisconnectedError: the client left. What waits then never runs.
        """
        if size <= SHORT_TEXT:
            return work()
        waiting = self.waiting_bytes
        if waiting and waiting + size > self._max_waiting_bytes:
            raise overloaded(f"{waiting} bytes of text are waiting to be read; try again")
        self.waiting_bytes += size
        try:
            return await run_unless_disconnected(receive, self._in_thread(work))
        finally:
            self.waiting_bytes -= size

    async def _in_thread(self, work: Callable[[], Returned]) -> Returned:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


async def run_unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, Returned]
) -> Returned:
    """Runs ``work`` to its end, or cancels it as soon as the client closes the connection.

    Raises:
        ClientDisconnectedError: the client was gone first.
    """
    working = asyncio.current_task()
    assert working is not None
    cancelling = working.cancelling()
    left = done = False

    def leave(_: asyncio.Future[None]) -> None:
        nonlocal left
        if not done:  # it may be on its way already when the work ends
            left = True
            working.cancel()

    watching = asyncio.ensure_future(_disconnection(receive))
    watching.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if left and working.uncancel() <= cancelling:  # it was cancelled by nothing else
            raise ClientDisconnectedError from None
        raise
    finally:
        done = True
        watching.remove_done_callback(leave)
        watching.cancel()


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
