"""Log lines: for people or for programs, and every one that is about a request names it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from lexshard.actors.faults import MOST_FAULTS, LastFaults
from lexshard.serve_app.commands.status import describe
from lexshard.serve_app.observability.logs import json_line, log_to
from tests.support.mock_engine import MockEngine, Script, ids
from tests.support.mock_server import Client, serve


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Ours, as it was afterwards."""
    ours = logging.getLogger("lexshard")
    before = ours.handlers, ours.level, ours.propagate
    yield ours
    ours.handlers, ours.level, ours.propagate = before


def test_lines_are_json_objects_with_the_fields_of_the_request(logger: logging.Logger) -> None:
    stream = io.StringIO()
    log_to(stream, "json")
    engine = MockEngine(script=lambda request: Script([ids("a")], error="broken"))

    async def check(client: Client) -> None:
        headers = {"x-request-id": "mine"}
        await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)

    serve(check, engine)
    lines: list[dict[str, Any]] = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert {line["request_id"] for line in lines} == {"mine"}
    failure, request = lines
    assert (failure["level"], failure["logger"]) == ("ERROR", "lexshard.http")
    assert (request["status"], request["path"]) == (500, "/v1/completions")
    assert request["message"].startswith("id=mine POST /v1/completions status=500")
    assert request["time"].endswith("+00:00")


def test_an_exception_is_part_of_its_line(logger: logging.Logger) -> None:
    stream = io.StringIO()
    log_to(stream, "json")
    try:
        raise ZeroDivisionError("secret")
    except ZeroDivisionError:
        logger.exception("it failed")
    [line] = stream.getvalue().splitlines()
    assert "ZeroDivisionError: secret" in json.loads(line)["exception"]


def test_text_is_for_people(logger: logging.Logger) -> None:
    stream = io.StringIO()
    log_to(stream, "text")
    logger.info("%d engines", 2)
    assert stream.getvalue().endswith(" INFO lexshard 2 engines\n")


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("[  1.0 s] starting Ray\n", {"message": "[  1.0 s] starting Ray"}),
        (
            '\x1b[36m(ServeReplica:lexshard:server pid=12)\x1b[0m {"message": "a", "status": 200}',
            {"message": "a", "status": 200, "process": "ServeReplica:lexshard:server pid=12"},
        ),
        (
            "(EngineActor pid=7) [ 0.1 s] engine: loading",
            {"message": "[ 0.1 s] engine: loading", "process": "EngineActor pid=7"},
        ),
        ("[1, 2]", {"message": "[1, 2]", "level": "INFO", "logger": "lexshard.output"}),
        (
            "(EngineActor pid=7) WARNING:lexshard.sampler:a sampler is lost",
            {"message": "a sampler is lost", "level": "WARNING", "logger": "lexshard.sampler"},
        ),
    ],
)
def test_whatever_a_process_prints_becomes_one_object(printed: str, told: dict[str, Any]) -> None:
    line = json.loads(json_line(printed))
    assert {name: line[name] for name in told} == told
    assert ("process" in line) == ("pid=" in printed)


def test_the_last_faults_are_kept_and_shown_by_status() -> None:
    faults = LastFaults()
    logger = logging.Logger("lexshard.test")
    logger.addHandler(faults)
    logger.info("nothing to worry about")
    for number in range(MOST_FAULTS + 4):
        logger.warning("fault %d\nmore of it", number)
    told = faults.told()
    assert [fault.text for fault in told] == [f"fault {i}" for i in range(4, MOST_FAULTS + 4)]

    async def check(client: Client) -> str:
        return describe((await client.get("/status")).json())

    page: str = serve(check)
    assert "last faults" in page
    assert "a sampler is lost and will be replaced: it was killed" in page
    assert "queue       0 of 256 sequences admitted, 0 of 131072 prompt tokens wait" in page
