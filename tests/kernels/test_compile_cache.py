"""Several processes that compile at the same time leave a cache in which every entry is its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from numba.core.caching import IndexDataCacheFile

from tests.support.paths import ROOT

PROCESSES, KEYS = 4, 40

SAVE = f"""
import sys, time
import kernels
from numba.core.caching import IndexDataCacheFile
folder, process, start = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
cache = IndexDataCacheFile(folder, "kernel", "stamp")
time.sleep(max(0.0, start - time.time()))
for number in range({KEYS}):
    cache.save((process, number), ["code of", process, number])
"""


def test_whoever_saves_at_the_same_time_every_key_has_its_own_code(tmp_path: Path) -> None:
    start = str(time.time() + 4.0)  # when all have imported what they need
    savers = [
        subprocess.Popen([sys.executable, "-c", SAVE, str(tmp_path), str(process), start], cwd=ROOT)
        for process in range(PROCESSES)
    ]
    assert [each.wait() for each in savers] == [0] * PROCESSES
    cache = IndexDataCacheFile(str(tmp_path), "kernel", "stamp")
    for process in range(PROCESSES):
        for number in range(KEYS):
            assert cache.load((process, number)) == ["code of", process, number]
