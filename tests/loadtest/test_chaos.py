"""The pieces of `lexshard chaos` without a server: what it sends, and how it judges answers."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lexshard.loadtest.chaos import command
from lexshard.loadtest.chaos.client import (
    BROKEN,
    CUT,
    HUNG,
    KEPT,
    REFUSED,
    SILENT,
    TOLD,
    WHOLE,
    WRONG,
    Heard,
    fate,
    seeded_requests,
)
from lexshard.loadtest.chaos.fuzz import KINDS, hostile_request
from lexshard.loadtest.chaos.growth import MEBIBYTE, ProcessGrowth, ProcessUse
from lexshard.loadtest.chaos.health import HealthWatch, Look
from lexshard.loadtest.chaos.hostile.bodies import (
    END_OF_TEXT,
    FIELDS,
    GENERATING,
    MANY_TOKENS,
    ROUTES,
)
from lexshard.loadtest.chaos.hostile.exchange import (
    END,
    LEAVES,
    HostileRequest,
    WireAnswer,
    breach,
    exchange,
)
from lexshard.loadtest.chaos.kills import FAULTS, LAST_FAULTS, QUICK, judge_streams
from lexshard.loadtest.chaos.newcomers import Newcomers
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow, counted
from lexshard.loadtest.chaos.server import ROLES, SERVING
from lexshard.serve_app.openai.errors import TYPES_AND_CODES

BODY_KINDS = ("wrong types", "odd numbers", "nesting", "broken UTF-8", "unknown fields", "empty")


def body_of(request: HostileRequest) -> tuple[str, bytes]:
    """Its path and body."""
    head, body = request.pieces
    return head.split()[1].decode(), body


def error(status: int, **changes: Any) -> bytes:
    kind, code = TYPES_AND_CODES.get(status, ("other", None))
    fields = {"message": "no", "type": kind, "param": None, "code": code, **changes}
    return json.dumps({"error": fields}).encode()


def answered(status: int, body: bytes, **headers: str) -> WireAnswer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return WireAnswer(status, named, body, complete=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_makes_the_same_requests_and_another_one_others(kind: str) -> None:
    numbers = range(10) if KINDS[kind].at_once > 1 else range(2)
    made = [hostile_request(kind, 3, number) for number in numbers]
    assert made == [hostile_request(kind, 3, number) for number in numbers]
    if KINDS[kind].at_once > 1:
        assert made != [hostile_request(kind, 4, number) for number in numbers]


def test_every_route_and_every_field_is_attacked() -> None:
    reached = set()
    for kind in BODY_KINDS:
        reached |= {body_of(hostile_request(kind, 1, number))[0] for number in range(60)}
    assert reached == set(ROUTES)
    touched: dict[str, set[str]] = {path: set() for path in ROUTES}
    for number in range(KINDS["wrong types"].count):
        path, body = body_of(hostile_request("wrong types", 1, number))
        touched[path] |= json.loads(body).keys()
    for path, fields in FIELDS.items():
        assert len(set(fields) - touched[path]) <= 2, path


def test_what_is_accepted_ends_soon() -> None:
    """Otherwise a long answer would be taken for a hang."""
    for number in range(300):
        path, body = body_of(hostile_request("wrong types", 2, number))
        if path not in GENERATING:
            continue
        fields = json.loads(body)
        limits = [fields.get(name) for name in ("max_tokens", "max_completion_tokens")]
        bounded = any(type(limit) is int and limit <= MANY_TOKENS for limit in limits)
        assert bounded or fields["logit_bias"] == {END_OF_TEXT: 100}


def test_numbers_that_json_does_not_have_are_sent() -> None:
    bodies = b"".join(
        body_of(hostile_request("odd numbers", 1, number))[1] for number in range(400)
    )
    for literal in (b"NaN", b"-Infinity", b"1e999", b"9" * 400):
        assert literal in bodies


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (answered(200, b"{}", content_type="application/json"), None),
        (answered(200, b'{"a": NaN}', content_type="application/json"), "no JSON"),
        (answered(400, error(400)), None),
        (answered(400, b"<html>Bad request</html>"), "error shape"),
        (answered(400, error(400, code=400)), "error shape"),
        (answered(400, error(500)), "error shape"),
        (answered(404, error(404, message=None)), "error shape"),
        (answered(301, b""), "status 301"),
        (answered(500, error(500)), "status 500"),
        (answered(502, error(502)), "status 502"),
        (answered(503, error(503)), "Retry-After"),
        (answered(503, error(503), retry_after="1"), None),
        (WireAnswer(closed=True), "closed without"),
        (WireAnswer(), "no answer within 5 s"),
        (WireAnswer(200, {}, b"{", closed=True), "broke off"),
        (answered(200, b"data: {}\n\ndata: [DONE]\n\n", content_type="text/event-stream"), None),
        (answered(200, b"data: {}\n\n", content_type="text/event-stream"), "silently"),
        (
            answered(
                200,
                b"data: " + error(500) + b"\n\ndata: [DONE]\n\n",
                content_type="text/event-stream",
            ),
            "a stream with server_error",
        ),
    ],
)
def test_answers_that_were_not_promised_are_told(answer: WireAnswer, reason: str | None) -> None:
    found = breach(HostileRequest((b"",)), answer)
    assert found is None if reason is None else reason in (found or "")


def test_who_leaves_or_is_incomplete_may_expect_less() -> None:
    gone, silent = WireAnswer(closed=True), WireAnswer()
    assert breach(HostileRequest((), expects=END), gone) is None
    assert breach(HostileRequest((), expects=END), silent) is not None
    assert breach(HostileRequest((), expects=LEAVES), silent) is None
    assert breach(HostileRequest((), expects=LEAVES), answered(500, error(500))) is not None
    assert breach(HostileRequest((), method="HEAD"), answered(404, b"")) is None


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", (200, b"{}", True)),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
            (200, b"{}", True),
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nall", (200, b"all", True)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", (200, b"", False)),
        (b"", (0, b"", False)),
        (b"SSH-2.0\r\n", (0, b"", False)),
    ],
)
def test_answers_are_read_from_the_wire(raw: bytes, expected: tuple[int, bytes, bool]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    async def run() -> WireAnswer:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await exchange(port, HostileRequest((b"GET / HTTP/1.1\r\n", b"\r\n")))

    answer = asyncio.run(run())
    assert (answer.status, answer.body, answer.complete) == expected
    assert answer.closed is not answer.complete


def test_a_server_that_says_nothing_is_waited_for_so_long_and_no_longer() -> None:
    async def run() -> WireAnswer:
        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await exchange(port, HostileRequest((b"GET",), patience=0.2))

    answer = asyncio.run(run())
    assert (answer.status, answer.closed) == (0, False)
    assert answer.seconds < 2


EXPECTED = Heard(status=200, texts={0: "Once upon"}, finished={0: "length"}, ended=WHOLE)


def heard(ended: str, text: str = "Once upon", status: int = 200, **changes: Any) -> Heard:
    finished = {0: "length"} if ended == WHOLE else {}
    return Heard(status=status, texts={0: text}, finished=finished, ended=ended, **changes)


@pytest.mark.parametrize(
    ("said", "result"),
    [
        (heard(WHOLE), KEPT),
        (heard(WHOLE, "Once UPON"), WRONG),
        (heard(WHOLE, "Once"), WRONG),
        (heard(SILENT, "Once"), WRONG),
        (heard(HUNG, "Once"), WRONG),
        (heard(BROKEN, "Once"), CUT),
        (heard(BROKEN, "Twice"), WRONG),
        (heard(TOLD, "Once"), CUT),
        (heard(TOLD, "", 503, retry_after="1"), REFUSED),
        (heard(TOLD, "", 503, retry_after="1", shaped=False), WRONG),
        (heard(TOLD, "", 503), WRONG),
        (heard(TOLD, "", 500), WRONG),
    ],
)
def test_what_became_of_a_stream(said: Heard, result: str) -> None:
    assert fate(said, EXPECTED) == result


def test_wrong_text_and_cut_streams_break_a_promise() -> None:
    said = [heard(WHOLE), heard(BROKEN, "Once"), heard(WHOLE, "Twice upon")]
    survivable, deadly = ChaosRow("kills", "engine"), ChaosRow("kills", "replica")
    judge_streams(survivable, said, [EXPECTED] * 3, may_cut=False)
    judge_streams(deadly, said[:2], [EXPECTED] * 2, may_cut=True)
    assert (survivable.kept, survivable.cut, survivable.wrong) == (1, 1, 1)
    assert len(survivable.broken) == 2
    assert (deadly.kept, deadly.cut, deadly.broken) == (1, 1, [])


def test_a_stream_is_heard_as_it_is_told() -> None:
    listener = Heard()
    chunk = {"index": 0, "delta": {"content": "Once"}, "finish_reason": None}
    listener.take_line("data: " + json.dumps({"choices": [chunk]}))
    listener.take_line("")
    assert listener.has_begun
    assert not listener.ended
    listener.take_line("data: " + error(503).decode())
    listener.take_line("data: [DONE]")
    assert (listener.texts, listener.ended, listener.message) == ({0: "Once"}, TOLD, "no")


def newcomer(sent: float, seconds: float, status: int = 200, **changes: Any) -> Heard:
    ended = WHOLE if status == 200 else TOLD
    return Heard(sent=sent, answered=sent + seconds, status=status, ended=ended, **changes)


def judged(newcomers: list[Heard], looks: list[Look], *, no_ingress: bool = False) -> ChaosRow:
    async def run() -> ChaosRow:
        crowd, watch = Newcomers("http://127.0.0.1:1"), HealthWatch(1)
        crowd.heard, watch.looks = newcomers, looks
        row = ChaosRow("kills", "engine")
        crowd.judge(row, watch, 100.0, 100.0, no_ingress=no_ingress)
        return row

    return asyncio.run(run())


def test_noticing_and_recovery_are_timed() -> None:
    crowd = [
        newcomer(99.9, 8.0),  # taken in before it was noticed
        newcomer(101.0, 0.1, 503, retry_after="2"),
        newcomer(105.0, 0.1, 503, retry_after="2"),
        newcomer(107.0, 0.5),
    ]
    row = judged(crowd, [Look(100.0, 0.5, 503)])
    assert (row.noticed, row.recovered, row.slowest) == (0.5, 7.5, 0.5)
    assert row.broken == []


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (newcomer(102.0, 6.0), "over 5 s"),
        (newcomer(102.0, 0.1, 503), "Retry-After"),
        (newcomer(102.0, 0.1, 502), "status 502"),
        (Heard(sent=102.0, answered=102.1, ended=BROKEN), "not answered"),
    ],
)
def test_newcomers_in_trouble_break_a_promise(trouble: Heard, reason: str) -> None:
    row = judged([newcomer(101.0, 0.1, 503, retry_after="2"), trouble, newcomer(109.0, 0.1)], [])
    assert [reason in each for each in row.broken] == [True]


def test_without_an_ingress_nobody_can_answer() -> None:
    lost = Heard(sent=102.0, answered=102.1, ended=BROKEN)
    assert judged([lost, newcomer(109.0, 0.1)], [], no_ingress=True).broken == []
    assert judged([lost], [], no_ingress=True).broken == ["requests were never served again"]


def test_growth_is_told_from_noise() -> None:
    def use(when: float, **changes: float) -> ProcessUse:
        held = {"memory": 500.0 * MEBIBYTE, "descriptors": 50.0, "threads": 20.0, **changes}
        return ProcessUse(when, **held)

    steady = [use(when, memory=500.0 * MEBIBYTE + when) for when in range(30)]
    assert ProcessGrowth.of(steady[:2]) is None
    for name, amount, too_much in (
        ("memory", 30.0 * MEBIBYTE, False),
        ("memory", 90.0 * MEBIBYTE, True),
        ("descriptors", 20.0, True),
        ("threads", 8.0, True),
    ):
        later = [use(when, **{name: getattr(steady[0], name) + amount}) for when in range(30, 40)]
        growth = ProcessGrowth.of(steady + later)
        assert growth is not None
        assert growth.too_much is too_much, name
    assert "RSS 500.0 -> " in str(growth)


def test_the_table_tells_what_was_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ChaosReport({"cores": 2}, {"python": "3"}, "lexshard chaos", 17)
    good = ChaosRow("kills", "engine SIGKILL", 40, 40, noticed=0.1, recovered=7.25, note="fine")
    report.add(good)
    assert report.broken == []
    assert "Every promise was kept." in report.table()
    bad = ChaosRow("fuzz", "empty", 10, wrong=2)
    bad.broken = counted(["status 500 | number 3", "status 500 | number 7", "closed | number 9"])
    bad.expect(False, "something else")
    report.add(bad)
    table = report.table()
    assert "7.25" in table
    assert "BROKEN" in table
    assert "fuzz, empty: status 500 (2 times; number 3)" in table
    assert len(report.broken) == 3
    assert capsys.readouterr().out.count("\n") == 2
    report.write(tmp_path / "out" / "chaos.json")
    written = json.loads((tmp_path / "out" / "chaos.json").read_text())
    assert written["broken"] == report.broken
    assert written["rows"][0]["recovered"] == 7.25


def test_good_requests_are_seeded_and_of_every_kind() -> None:
    requests = seeded_requests(1, 28, 5)
    assert requests == seeded_requests(1, 28, 5)
    assert requests != seeded_requests(2, 28, 5)
    assert {request.path for request in requests} == set(GENERATING)
    assert all(isinstance(request.body["seed"], int) for request in requests)


def test_faults_are_of_processes_there_are() -> None:
    assert {fault.role for fault in FAULTS} == set(SERVING)
    assert set(LAST_FAULTS) <= set(ROLES)
    assert set(QUICK) <= {fault.name for fault in FAULTS}


def test_options_after_two_dashes_are_the_servers() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = parser.parse_args(["--parts", "fuzz,soak", "--quick", "--", "--samplers", "2"])
    assert (given.parts, given.options, given.quick) == (
        ("fuzz", "soak"),
        ["--samplers", "2"],
        True,
    )
    with pytest.raises(SystemExit):
        parser.parse_args(["--parts", "fuzz,none"])
