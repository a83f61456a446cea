"""Shards and samplers die at random moments of 200 streams: clients notice it only by waiting."""

from __future__ import annotations

import asyncio

import pytest

from lexshard.loadtest.bench.servers.command import our_server
from lexshard.loadtest.bench.servers.running import running
from lexshard.loadtest.chaos.kills import OPTIONS, run_faults
from lexshard.loadtest.chaos.report import ChaosReport
from tests.support.paths import DEMO


@pytest.mark.slow
def test_200_streams_keep_their_text_whatever_dies() -> None:
    """`lexshard chaos --parts faults`; with --quick these are 24. Links between processes of one
    machine are not cut: all of its shards share a network namespace."""
    report = ChaosReport(machine={}, versions={}, command="", seed=17)
    with running(our_server([*OPTIONS, "--model", str(DEMO)])) as server:
        server.wait_until_healthy()
        asyncio.run(run_faults(server, report, quick=False))
    print(report.table())
    assert report.broken == []
