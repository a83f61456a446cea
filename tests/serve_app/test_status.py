"""`GET /status` and `lexshard status`: who does what in a running server."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from lexshard.actors.configuration import EngineInformation
from lexshard.serve_app.commands.status import describe, describe_timings
from tests.support.mock_engine import MockEngine
from tests.support.mock_server import Client, serve


def test_status_names_every_role_with_its_process() -> None:
    async def check(client: Client) -> None:
        assert (await client.get("/status")).status_code == 401
        report = (await client.get("/status", headers={"Authorization": "Bearer key"})).json()
        assert report["ready"] is True
        assert [role["role"] for role in report["roles"]] == ["api", "body"]
        assert {role["process_id"] for role in report["roles"]} == {os.getpid()}
        assert report["counters"]["steps"] == 7

    serve(check, api_keys=["key"])


def test_the_page_has_a_line_for_each_role_and_says_what_is_waited_for() -> None:
    async def check(client: Client) -> None:
        page = describe((await client.get("/status")).json())
        lines = page.splitlines()
        assert lines[0].startswith("mock, lexshard ")
        assert any(line.startswith("body 0 ") and str(os.getpid()) in line for line in lines)
        assert "not ready: it is loading" in page
        assert "0 of 64 in use" in page

    serve(check, MockEngine(health_reason="it is loading"))


HEAD_TIMINGS = (
    ("one", 1, "dense-fp32", 1.25),
    ("one", 1, "int8", 0.5),
    ("one", 1, "int4", 12.0),
    ("one", 64, "dense-fp32", 19.129),
    ("one", 64, "int8", 25.0),
    ("several", 1, "dense-fp32", 2.25),
    ("several", 1, "int8", 1.5),
    ("several", 1, "int4", 22.0),
    ("several", 64, "dense-fp32", 20.0),
)
THREAD_TIMINGS = ((1, 1, 1.34), (1, 2, 1.6), (16, 1, 5.27), (16, 2, 3.39))


class TimedEngine(MockEngine):
    """One that has timed screens and threads."""

    @property
    def information(self) -> EngineInformation:
        return replace(
            super().information, head_timings=HEAD_TIMINGS, thread_timings=THREAD_TIMINGS
        )


def test_timings_are_told_to_those_who_ask() -> None:
    async def check(client: Client) -> None:
        report: dict[str, Any] = (await client.get("/status")).json()
        assert "milliseconds" not in describe(report)
        head, threads = (part.splitlines() for part in describe_timings(report).split("\n\n"))
        assert head[0] == "output head"
        assert "milliseconds" in head[1]
        assert [line.split() for line in head[2:]] == [
            ["without", "top-k", "with", "top-k"],
            ["rows", *2 * ["dense-fp32", "int8", "int4"]],
            ["1", "1.25", "0.50", "12.00", "2.25", "1.50", "22.00"],
            ["64", "19.13", "25.00", "-", "20.00", "-", "-"],
        ]
        assert len({len(line) for line in head[2:]}) == 1
        assert threads[0] == "threads"
        assert [line.split() for line in threads[2:]] == [
            ["rows", "1", "2"],
            ["1", "1.34", "1.60"],
            ["16", "5.27", "3.39"],
        ]

    serve(check, TimedEngine())


def test_of_timings_that_were_not_taken_there_is_no_table() -> None:
    async def check(client: Client) -> None:
        report = (await client.get("/status")).json()
        assert describe_timings(report).startswith("nothing was timed")

    serve(check)
    serve(check, MockEngine(health_reason="it is loading"))
