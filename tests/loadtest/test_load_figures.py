"""Figures of a load against timelines made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lexshard.loadtest.bench.load.figures import (
    Objective,
    are_met,
    faults,
    figures,
    milliseconds,
    objective,
)
from lexshard.loadtest.bench.load.load_report import LoadReport
from lexshard.loadtest.bench.load.timeline import (
    LoadRun,
    RequestTimeline,
    counted_over,
    most_in_flight,
    over_time,
)

# Sent 10 ms late, first token after 100 ms, then 200 ms and 300 ms; one token more than pieces.
FIRST = RequestTimeline(1.0, 1.01, 1.61, (1.11, 1.31, 1.61), 20, 4)
SECOND = RequestTimeline(1.5, 1.5, 1.8, (1.8,), 10, 1)  # one token
SILENT = RequestTimeline(1.0, 1.0, 2.0, (), 10, 4)  # its tokens were no text
LOST = RequestTimeline(1.2, 1.2, 2.0, (1.4,), 0, 1, "status 503: full")
RUN = LoadRun("ours", 2.0, 0, (FIRST, SECOND, LOST), (0.0, 0.0, 0.004))


def found(run: LoadRun, *objectives: Objective) -> dict[str, float]:
    return {measure.name: value for measure, value in figures(run, objectives).items()}


def test_latencies_are_those_of_answered_requests_from_their_sending() -> None:
    samples = milliseconds(RUN)
    assert samples["TTFT"] == pytest.approx([100, 300])
    assert samples["TPOT"] == pytest.approx([500 / 3])
    assert samples["ITL"] == pytest.approx([200, 300])
    assert samples["E2E"] == pytest.approx([600, 300])


def test_figures_are_what_the_timelines_say() -> None:
    told = found(RUN)
    assert (told["answered"], told["errors"]) == (2, 1)
    assert told["requests/s"] == pytest.approx(2 / 1.8)  # until the last answer, not the failure
    assert told["output tokens/s"] == pytest.approx(5 / 1.8)
    assert told["all tokens/s"] == pytest.approx(35 / 1.8)
    assert told["TTFT mean"] == pytest.approx(200)
    assert told["TTFT median"] == pytest.approx(200)
    assert told["TTFT p90"] == pytest.approx(280)
    assert told["TTFT p99"] == pytest.approx(298)
    assert told["ITL p95"] == pytest.approx(295)
    assert told["most in flight"] == 3
    assert told["client late max"] == pytest.approx(10)
    assert told["client loop delay p99"] == pytest.approx(4, abs=0.1)
    assert "goodput" not in told
    assert faults(RUN) == [("status 503: full", 1)]


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("ttft:100.001", [True, False]),
        ("ttft:99", [False, False]),
        ("time_to_first_token:300.001", [True, True]),
        ("tpot:160", [False, True]),
        ("tpot:170", [True, True]),
        ("inter_token_latency:170", [True, True]),
        ("itl_p99:298", [False, True]),
        ("itl_p50:251", [True, True]),
        ("itl_max:300.001", [True, True]),
        ("itl_mean:249", [False, True]),
        ("e2el:500", [False, True]),
        ("request_latency:700", [True, True]),
    ],
)
def test_objectives_judge_every_request_by_itself(text: str, met: list[bool]) -> None:
    assert [are_met([objective(text)], each) for each in (FIRST, SECOND)] == met
    assert not are_met([objective(text)], LOST)


def test_nothing_is_said_of_tokens_that_were_not_heard() -> None:
    assert milliseconds(replace(RUN, requests=(SILENT,)))["TPOT"] == []
    assert not any(are_met([objective(text)], SILENT) for text in ("tpot:999", "itl_max:999"))


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    told = found(RUN, objective("ttft:300.001"), objective("e2e:400"))
    assert told["goodput"] == pytest.approx(1 / 1.8)
    assert told["good share"] == pytest.approx(1 / 3)


def test_a_server_that_dies_keeps_no_goodput() -> None:
    """Four requests a second for 25 seconds, of which it answers those of the first five."""
    sent = [number / 4 for number in range(100)]
    lives = [RequestTimeline(at, at, at + 0.1, (at + 0.1,), 9, 1) for at in sent[:20]]
    refused = [RequestTimeline(at, at, at, (), 9, 0, "gone") for at in sent[20:]]
    told = found(replace(RUN, requests=(*lives, *refused)), objective("ttft:200"))
    assert (told["goodput"], told["requests/s"]) == pytest.approx((0.8, 0.8), rel=0.02)


spans = st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 5)), min_size=1, max_size=30)


@settings(max_examples=40)
@given(spans)
def test_in_flight_is_counted_as_by_hand(drawn: list[tuple[float, float]]) -> None:
    pairs = [(start, start + length) for start, length in drawn]
    moments = np.linspace(0, 15, 40)
    by_hand = [sum(start <= moment < end for start, end in pairs) for moment in moments]
    assert counted_over(pairs, moments).tolist() == by_hand
    requests = [RequestTimeline(a, a, b, (), 1, 1) for a, b in pairs]
    assert most_in_flight(requests) >= max(by_hand)


def test_over_time_keeps_all_tokens_and_sees_who_waits() -> None:
    times = over_time(RUN, 20)
    width = times.seconds[0]
    assert times.tokens_per_second.sum() * width == pytest.approx(4 + 1 + 1)
    by_moment = {round(float(at), 2): index for index, at in enumerate(times.seconds)}
    assert (times.in_flight[by_moment[1.0]], times.waiting[by_moment[1.0]]) == (0, 0)
    assert (times.in_flight[by_moment[1.1]], times.waiting[by_moment[1.1]]) == (1, 1)
    assert (times.in_flight[by_moment[1.6]], times.waiting[by_moment[1.6]]) == (3, 1)


def report_of(*runs: LoadRun) -> LoadReport:
    report = LoadReport({}, {}, "lexshard bench serve", 0)
    report.add_runs({"rate": 2.0}, runs, ours="ours")
    return report


def test_endpoints_are_compared_run_by_run_and_failures_are_told() -> None:
    slow = tuple(
        replace(each, ended=2 * each.ended, pieces=tuple(2 * piece for piece in each.pieces))
        for each in RUN.requests
    )
    report = report_of(RUN, LoadRun("theirs", 2.0, 0, slow, ()))
    ratios = {each.case["measure"]: each.ratio for each in report.ratios}
    assert ratios["ITL median"] == pytest.approx(2.0)
    assert ratios["output tokens/s"] == pytest.approx(2.0)
    assert not {"errors", "client late p99", "most in flight"} & ratios.keys()
    assert {each.against for each in report.ratios} == {"theirs"}
    assert "ours, rate 2.0, run 1: 1 x status 503: full" in report.warnings
    assert "theirs" in report.table()


def test_a_late_client_is_named_whether_it_sent_or_noticed_late() -> None:
    in_time = replace(RUN, requests=(SECOND,))
    hung = replace(in_time, loop_delays=(0.2,) * 5)
    report = report_of(RUN, replace(in_time, run=1), replace(hung, run=2))
    report.tell(5.0, ())
    assert report.late_runs == 2
    late = [warning for warning in report.warnings if "THE CLIENT WAS LATE" in warning]
    assert ["run 1" in late[0], "run 3" in late[1]] == [True, True]
    early = report_of(RUN)
    early.tell(50.0, ())
    assert early.late_runs == 0
