"""An engine in a thread of this process, with an async stream of events.

    engine = AsyncEngine(Engine(configuration))
    async for event in engine.stream(Request("a", 0, prompt_ids, SamplingParameters())):
        print(event.token_ids)

For scripts and notebooks; the server runs the same loop in a process of its own.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator

from lexshard.actors.engine.engine import Engine
from lexshard.actors.engine.loop import run_engine
from lexshard.actors.messages import Commands, Request, SequenceEvent, StepOutput


class _Mailbox:
    """A ``CommandSource`` other threads can put into."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Commands] = queue.SimpleQueue()

    def put(self, commands: Commands) -> None:
        self._queue.put(commands)

    def receive(self, wait_seconds: float) -> Commands | None:
        try:
            if wait_seconds > 0:
                return self._queue.get(timeout=wait_seconds)
            return self._queue.get_nowait()
        except queue.Empty:
            return None


class AsyncEngine:
    """Runs ``engine`` in a thread until ``close``; use from one event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mailbox = _Mailbox()
        self._streams: dict[tuple[str, int], asyncio.Queue[SequenceEvent]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(
            target=run_engine, args=(engine, self._mailbox, self._emit), daemon=True
        )
        self._thread.start()

    async def stream(self, request: Request) -> AsyncIterator[SequenceEvent]:
        """The events of one sequence up to its last; leaving early cancels it."""
        self._loop = asyncio.get_running_loop()
        name = (request.request_id, request.choice)
        events: asyncio.Queue[SequenceEvent] = asyncio.Queue()
        self._streams[name] = events
        self._mailbox.put(Commands(submit=(request,)))
        finished = False
        try:
            while not finished:
                event = await events.get()
                finished = event.finish_reason is not None
                yield event
        finally:
            del self._streams[name]
            if not finished:
                self._mailbox.put(Commands(cancel=(request.request_id,)))

    def close(self) -> None:
        """Stop the loop after its current step, and the engine's samplers."""
        self._mailbox.put(Commands(stop=True))
        self._thread.join()
        self._engine.close()

    def _emit(self, output: StepOutput) -> None:
        if output.events and self._loop is not None:
            self._loop.call_soon_threadsafe(self._deliver, output.events)

    def _deliver(self, events: tuple[SequenceEvent, ...]) -> None:
        for event in events:
            stream = self._streams.get((event.request_id, event.choice))
            if stream is not None:
                stream.put_nowait(event)
