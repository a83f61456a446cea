"""`GET /status` and `lexshard status`: who does what in a running server."""

from __future__ import annotations

import os
from typing import Any

from serve_app.commands.status import describe
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


def test_a_server_that_is_not_ready_says_why() -> None:
    async def check(client: Client) -> None:
        report = (await client.get("/status")).json()
        page = describe(report)
        assert "not ready: it is loading" in page
        assert "0 of 64 in use" in page

    serve(check, MockEngine(health_reason="it is loading"))


def test_the_page_has_a_line_for_each_role() -> None:
    async def check(client: Client) -> None:
        report: dict[str, Any] = (await client.get("/status")).json()
        lines = describe(report).splitlines()
        assert lines[0].startswith("mock, lexshard ")
        assert any(line.startswith("body 0 ") and str(os.getpid()) in line for line in lines)

    serve(check)
