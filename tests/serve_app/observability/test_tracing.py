"""Spans of requests: whose trace they belong to, what they say, and that they delay none."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lexshard.actors.messages import SequenceTiming
from lexshard.cluster.ports import free_port
from lexshard.serve_app.observability.tracing import Tracing, traces_url
from lexshard.serve_app.request_record import RequestRecord
from tests.support.collector import collector
from tests.support.mock_engine import MockEngine, Script, ids
from tests.support.mock_server import Client, serve

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PATHS = ("/v1/completions",)


@pytest.mark.parametrize(
    ("header", "goes_on", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True, True),
        (f"00-{TRACE}-{SPAN}-00", True, False),
        (f"00-{TRACE}-{SPAN}-01-new", False, True),
        (f"00-{'0' * 32}-{SPAN}-01", False, True),
        ("nonsense", False, True),
        (None, False, True),
    ],
)
def test_a_callers_trace_is_gone_on_with_and_nonsense_is_ignored(
    header: str | None, goes_on: bool, sampled: bool
) -> None:
    """A trace that its caller does not sample is not sent, and named all the same."""
    with collector() as there:
        tracing = Tracing(there.url, {}, "1", PATHS)
        record = finished(tracing, **({} if header is None else {"traceparent": header}))
        tracing.close()
        assert bool(there.spans) is sampled
    assert record.traceparent is not None
    _, trace, span, flags = record.traceparent.split("-")
    assert (trace == TRACE, bool(int(flags, 16) & 1)) == (goes_on, sampled)
    assert span != SPAN


def test_an_endpoint_without_a_path_gets_the_standard_one() -> None:
    assert traces_url("http://host:4318") == "http://host:4318/v1/traces"
    assert traces_url("http://host:4318/") == "http://host:4318/v1/traces"
    assert traces_url("https://host/own/traces") == "https://host/own/traces"


def finished(tracing: Tracing, **headers: str) -> RequestRecord:
    """A request of 0.5 s: 0.1 queued, 0.1 of prefill, 0.2 of tokens."""
    record = RequestRecord("name", "POST", "/v1/completions", "client", status=200)
    record.start_time -= 0.5
    tracing.begin(record, headers)
    record.first_token_time = record.start_time + 0.25
    record.piece_times = [record.first_token_time, record.first_token_time + 0.2]
    record.prompt_tokens, record.completion_tokens = 4, 2
    record.note_timing(SequenceTiming(queued=0.1, prefill=0.1))
    record.note_timing(SequenceTiming(queued=0.1, prefill=0.1, verify=0.05, exchange=0.02))
    tracing.end(record)
    return record


def test_spans_tell_where_the_time_of_a_request_went() -> None:
    with collector() as there:
        tracing = Tracing(there.url, {"model": "demo", "replica": "here"}, "1", PATHS)
        finished(tracing, traceparent=f"00-{TRACE}-{SPAN}-01")
        tracing.close()
        spans = {span.name: span for span in there.spans}
    assert set(spans) == {
        *("POST /v1/completions", "queue", "prefill", "decode", "verify", "exchange")
    }
    root = spans["POST /v1/completions"]
    assert root.parent_span_id.hex() == SPAN
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    for name, within in (
        *((part, root) for part in ("queue", "prefill", "decode")),
        *((part, spans["decode"]) for part in ("verify", "exchange")),
    ):
        assert spans[name].parent_span_id == within.span_id

    def seconds(span: Any) -> float:
        return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9

    assert seconds(root) == pytest.approx(0.5, abs=0.1)
    expected = {"queue": 0.1, "prefill": 0.1, "decode": 0.2, "verify": 0.05, "exchange": 0.02}
    assert {name: round(seconds(spans[name]), 3) for name in expected} == expected
    assert spans["queue"].end_time_unix_nano == spans["prefill"].start_time_unix_nano
    assert abs(spans["prefill"].end_time_unix_nano - spans["decode"].start_time_unix_nano) < 1000
    assert abs(root.end_time_unix_nano / 1e9 - time.time()) < 60
    told = {each.key: each.value for each in root.attributes}
    assert told["lexshard.request_id"].string_value == "name"
    assert told["http.response.status_code"].int_value == 200
    assert told["gen_ai.usage.output_tokens"].int_value == 2
    resource = {each.key: each.value.string_value for each in there.resources[0].attributes}
    assert (resource["service.name"], resource["lexshard.model"]) == ("lexshard", "demo")


def test_a_response_names_its_span_and_every_part_has_its_request_id() -> None:
    timing = SequenceTiming(queued=0.0, prefill=0.0)

    async def check(client: Client) -> tuple[str, str]:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "mine"}
        reply = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert reply.status_code == 200
        assert (await client.get("/health")).headers.get("traceparent") is None
        own = await client.get("/v1/models")
        return reply.headers["traceparent"], own.headers["traceparent"]

    with collector() as there:
        engine = MockEngine(timing=timing)
        given, own = serve(check, engine, otlp_traces_endpoint=there.url)
        deadline = time.monotonic() + 10
        while len(there.spans) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        spans = list(there.spans)
    version, trace, span, flags = given.split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    assert own.split("-")[1] != TRACE
    mine = [each for each in spans if each.trace_id.hex() == TRACE]
    assert sorted(each.name for each in mine) == [
        *("POST /v1/completions", "decode", "prefill", "queue")
    ]
    [root] = [each for each in mine if each.name.startswith("POST")]
    assert root.span_id.hex() == span
    told = {
        attribute.value.string_value
        for each in mine
        for attribute in each.attributes
        if attribute.key == "lexshard.request_id"
    }
    assert told == {"mine"}


def test_without_the_option_no_response_names_a_span() -> None:
    async def check(client: Client) -> None:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        reply = await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert "traceparent" not in reply.headers

    serve(check)


@pytest.mark.parametrize("kind", ["slow", "gone"])
def test_no_request_waits_for_a_collector(kind: str) -> None:
    """Requests are answered while the first spans are still on their way."""
    engine = MockEngine(script=lambda request: Script([ids("a")]))

    async def check(client: Client) -> float:
        started = time.monotonic()
        for _ in range(50):
            reply = await client.post("/v1/completions", json={"prompt": "a"})
            assert reply.status_code == 200
        return time.monotonic() - started

    with collector(seconds=3600) as there:
        url = there.url if kind == "slow" else f"http://127.0.0.1:{free_port()}"
        serve(check, engine, otlp_traces_endpoint=url)
        assert there.spans == []  # it still sits on what it has been sent
        tracing = Tracing(url, {}, "1", PATHS)
        for _ in range(1_000):  # more than may wait: the rest is dropped
            finished(tracing)
        started = time.monotonic()
        tracing.close()
        assert time.monotonic() - started < 60
