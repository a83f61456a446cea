"""`lexshard bench serve` from end to end against endpoints without an engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from lexshard.loadtest.bench.load.plan import PlannedRequest, Wording
from lexshard.loadtest.bench.load.sender import ClientTask, follow
from lexshard.loadtest.bench.load.timeline import RequestTimeline
from lexshard.serve_app.cli import main
from tests.support.mock_engine import MockEngine, Script
from tests.support.mock_server import listening
from tests.support.real_server import running_server
from tests.support.scripted_endpoint import (
    MODEL,
    TOKENS_PER_WORD,
    EndpointScript,
    prompt_of,
    scripted_endpoint,
)

# A busy machine makes any client late; what is tested here is not how idle it is.
PATIENT = ("--late-limit", "60000")


def asked(
    script: EndpointScript, moments: list[float], **task: object
) -> tuple[list[RequestTimeline], list[float]]:
    wording = Wording(chat=False, model=MODEL, fields={})
    requests = [PlannedRequest(each, wording.body("some words", 6)) for each in moments]
    with scripted_endpoint(script) as url:
        options = {"timeout": 20.0, **task}
        return asyncio.run(follow(ClientTask(url, wording.path, requests, **options)))  # type: ignore[arg-type]


def test_requests_are_sent_at_their_moments_whoever_still_waits() -> None:
    moments = [0.0, 0.05, 0.1, 0.15]
    timelines, delays = asked(EndpointScript(first_seconds=0.5), moments)
    assert [each.planned for each in timelines] == moments
    assert all(each.sent >= each.planned for each in timelines)
    assert timelines[-1].sent < timelines[0].first
    assert delays
    for each in timelines:
        assert each.fault == ""
        assert len(each.pieces) == each.output_tokens == 6
        assert each.ttft >= 0.5
        # On a busy machine pieces are read together.
        assert each.sent < each.pieces[0] <= each.pieces[-1] <= each.ended


@pytest.mark.parametrize("chat", [False, True])
def test_what_our_application_streams_is_a_whole_answer(chat: bool) -> None:
    wording = Wording(chat, "mock", {"ignore_eos": True})
    requests = [PlannedRequest(0.02 * index, wording.body("some words", 6)) for index in range(5)]
    engine = MockEngine(script=lambda _: Script([[97]] * 6, seconds_per_step=0.001))
    with listening(engine) as url:
        timelines, _ = asyncio.run(follow(ClientTask(url, wording.path, requests, 20.0)))
    for each in timelines:
        assert each.fault == ""
        assert each.output_tokens == 6
        assert each.prompt_tokens >= len("some words")  # a token of this tokenizer is a byte


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("status", "status 503: full"),
        ("unfinished", "stream ended without a finish_reason"),
        ("undone", "stream ended without [DONE]"),
        ("error event", "error event: the engine died"),
        ("cut", "connection closed by the server"),
    ],
)
def test_answers_that_are_none_are_told_with_their_reason(fault: str, reason: str) -> None:
    moments = [0.0, 0.2, 0.4, 0.6]
    timelines, _ = asked(EndpointScript(fault=fault), moments)
    reasons = [each.fault for each in timelines]
    assert sorted(reasons) == ["", "", reason, reason]


@pytest.mark.slow
def test_the_command_loads_endpoints_by_turns_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick, slow = EndpointScript(), EndpointScript(first_seconds=0.06, gap_seconds=0.006)
    path = tmp_path / "load.json"
    with scripted_endpoint(quick) as ours, scripted_endpoint(slow) as theirs:
        command = ["bench", "serve", "--against", f"ours={ours}"]
        command += ["--against", f"theirs={theirs}/v1"]
        command += ["--rate", "20,40", "--requests", "8", "--prompt-tokens", "30", "--warm-up", "1"]
        command += ["--output-tokens", "5", "--goodput", "ttft:45", "e2el:2000", *PATIENT]
        assert main([*command, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "rate 20.0, TTFT median" in printed
    report = json.loads(path.read_text())
    assert {"machine", "versions", "command", "seed", "results", "ratios"} <= report.keys()
    medians = {
        (each["case"]["rate"], each["name"], each["case"]["measure"]): each["median"]
        for each in report["results"]
    }
    for rate in (20.0, 40.0):
        assert medians[rate, "ours", "answered"] == 8
        assert medians[rate, "ours", "TTFT median"] < medians[rate, "theirs", "TTFT median"]
        assert medians[rate, "theirs", "good share"] == 0
    assert [each["endpoint"] for each in report["load"]] == ["ours", "theirs"] * 2
    # The same requests for both, prompts of the length asked for, and no two of them alike.
    bodies = [prompt_of(body) for body in quick.streamed]
    assert sorted(bodies) == sorted(prompt_of(body) for body in slow.streamed)
    assert len(set(bodies)) == len(bodies) == 17
    assert {len(body.split()) for body in bodies} == {30 / TOKENS_PER_WORD}


def test_a_trace_is_replayed_with_its_own_times_to_a_conversation(tmp_path: Path) -> None:
    script, path = EndpointScript(first_seconds=0.001, gap_seconds=0.0), tmp_path / "load.json"
    with scripted_endpoint(script) as url:
        command = ["bench", "serve", "--against", url, "--chat", "--arrivals", "trace"]
        command += ["--trace", "azure-conversation", "--time-scale", "0.02", "--requests", "30"]
        command += ["--length-scale", "0.1", "--warm-up", "0", *PATIENT, "--json", str(path)]
        assert main(command) == 0
    (run,) = json.loads(path.read_text())["load"]
    assert run["requests"][1]["planned"] == pytest.approx(0.02 * 4.314579, abs=1e-4)
    assert run["requests"][0]["prompt_tokens"] == pytest.approx(37 + 7, abs=2)
    assert run["requests"][0]["output_tokens"] == 4
    assert all("messages" in body and body["ignore_eos"] for body in script.streamed)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--output-tokens", "500"], "takes 400: give --length-scale"),
        (["--arrivals", "trace"], "give --trace"),
        (["--trace", "nothing.csv"], "nothing.csv: No such file"),
        (["--burstiness", "2"], "--burstiness is for --arrivals gamma"),
        (["--model", "other"], "serves scripted, not other"),
        (["--key-variable", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE is not set"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is_sent(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = EndpointScript(max_model_len=400)
    with scripted_endpoint(script) as url:
        assert main(["bench", "serve", "--against", url, *options]) == 1
    assert said in capsys.readouterr().err
    assert script.streamed == []


def test_a_late_client_is_an_exit_status_and_stands_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "load.html"
    with scripted_endpoint(EndpointScript()) as url:
        command = ["bench", "serve", "--against", url, "--requests", "3", "--rate", "50"]
        command += ["--late-limit", "0.000001", "--warm-up", "0", "--html", str(page)]
        assert main(command) == 1
    assert "THE CLIENT WAS LATE" in capsys.readouterr().out
    assert "THE CLIENT WAS LATE" in page.read_text(encoding="utf-8")
    assert "<svg" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_real_server_answers_everything_and_a_page_shows_it(tmp_path: Path) -> None:
    path, page = tmp_path / "load.json", tmp_path / "load.html"
    with running_server(tmp_path) as server:
        command = ["bench", "serve", "--against", server.url, "--rate", "4", "--requests", "24"]
        command += ["--arrivals", "gamma", "--burstiness", "0.5"]
        command += ["--trace", "mooncake-conversation"]
        command += ["--length-scale", "0.02", "--max-output-tokens", "24", *PATIENT]
        assert main([*command, "--json", str(path), "--html", str(page)]) == 0
    report = json.loads(path.read_text())
    assert report["warnings"] == []
    (run,) = report["load"]
    assert all(each["output_tokens"] <= 24 for each in run["requests"])
    assert "<svg" in page.read_text()
