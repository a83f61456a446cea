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
from lexshard.actors.edge.pace import LEAST_ALONE, DraftPace
from lexshard.actors.messages import Drafting, Request, SamplingParameters, SequenceEvent
from lexshard.serve_app.edge import device, wire
from lexshard.serve_app.edge.client import EdgeClient
from lexshard.serve_app.edge.device import PATIENCE_SECONDS, EdgeText
from lexshard.serve_app.edge.link import CloudError, CloudLink
from lexshard.serve_app.edge.wire import Cloud, Opened, Refused, Resuming, Told
from tests.support.http_stand_in import StandInHandler, serving
from tests.support.mock_engine import MockEngine
from tests.support.mock_server import TOKENIZER

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


class FollowingDrafter(CountingDrafter):
    """Guesses that every token is one more than the one before."""

    def draft(self, history: list[int], most: int) -> GuessBatch:
        first = history[-1] + 1
        return GuessBatch(0, len(history), tuple(range(first, first + most)))


class SilentDrafter(CountingDrafter):
    """Its model has no room for the text."""

    def draft(self, history: list[int], most: int) -> GuessBatch:
        return GuessBatch(0, len(history), ())


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

    def said(
        self, drafter: type[CountingDrafter] = CountingDrafter, most: int | None = None
    ) -> list[SequenceEvent]:
        """What is told of one text over these connections."""
        ends: Any = self, drafter()
        events: list[SequenceEvent] = []
        parameters = SamplingParameters(max_tokens=50)
        request = Request("", 0, tuple(range(5)), parameters, drafting=Drafting(most=most))
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
    ("scripts", "error"),
    [
        # An idle connection, which the server closes while the device begins over it.
        ([[Refused(408, "the device says nothing")], [Opened("s"), LAST]], None),
        # One that came back and worked, while the text waited in the engine, is waited for anew.
        ([FIRST, [20.0, Opened("s"), LONG, LOST], AGAIN, [Opened("s"), LAST]], None),
        # A server that only answers is away.
        ([FIRST, AGAIN, AGAIN], "the server is away"),
        # No fault of who asked the device, which asks the server whether it ever will do.
        ([[InvalidStatus(Response(401, "", Headers()))]], "the server refuses the link"),
    ],
)
def test_a_text_outlives_its_link_but_not_its_server(
    monkeypatch: pytest.MonkeyPatch, scripts: list[list[Any]], error: str | None
) -> None:
    link = ScriptedLink(*scripts)
    monkeypatch.setattr(device, "time", SimpleNamespace(monotonic=lambda: link.now))
    if error is None:
        [end] = link.said()
        assert (end.finish_reason, end.token_ids) == ("stop", (3,))
    else:
        with pytest.raises(CloudError, match=error) as raised:
            link.said()
        assert not raised.value.final


@pytest.mark.parametrize(
    ("script", "asked", "away"),
    [
        ([Refused(429, "one may be open")], None, None),
        ([Refused(503, "full")], None, None),
        ([Refused(503, "no engine")], "answers 503", "answers 503"),
        ([InvalidStatus(Response(401, "", Headers()))], None, "the server refuses the link"),
    ],
)
def test_a_text_that_is_refused_makes_its_server_away_for_no_other(
    monkeypatch: pytest.MonkeyPatch, script: list[Any], asked: str | None, away: str | None
) -> None:
    """The client is told to try again, as where the server is away, which that says when asked."""
    model: Any = SimpleNamespace(tokenizer=TOKENIZER, drafter=SimpleNamespace(forget=id))
    information = MockEngine().information

    async def run() -> None:
        client = EdgeClient("http://cloud", None, model, EdgeSettings())
        monkeypatch.setattr(client, "_link", ScriptedLink(script))
        monkeypatch.setattr(client, "start", lambda changed: None)
        client.away, client.cloud = None, Cloud(("mock",), "some hash", None, information)
        stream = client.submit([Request("", 0, (5, 6), SamplingParameters(max_tokens=5))])
        [end] = await stream.arrived()
        assert (end.finish_reason, end.refused) == ("abort", False)
        if client._asking is not None:
            await client._asking
        assert (client.away or "").startswith(away or "")
        assert (client.away is None) == (away is None)
        await client.stop()

    def ask(link: ScriptedLink) -> None:
        if asked is not None:
            raise CloudError(asked, final=False)

    monkeypatch.setattr(ScriptedLink, "ask", ask, raising=False)
    monkeypatch.setattr(ScriptedLink, "close", lambda link: asyncio.sleep(0), raising=False)
    asyncio.run(run())


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


@pytest.mark.parametrize(("drafter", "most"), [(SilentDrafter, None), (CountingDrafter, 0)])
def test_where_there_is_no_guess_the_target_goes_on_alone(
    drafter: type[CountingDrafter], most: int | None
) -> None:
    """Or each token would take a round trip: of a text that is too long for the draft model, and of
    one for which nothing may be guessed."""
    link = ScriptedLink([Opened("s"), Told({"token_ids": (5,)}), SILENT, SILENT, SILENT, LAST])
    link.said(drafter, most)
    [batch] = map(CODEC.decode, link.sent[1:])
    assert (batch.position, batch.token_ids, batch.alone) == (6, (), LEAST_ALONE)


def test_what_was_drafted_on_a_guess_that_fell_is_not_sent() -> None:
    """Though it begins right behind what is said."""
    wrong = Told({"token_ids": (6, 7, 8, 400), "answers": 1})
    link = ScriptedLink(
        [
            *(Opened("s"), Told({"token_ids": (5,)}), SILENT, SILENT, SILENT),
            *(wrong, SILENT, SILENT, LAST),
        ]
    )
    link.said(FollowingDrafter)
    _, first, second = link.sent
    assert CODEC.decode(first).token_ids == (6, 7, 8, 9)
    assert CODEC.decode(second).token_ids[0] == 401


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
