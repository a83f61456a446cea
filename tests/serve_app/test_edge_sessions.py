"""``/v1/edge`` before strangers: what is refused, how, and what is left of it."""

from __future__ import annotations

import asyncio
import random
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from starlette.testclient import TestClient, WebSocketDenialResponse, WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

from lexshard.actors.edge.frames import VERSION, FrameCodec, GuessBatch
from lexshard.actors.edge.ledger import GuessChain, VerifiedText, in_few
from lexshard.actors.messages import Request, SamplingParameters, SequenceEvent
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.app import create_app
from lexshard.serve_app.edge import endpoint, wire
from lexshard.serve_app.edge.endpoint import EdgeEndpoint
from lexshard.serve_app.edge.wire import Opened, Opening, Refused, Resuming, Told
from lexshard.serve_app.openai.completions import read_completion
from lexshard.serve_app.openai.parameters import completion_fields
from lexshard.serve_app.openai.protocol import CompletionRequest
from tests.support.mock_engine import EOS, VOCABULARY, MockEngine, Script, ids
from tests.support.mock_server import TOKENIZER
from tests.support.real_server import wait

CODEC = FrameCodec("same-token", VOCABULARY)
HASH = TOKENIZER.vocabulary_hash
PROMPT = tuple(b"Once")
HANGS = Script([ids("a")], hangs=True)


def opening(**changes: Any) -> Opening:
    asked = changes.pop("asked", SamplingParameters(max_tokens=50, seed=3))
    whole = Opening(
        version=VERSION,
        mode="same-token",
        vocabulary=HASH,
        prompt=wire.pack_ids(PROMPT, CODEC.token_bits),
        parameters=completion_fields(asked),
    )
    return msgspec.structs.replace(whole, **changes)


@contextmanager
def connected(script: Script = HANGS, **config: Any) -> Iterator[tuple[TestClient, MockEngine]]:
    engine = MockEngine(script=lambda _: script)
    app = create_app(ServeConfig(model="mock", **config), engine, TOKENIZER)
    with TestClient(app) as client:
        yield client, engine


def begin(device: WebSocketTestSession, message: Opening | Resuming) -> wire.Reply:
    device.send_bytes(wire.encode(message))
    return wire.decode_reply(device.receive_bytes())


@contextmanager
def begun(
    client: TestClient, message: Opening | None = None, **headers: str
) -> Iterator[tuple[WebSocketTestSession, Opened]]:
    """A device and its session, of which it wants no more in the end."""
    with client.websocket_connect(wire.PATH, headers=headers) as device:
        session = begin(device, message or opening())
        assert isinstance(session, Opened), session
        yield device, session


REQUEST = Request("", 0, PROMPT, SamplingParameters())


def event_of(reply: wire.Reply) -> SequenceEvent:
    assert isinstance(reply, Told), reply
    return reply.event_of(REQUEST)


def told_by(device: WebSocketTestSession) -> SequenceEvent:
    """The next event, before any batch."""
    content = device.receive_bytes()
    if wire.is_frame(content):
        return GuessChain(PROMPT).event_of(content, CODEC, REQUEST)
    return event_of(wire.decode_reply(content))


def come_back(device: WebSocketTestSession, session: Opened, length: int) -> list[SequenceEvent]:
    """What is told behind so many tokens, to the end."""
    assert begin(device, Resuming(session.session, length)) == session
    heard: list[SequenceEvent] = []
    while not heard or heard[-1].finish_reason is None:
        heard.append(told_by(device))
    return heard


def refused(client: TestClient, content: bytes | Opening | Resuming, **headers: str) -> int:
    """The status of what comes back, and then nothing."""
    raw = content if isinstance(content, bytes) else wire.encode(content)
    with client.websocket_connect(wire.PATH, headers=headers) as device:
        device.send_bytes(raw)
        reply = wire.decode_reply(device.receive_bytes())
        assert isinstance(reply, Refused), reply
        with pytest.raises(WebSocketDisconnect) as closed:
            device.receive_bytes()
        assert closed.value.code == 4000 + reply.status
        assert len((closed.value.reason or "").encode()) <= 123  # more is no close
    return reply.status


def test_a_device_reads_what_it_must_know() -> None:
    with connected() as (client, engine):
        told = client.get(wire.PATH).json()
        assert (told["vocabulary"], told["models"]) == (HASH, ["mock"])
        assert told["engine"]["vocabulary_size"] == VOCABULARY
        engine.health_reason = "starting"
        assert client.get(wire.PATH).status_code == 503
    with connected(edge_sessions=0) as (client, _):
        assert client.get(wire.PATH).status_code == 404


def test_a_session_is_one_sequence_that_waits_for_guesses() -> None:
    with connected() as (client, engine):
        with begun(client) as (device, _):
            assert told_by(device).token_ids == ids("a")
            [request] = engine.requests
            asked = request.prompt_ids, request.drafting.drafter, request.parameters.seed
            assert asked == (PROMPT, "client", 3)
            device.send_bytes(CODEC.encode(GuessBatch(1, 5, (98, 99))))
            device.send_bytes(CODEC.encode(GuessBatch(2, 7, (100,), alone=4)))
        told = [(each.number, each.token_ids, each.alone) for each in engine.drafts]
        assert told == [(1, (98, 99), 0), (2, (100,), 4)]
        assert engine.running == 0
        assert client.get("/status").json()["queue"]["sequences"] == 0


def test_tokens_drawn_alone_are_told_together_where_they_come_together() -> None:
    """An answer, and what is more than tokens, is told by itself."""
    one, two = (SequenceEvent("", 0, (token,)) for token in (5, 6))
    answer, last = replace(one, answers=1), replace(two, finish_reason="stop")
    both = SequenceEvent("", 0, (5, 6))
    assert in_few([answer, one, two, last]) == [answer, both, last]


def test_parameters_are_those_of_a_completion() -> None:
    """Whatever a request may ask for crosses, and what it may not ask for is refused as by HTTP."""
    wanted = SamplingParameters(
        temperature=0.3,
        top_k=7,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=-0.5,
        logit_bias=((3, 1.5), (77, -100.0)),
        bad_words=((1, 2), (9,)),
        allowed_ids=(1, 2, 3, 77),
        min_tokens=2,
        max_tokens=9,
        stop_token_ids=(5, 6),
        ignore_eos=True,
        seed=2**64 - 5,
        logprobs=3,
        certificate=True,
        draft=True,
    )
    with connected() as (client, engine):
        with begun(client, opening(asked=wanted, bad_words=wanted.bad_words, choice=5)):
            pass
        assert engine.requests[0].parameters == wanted
        assert engine.requests[0].choice == 5
        for field, value in (("temperature", -1.0), ("max_tokens", 10**9), ("logprobs", 99)):
            changed = replace(SamplingParameters(max_tokens=9), **{field: value})
            assert refused(client, opening(asked=changed)) == 400
        # A server takes 1,024 words, each of which is several sequences of tokens.
        with begun(client, opening(bad_words=((7,),) * 2048)):
            pass
        assert refused(client, opening(bad_words=((7,),) * 5000)) == 400


def test_what_begins_no_session_is_refused() -> None:
    with connected() as (client, engine):
        for content in (
            b"",
            b"\x78\x9c",
            b"no msgpack",
            wire.encode({"type": "open"}),
            wire.encode(Opened("a server's")),
            CODEC.encode(GuessBatch(1, 4, ())),
            opening(version=9),
            opening(vocabulary="another"),
            opening(parameters=[1]),
            opening(parameters=b"{"),
            opening(parameters={"é" * 150: 1}),
            opening(prompt=b""),
            opening(prompt=wire.pack_ids((VOCABULARY,), CODEC.token_bits)),
            opening(said=wire.pack_ids(range(60), CODEC.token_bits)),
            opening(bad_words=((VOCABULARY,),)),
            opening(choice=-1),
            opening(size=0),
            opening(resolution=10**6),
        ):
            assert refused(client, content) == 400
        assert engine.requests == []
        assert refused(client, Resuming("no such session", 4)) == 404


def test_an_opening_is_bounded_before_anything_is_made_of_it() -> None:
    """Decoded, 1.9 MB of lists in a list would be 120."""
    nested = wire.encode(opening(parameters={"x": [[]] * 1_900_000}))
    with connected() as (client, engine):
        tracemalloc.start()
        assert refused(client, nested) == 400
        assert refused(client, bytes(wire.MOST_MESSAGE_BYTES + 1)) == 413
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 16 * 2**20
        for wrong in ({"x": [1] * 1_100_000}, {"x": {"y": []}}, {str(n): 1 for n in range(99)}):
            assert refused(client, opening(parameters=wrong)) == 400
        assert engine.requests == []


def test_the_largest_opening_that_a_device_may_need_is_read() -> None:
    """A million ids of 18 bits, and every token of 262,144 allowed."""
    largest = opening(
        prompt=bytes(18 * 10**6 // 8),
        parameters={"allowed_token_ids": [*range(262_144)]},
        bad_words=((262_143,),) * 4_096,
    )
    content = wire.encode(largest)
    assert len(content) < wire.MOST_MESSAGE_BYTES
    assert wire.decode_beginning(content) == largest


@pytest.mark.parametrize("field", ["prompt", "said"])
def test_more_ids_than_the_context_holds_are_not_unpacked(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be eight bytes for each of their bits, on the event loop."""
    unpacked: list[int] = []
    unpack = wire.unpack_ids

    def noting(content: bytes, token_bits: int) -> tuple[int, ...]:
        unpacked.append(len(content))
        return unpack(content, token_bits)

    monkeypatch.setattr(wire, "unpack_ids", noting)
    with connected() as (client, engine):
        assert refused(client, opening(**{field: bytes(5000)})) == 400  # 4,444 ids
        assert unpacked == []
        assert engine.requests == []


def test_keys_are_asked_for_as_by_http() -> None:
    with connected(api_keys=["secret", "other"]) as (client, _):
        with pytest.raises(WebSocketDenialResponse) as denied:
            client.websocket_connect(wire.PATH).__enter__()
        assert denied.value.status_code == 401
        with begun(client, authorization="Bearer secret") as (_, session):
            stolen = Resuming(session.session, len(PROMPT) + 1)
            assert refused(client, stolen, authorization="Bearer other") == 404


def test_no_page_of_another_site_opens_a_session() -> None:
    page = "https://app.example"
    for config, allowed in (({}, False), ({"cors_origins": [page]}, True)):
        with connected(**config) as (client, _):
            if allowed:
                with begun(client, origin=page):
                    continue
            with pytest.raises(WebSocketDenialResponse) as denied:
                client.websocket_connect(wire.PATH, headers={"origin": page}).__enter__()
            assert denied.value.status_code == 403


def test_there_are_only_so_many_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many begin at once."""

    async def slowly(_: EdgeEndpoint) -> str:
        await asyncio.sleep(0.1)
        return HASH

    monkeypatch.setattr(EdgeEndpoint, "_vocabulary", slowly)
    with ExitStack() as stack:
        client, _ = stack.enter_context(connected(edge_sessions=1))
        devices = [stack.enter_context(client.websocket_connect(wire.PATH)) for _ in range(3)]
        for device in devices:
            device.send_bytes(wire.encode(opening()))
        replies = [wire.decode_reply(device.receive_bytes()) for device in devices]
        assert sorted(type(each).__name__ for each in replies) == ["Opened", "Refused", "Refused"]


def test_a_session_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device may begin another one."""
    monkeypatch.setattr(VerifiedText, "happened", None)
    with connected() as (client, engine), begun(client) as (device, session):
        with pytest.raises(WebSocketDisconnect) as closed:
            device.receive_bytes()
        assert closed.value.code == wire.BROKEN
        assert refused(client, Resuming(session.session, len(PROMPT))) == 404
        assert engine.running == 0


def test_a_text_goes_on_behind_what_a_lost_device_has_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing of it runs while its device is away; what had not arrived is drawn again, the end,
    too. The client sees one text."""
    caplog.set_level("INFO", "lexshard.http")
    script = Script([ids("a"), ids("bc"), ids("d"), (EOS,)], seconds_per_step=0.05)
    with connected(script) as (client, engine):
        with begun(client) as (device, session):
            assert told_by(device).token_ids == ids("a")
            device.close(1011)
        wait(lambda: engine.running == 0, 10, "the sequence to be freed")
        for has in (1, 0, 3):
            with client.websocket_connect(wire.PATH) as device:
                heard = come_back(device, session, len(PROMPT) + has)
                assert [each for told in heard for each in told.token_ids] == [*ids("abcd"), EOS]
                device.close(1011)
        said = [request.resumed_ids for request in engine.requests]
        assert said == [(), ids("a"), (), ids("abc")]
        assert len({request.request_id for request in engine.requests}) == 4
        for length in (len(PROMPT) - 1, 99):  # of another text
            assert refused(client, Resuming(session.session, length)) == 404
        assert caplog.text.count("status=200 prompt=4") == 1


@pytest.mark.parametrize("limit", ["max_requests_per_client", "edge_sessions"])
def test_a_text_that_has_ended_is_let_in_anew(limit: str) -> None:
    """It runs again beside no more texts than there may be, and is one of them until it ends."""
    engine = MockEngine(script=lambda request: HANGS if request.choice else Script([(EOS,)]))
    app = create_app(ServeConfig(model="mock", **{limit: 1}), engine, TOKENIZER)
    status = 429 if limit == "max_requests_per_client" else 503
    with TestClient(app) as client:
        with begun(client) as (device, session):
            assert told_by(device).finish_reason == "stop"
            device.close(1011)
        with begun(client, opening(choice=1)):
            assert refused(client, Resuming(session.session, len(PROMPT))) == status
            assert len(engine.requests) == 2
        wait(lambda: not engine.running, 10, "the other text to be freed")
        engine.script = lambda request: HANGS
        with client.websocket_connect(wire.PATH) as device:
            assert begin(device, Resuming(session.session, len(PROMPT))) == session
            assert refused(client, opening(choice=1)) == status
        wait(lambda: not engine.running, 10, "the text to be freed")
        with begun(client, opening(choice=1)):
            pass
        assert client.get("/status").json()["queue"]["sequences"] == 0


def test_guesses_may_follow_at_once_when_a_device_comes_back() -> None:
    with connected() as (client, engine):
        with begun(client) as (device, session):
            assert told_by(device).token_ids == ids("a")
            device.send_bytes(CODEC.encode(GuessBatch(1, 5, (98, 99))))
            device.close(1011)
        with client.websocket_connect(wire.PATH) as device:
            device.send_bytes(wire.encode(Resuming(session.session, len(PROMPT) + 1)))
            device.send_bytes(CODEC.encode(GuessBatch(1, 5, (98,))))
            assert wire.decode_reply(device.receive_bytes()) == session
            assert told_by(device).token_ids == ids("a")
        assert [each.token_ids for each in engine.drafts] == [(98, 99), (98,)]
        assert engine.running == 0


def test_one_that_does_not_come_back_is_forgotten() -> None:
    with connected(edge_resume_seconds=1) as (client, engine):
        with begun(client) as (device, _):
            device.close(1011)

        def waits() -> int:
            return int(client.get("/status").json()["queue"]["sequences"])

        assert waits() == 1
        wait(lambda: not waits(), 10, "the session to be forgotten")
        assert (engine.running, len(engine.cancelled)) == (0, 1)


def test_one_that_says_nothing_is_sent_away_once_the_text_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before that it is the engine that lets it wait."""
    monkeypatch.setattr(endpoint, "SILENT_SECONDS", 0.2)
    with (
        connected(Script([ids("a")], hangs=True, seconds_per_step=1.0)) as (client, engine),
        begun(client) as (device, _),
    ):
        assert told_by(device).token_ids == ids("a")
        assert wire.decode_reply(device.receive_bytes()) == Refused(408, "the device says nothing")
        wait(lambda: engine.running == 0, 10, "the session to be freed")


def test_a_text_is_counted_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Its connection may wait long for the next one."""
    caplog.set_level("INFO", "lexshard.http")
    with connected(Script([(*ids("a"), EOS)])) as (client, _), begun(client) as (device, _):
        assert told_by(device).finish_reason == "stop"
        wait(lambda: "status=200 prompt=4 completion=2" in caplog.text, 10, "the line of its log")


def test_an_opening_that_takes_long_to_read_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may allow as many tokens as a vocabulary has."""
    answered, in_time = threading.Event(), list[bool]()

    def slowly(*asked: Any) -> CompletionRequest:
        in_time.append(answered.wait(10))
        return read_completion(*asked)

    monkeypatch.setattr(endpoint, "read_completion", slowly)
    with connected() as (client, _), client.websocket_connect(wire.PATH) as device:
        device.send_bytes(wire.encode(opening()))
        assert client.get("/health").status_code == 200
        answered.set()
        assert isinstance(wire.decode_reply(device.receive_bytes()), Opened)
    assert in_time == [True]


def test_a_frame_that_takes_long_to_read_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Distributions of a thousand parts take a tenth of a second each."""
    answered, in_time = threading.Event(), []

    def slowly(codec: FrameCodec, content: bytes) -> GuessBatch:
        in_time.append(answered.wait(10))
        return GuessBatch(1, 5, ())

    with connected() as (client, engine), begun(client, opening(mode="ksqs")) as (device, _):
        told_by(device)
        monkeypatch.setattr(FrameCodec, "decode", slowly)
        device.send_bytes(b"\x00")
        assert client.get("/health").status_code == 200
        answered.set()
        device.send_bytes(b"\xff\xff")
        assert isinstance(wire.decode_reply(device.receive_bytes()), Refused)
        assert in_time == [True]
        assert len(engine.drafts) == 1


@pytest.mark.parametrize("count", [500, pytest.param(5_000, marks=pytest.mark.slow)])
def test_malformed_frames_harm_no_other(count: int) -> None:
    """Cut, lengthened, altered, out of order, of other versions, of noise: each ends its session
    with a 400, unlike a good one, and no other, and nothing of it stays."""
    chance = random.Random(7)
    good = CODEC.encode(GuessBatch(1, 5, (98, 99, 100)))

    def altered() -> bytes:
        kind = chance.randrange(6)
        if kind == 0:
            return good[: chance.randrange(1, len(good))]
        if kind == 1:
            return good + chance.randbytes(chance.randrange(1, 40))
        if kind == 2:
            return CODEC.encode(GuessBatch(chance.choice((0, 2, 7, 255)), 5, (98,)))
        if kind == 3:
            return CODEC.encode(GuessBatch(1, chance.choice((0, 3, 500, 2**24 - 1)), (98,)))
        if kind == 4:
            return bytes([chance.randrange(128)]) + chance.randbytes(chance.randrange(200))
        return bytes(1) + bytes(wire.MOST_FRAME_BYTES + chance.randrange(1, 9))

    with connected() as (client, engine):
        assert (_frame(client, good), _frame(client, good[:-1])) == (0, 400)
        for _ in range(200):
            _frame(client, altered())
        before = psutil.Process().memory_info().rss
        statuses = [_frame(client, altered()) for _ in range(count)]
        grown = psutil.Process().memory_info().rss - before
        assert set(statuses) <= {0, 400}
        assert statuses.count(400) > 0.9 * count  # noise may be a frame
        assert grown < 64 * 2**20
        assert engine.running == 0
        assert client.get("/status").json()["queue"]["sequences"] == 0
        assert client.get("/health").status_code == 200


def _frame(client: TestClient, content: bytes) -> int:
    """A session that sends ``content`` first: the status that it ends with, 0 if it goes on."""
    with begun(client) as (device, _):
        device.receive_bytes()
        device.send_bytes(content)
        device.send_bytes(b"\xff\xff")  # is no frame and begins nothing: ends it in any case
        reply = wire.decode_reply(device.receive_bytes())
        assert isinstance(reply, Refused)
        last = "Expected `array`, got `int`" in reply.message
    return 0 if last else reply.status


@pytest.mark.parametrize("bits", [8, 14, 17, 18])
def test_ids_are_packed_as_tightly_as_can_be(bits: int) -> None:
    random_ids = np.random.default_rng(bits)
    for count in (0, 1, 7, 8, 1000):
        token_ids = tuple(random_ids.integers(0, 2**bits, count).tolist())
        content = wire.pack_ids(token_ids, bits)
        assert len(content) == -(-count * bits // 8)
        assert wire.unpack_ids(content, bits) == token_ids
