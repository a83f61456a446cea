"""What has no time-out of its own gets one: by a watchdog, which ends the process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from lexshard.cluster.collective.watchdog import EXIT_STATUS, Watchdog
from tests.support.paths import ROOT


def test_what_is_done_in_time_is_let_be_and_what_is_not_is_bitten_once() -> None:
    bites: list[str] = []
    watchdog = Watchdog(1.0, bites.append)
    done: list[bool] = []
    watchdog.expect("first", lambda: bool(done))
    watchdog.expect("second", lambda: False)
    time.sleep(0.1)
    assert bites == []
    done.append(True)
    deadline = time.monotonic() + 30
    while not bites and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert bites == ["second: not done within 1 s, giving up"]
    watchdog.close()


def test_a_process_that_hangs_in_foreign_code_ends() -> None:
    script = (
        "import threading\n"
        "from lexshard.cluster.collective.watchdog import Watchdog\n"
        "Watchdog(0.5).expect('broadcast', lambda: False)\n"
        "threading.Lock().__enter__(); lock = threading.Lock(); lock.acquire(); lock.acquire()\n"
    )
    started = time.monotonic()
    ended = subprocess.run(
        (sys.executable, "-c", script), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == EXIT_STATUS
    assert "broadcast: not done within 0.5 s" in ended.stderr
    assert time.monotonic() - started < 30


def test_so_does_one_whose_log_nothing_reads_any_more() -> None:
    script = "from lexshard.cluster.collective.watchdog import end_process; end_process('hung')"
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run((sys.executable, "-c", script), cwd=ROOT, stderr=writes, timeout=60)
    os.close(writes)
    assert ended.returncode == EXIT_STATUS
