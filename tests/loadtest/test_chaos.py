"""The pieces of `lexshard chaos` without a server: what it sends, and how it judges answers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from lexshard.loadtest.bench.servers.processes import ROLES
from lexshard.loadtest.chaos import command
from lexshard.loadtest.chaos.fuzz import breach
from lexshard.loadtest.chaos.hostile import (
    END,
    END_OF_TEXT,
    FIELDS,
    GENERATING,
    KINDS,
    LEAVES,
    MANY_TOKENS,
    ROUTES,
    HostileRequest,
    hostile_request,
)
from lexshard.loadtest.chaos.kills import FAULTS, LAST_FAULTS, QUICK, judge_newcomers
from lexshard.loadtest.chaos.report import ChaosReport, ChaosRow
from lexshard.loadtest.chaos.requests import (
    CUT,
    KEPT,
    REFUSED,
    WRONG,
    Heard,
    fate,
    judge_streams,
)
from lexshard.loadtest.chaos.watch import MEBIBYTE, SERVING, Look, growth
from lexshard.loadtest.client import CLOSED, LATE, UNREACHABLE, WHOLE, HttpAnswer
from lexshard.serve_app.cli import main
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


BROKEN_STREAM = b"data: " + error(500) + b"\n\ndata: [DONE]\n\n"


def answered(status: int, body: bytes, **headers: str) -> HttpAnswer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpAnswer(status, named, body, WHOLE)


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
        (HttpAnswer(ended=CLOSED), "closed without"),
        (HttpAnswer(ended=LATE), "no answer within 5 s"),
        (HttpAnswer(200, {}, b"{", CLOSED), "broke off"),
        (answered(200, b"data: {}\n\ndata: [DONE]\n\n", content_type="text/event-stream"), None),
        (answered(200, b"data: {}\n\n", content_type="text/event-stream"), "silently"),
        (answered(200, BROKEN_STREAM, content_type="text/event-stream"), "with server_error"),
    ],
)
def test_answers_that_were_not_promised_are_told(answer: HttpAnswer, reason: str | None) -> None:
    found = breach(HostileRequest((b"",)), answer)
    assert found is None if reason is None else reason in (found or "")


def test_who_leaves_or_is_incomplete_may_expect_less() -> None:
    gone, silent = HttpAnswer(ended=CLOSED), HttpAnswer(ended=LATE)
    assert breach(HostileRequest((), expects=END), gone) is None
    assert breach(HostileRequest((), expects=END), silent) is not None
    assert breach(HostileRequest((), expects=LEAVES), silent) is None
    assert breach(HostileRequest((), expects=LEAVES), answered(500, error(500))) is not None
    assert breach(HostileRequest((), method="HEAD"), answered(404, b"")) is None


def heard(ended: str, text: str = "Once upon", status: int = 200, **changes: Any) -> Heard:
    """What a client heard: all of ``text`` with its end, or so much of it."""
    answer = HttpAnswer(status, ended=ended, **changes)
    own = Heard(answer, sent=100.0, answered=100.5)
    if status == 200:
        reason = "length" if ended == WHOLE else None
        own.stream.take_choice({"index": 0, "text": text, "finish_reason": reason}, 0.0)
        own.stream.done = ended == WHOLE
    return own


def told(text: str) -> Heard:
    """A stream that ended with an error event."""
    own = heard(CLOSED, text)
    own.answer.ended, own.stream.error, own.stream.done = WHOLE, "error event: no", True
    return own


def silent(text: str) -> Heard:
    """A stream that ended as if nothing had happened, but for its last event."""
    own = heard(CLOSED, text)
    own.answer.ended = WHOLE
    return own


EXPECTED = heard(WHOLE)
LATER = {"headers": {"retry-after": "1"}}


@pytest.mark.parametrize(
    ("said", "result"),
    [
        (heard(WHOLE), KEPT),
        (heard(WHOLE, "Once UPON"), WRONG),
        (heard(WHOLE, "Once"), WRONG),
        (silent("Once"), WRONG),
        (heard(LATE, "Once"), WRONG),
        (heard(CLOSED, "Once"), CUT),
        (heard(CLOSED, "Twice"), WRONG),
        (heard(UNREACHABLE, "", 0), CUT),
        (told("Once"), CUT),
        (heard(WHOLE, "", 503, body=error(503), **LATER), REFUSED),
        (heard(WHOLE, "", 503, body=b"busy", **LATER), WRONG),
        (heard(WHOLE, "", 503, body=error(503)), WRONG),
        (heard(WHOLE, "", 500), WRONG),
    ],
)
def test_what_became_of_a_stream(said: Heard, result: str) -> None:
    became, reason = fate(said, EXPECTED)
    assert became == result
    assert bool(reason) == (result != KEPT)


def test_wrong_text_and_cut_streams_break_a_promise() -> None:
    said = [heard(WHOLE), heard(CLOSED, "Once"), heard(WHOLE, "Twice upon")]
    survivable, deadly = ChaosRow("kills", "engine"), ChaosRow("kills", "replica")
    judge_streams(survivable, said, [EXPECTED] * 3, may_cut=False)
    judge_streams(deadly, said[:2], [EXPECTED] * 2, may_cut=True)
    assert (survivable.kept, survivable.cut, survivable.wrong) == (1, 1, 1)
    assert len(survivable.broken) == 2
    assert (deadly.kept, deadly.cut, deadly.broken) == (1, 1, [])


def newcomer(sent: float, seconds: float, status: int = 200, **changes: Any) -> Heard:
    own = heard(WHOLE, status=status, body=error(503) if status == 503 else b"", **changes)
    own.sent, own.answered = sent, sent + seconds
    return own


def lost(sent: float) -> Heard:
    own = heard(CLOSED, "", 0)
    own.sent, own.answered = sent, sent + 0.1
    return own


def judged(newcomers: list[Heard], looks: list[Look], *, no_ingress: bool = False) -> ChaosRow:
    row = ChaosRow("kills", "engine")
    judge_newcomers(row, newcomers, looks, 100.0, 100.0, no_ingress)
    return row


def test_noticing_and_recovery_are_timed() -> None:
    crowd = [
        newcomer(99.9, 8.0),  # taken in before it was noticed
        newcomer(101.0, 0.1, 503, **LATER),
        newcomer(105.0, 0.1, 503, **LATER),
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
        (lost(102.0), "not answered"),
    ],
)
def test_newcomers_in_trouble_break_a_promise(trouble: Heard, reason: str) -> None:
    row = judged([newcomer(101.0, 0.1, 503, **LATER), trouble, newcomer(109.0, 0.1)], [])
    assert [reason in each for each in row.broken] == [True]


def test_without_an_ingress_nothing_can_answer() -> None:
    assert judged([lost(102.0), newcomer(109.0, 0.1)], [], no_ingress=True).broken == []
    [never] = judged([lost(102.0)], [], no_ingress=True).broken
    assert never == "requests were never served again"


def test_growth_is_told_from_noise() -> None:
    steady = [(500.0 * MEBIBYTE + when, 50.0, 20.0) for when in range(30)]
    assert growth(steady[:2]) is None
    for more, too_much in (
        ((30.0 * MEBIBYTE, 0.0, 0.0), False),
        ((90.0 * MEBIBYTE, 0.0, 0.0), True),
        ((0.0, 20.0, 0.0), True),
        ((0.0, 0.0, 8.0), True),
    ):
        later = tuple(a + b for a, b in zip(steady[0], more, strict=True))
        found = growth([*steady, *[later] * 10])  # type: ignore[list-item]
        assert found is not None
        assert found[2] is too_much, more


def test_the_table_tells_what_was_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ChaosReport({"cores": 2}, {"python": "3"}, "lexshard chaos", 17)
    good = ChaosRow("kills", "engine SIGKILL", 40, 40, noticed=0.1, recovered=7.25, note="fine")
    report.add(good)
    assert report.broken == []
    assert "Every promise was kept." in report.table()
    bad = ChaosRow("fuzz", "empty", 10, wrong=2)
    bad.broken = ["status 500 | number 3", "status 500 | number 7", "closed | number 9"]
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


def test_faults_are_of_processes_there_are() -> None:
    assert {fault.role for fault in FAULTS} == set(SERVING)
    known = {role for _, role in ROLES}
    assert set(SERVING) | set(LAST_FAULTS.values()) <= known
    assert set(QUICK) <= {fault.name for fault in FAULTS}


def test_an_unknown_case_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["chaos", "--only", "haproxy SIGKILL"]) == 2
    assert "no case is called haproxy SIGKILL; there are" in capsys.readouterr().err


def test_options_after_two_dashes_are_the_servers() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = parser.parse_args(["--parts", "fuzz,soak", "--quick", "--", "--samplers", "2"])
    assert (given.parts, given.quick) == (("fuzz", "soak"), True)
    assert given.options == ["--samplers", "2"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--parts", "fuzz,none"])
