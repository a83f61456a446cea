"""A text at the device over a link that is lost at a chosen moment: what it sends afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.http11 import Response

from lexshard.actors.edge.drafting import EdgeSettings
from lexshard.actors.edge.frames import FrameCodec, GuessBatch
from lexshard.actors.edge.pace import DraftPace
from lexshard.actors.messages import Request, SamplingParameters, SequenceEvent
from lexshard.serve_app.edge import device, wire
from lexshard.serve_app.edge.device import PATIENCE_SECONDS, EdgeText
from lexshard.serve_app.edge.link import CloudError, CloudLink
from lexshard.serve_app.edge.wire import Opened, Refused, Resuming, Told
from tests.support.http_stand_in import StandInHandler, serving

CODEC = FrameCodec("same-token", 600)
# Beside replies, and seconds that pass until the next step.
SILENT, LOST = None, ConnectionClosedError(None, None)
LAST = Told({"token_ids": (3,), "finish_reason": "stop"})
LONG = PATIENCE_SECONDS + 1
FIRST, AGAIN = [Opened("s"), LOST], [20.0, Opened("s"), LOST]


class CountingDrafter:
    """Guesses that every token is its own position."""

    codec, threshold = CODEC, EdgeSettings().threshold()

    def draft(self, history: list[int], most: int) -> GuessBatch:
        return GuessBatch(0, len(history), tuple(range(len(history), len(history) + most)))

    def heard(self, length: int, *, goes_on: bool) -> None: ...


class ScriptedLink:
    """Connections that answer what is written down, one step whenever the device listens."""

    vocabulary = "some hash"

    def __init__(self, *scripts: list[Any]) -> None:
        self.pace = DraftPace(longest=4, thrift=0.1)
        self.pace.connected(10.0)
        self.pace.drew(1e6)  # alone the server would take for ever: it is guessed for
        self.sent: list[bytes] = []
        self.now = 0.0
        self._scripts = iter(scripts)

    def count(self, **amounts: Any) -> None: ...

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[ScriptedLink]:
        self._steps = iter(next(self._scripts))
        yield self

    async def send(self, content: bytes) -> None:
        self.sent.append(content)

    async def recv(self, decode: bool) -> bytes:
        step = next(self._steps)
        if isinstance(step, float):
            self.now += step
            return await self.recv(decode)
        if step is SILENT:
            await asyncio.sleep(60)
        if isinstance(step, Exception):
            raise step
        return wire.encode(step)

    def said(self) -> list[SequenceEvent]:
        """What is told of one text over these connections."""
        ends: Any = self, CountingDrafter()
        events: list[SequenceEvent] = []
        request = Request("", 0, tuple(range(5)), SamplingParameters(max_tokens=50))
        text = EdgeText(request, *ends, asyncio.to_thread, events.append)
        asyncio.run(asyncio.wait_for(text.run(), 30))
        return events


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"SSH-2.0\r\n", "does not answer as lexshard does"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 99\r\n\r\n{", "answers 503: Busy"),
    ],
)
def test_what_answers_by_halves_is_asked_again(reply: bytes, why: str) -> None:
    """As a server that is killed while it answers: the device goes on to look for one."""

    class Half(StandInHandler):
        def answer(self) -> None:
            self.wfile.write(reply)
            self.close_connection = True

    with serving(Half) as url, pytest.raises(CloudError, match=why) as raised:
        CloudLink(url, None, "", DraftPace(longest=4, thrift=0.1)).ask()
    assert not raised.value.final


@pytest.mark.parametrize(
    ("scripts", "reason", "error"),
    [
        # An idle connection, which the server closes while the device begins over it.
        ([[Refused(408, "the device says nothing")], [Opened("s"), LAST]], "stop", ""),
        # One that came back and worked, while the text waited in the engine, is waited for anew.
        ([FIRST, [20.0, Opened("s"), LONG, LOST], AGAIN, [Opened("s"), LAST]], "stop", ""),
        # A server that only answers is away.
        ([FIRST, AGAIN, AGAIN], "abort", "the server is away"),
        # No fault of who asked the device, which asks the server whether it ever will do.
        ([[InvalidStatus(Response(401, "", Headers()))]], "abort", "the server refuses the link"),
    ],
)
def test_a_text_outlives_its_link_but_not_its_server(
    monkeypatch: pytest.MonkeyPatch, scripts: list[list[Any]], reason: str, error: str
) -> None:
    link = ScriptedLink(*scripts)
    monkeypatch.setattr(device, "time", SimpleNamespace(monotonic=lambda: link.now))
    [end] = link.said()
    assert (end.finish_reason, end.refused) == (reason, False)
    assert (end.error or "").startswith(error)
    assert end.token_ids == (() if error else (3,))


def test_what_was_drawn_in_place_of_a_guess_lets_the_device_go_on() -> None:
    """A server without room for all guesses tests some and draws the next token, which is the next
    guess by chance: it waits then, and the device goes on."""
    link = ScriptedLink(
        [
            *(Opened("s"), Told({"token_ids": (5,)}), SILENT, SILENT, SILENT),
            *(Told({"token_ids": (6, 7), "answers": 1}), SILENT, SILENT, LAST),
        ]
    )
    link.said()
    _, _, following = link.sent
    assert CODEC.decode(following).token_ids[0] == 8


def test_what_was_on_its_way_over_a_lost_link_is_guessed_again() -> None:
    """Guesses are sent, and more are drafted behind them; the link is lost before these are sent,
    and the answer with it. Behind what is said stands what is guessed next, and it is sent without
    waiting for a word."""
    link = ScriptedLink(
        [Opened("s"), Told({"token_ids": (5,)}), SILENT, SILENT, SILENT, LOST],
        [SILENT, SILENT, Opened("s"), Told({"token_ids": (6, 400), "answers": 1}), LAST],
    )
    events = link.said()
    _, first, beginning, second = link.sent
    assert CODEC.decode(first).token_ids == (6, 7, 8, 9)
    assert wire.decode_beginning(beginning) == Resuming("s", 6)
    assert second == first
    assert [token for event in events for token in event.token_ids] == [5, 6, 400, 3]
