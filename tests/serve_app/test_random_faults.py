"""Shards and samplers die at random moments of 200 streams: nobody notices but by waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lexshard.loadtest.chaos.random_faults import OPTIONS, run_faults
from lexshard.loadtest.chaos.report import ChaosReport
from lexshard.loadtest.chaos.server import started_server
from tests.support.paths import DEMO


@pytest.mark.slow
def test_200_streams_keep_their_text_whatever_dies(tmp_path: Path) -> None:
    """`lexshard chaos --parts faults`; with --quick these are 24. Links between processes of one
    machine are not cut: all of its shards share a network namespace."""
    report = ChaosReport(machine={}, versions={}, command="", seed=17)
    with started_server(str(DEMO), OPTIONS, tmp_path / "server.log") as server:
        asyncio.run(run_faults(server, report, quick=False))
    print(report.table())
    assert report.broken == []
