"""What a machine, or a container, gives a process, and what a process gives back to it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lexshard.actors.machine import physical_memory
from lexshard.kernels.team import cores
from tests.support.paths import ROOT

PROGRAM = """
import ctypes
import psutil
from lexshard.actors.machine import settle

library, size = ctypes.CDLL(None), 1000
library.malloc.restype = ctypes.c_void_p
blocks = [ctypes.c_void_p(library.malloc(size)) for _ in range(100_000)]
for block in blocks:
    ctypes.memset(block, 1, size)
for block in blocks[:-1]:  # the last one keeps the heap from ending before it
    library.free(block)
before = psutil.Process().memory_info().rss
settle()
print((before - psutil.Process().memory_info().rss) // size)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs GNU's C library")
def test_memory_that_was_given_back_is_no_more_this_process_s() -> None:
    told = subprocess.check_output([sys.executable, "-c", PROGRAM], cwd=ROOT, text=True)
    assert int(told) > 80_000  # blocks' worth


WHOLE = 9223372036854771712  # what version 1 says where there is no limit


@pytest.mark.parametrize(
    ("own", "files", "memory", "allowed"),
    [
        ("0::/", {"memory.max": "8000", "cpu.max": "150000 100000"}, 8000, 2),
        ("0::/", {"memory.max": "max", "cpu.max": "max 100000"}, None, 8),
        ("0::/", {"cpu.max": "1000 100000"}, None, 1),
        ("0::/", {}, None, 8),
        (
            "0::/a/b",
            {"a/b/memory.max": "9000", "a/memory.max": "7000", "a/b/cpu.max": "max 100000"}
            | {"a/cpu.max": "400000 100000", "c/memory.max": "1", "c/cpu.max": "1 1"},
            7000,
            4,
        ),
        (
            "4:memory:/a\n1:cpu,cpuacct:/a\n0::/",
            {"memory/a/memory.limit_in_bytes": f"{WHOLE}", "memory/memory.limit_in_bytes": "6000"}
            | {"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000"},
            6000,
            3,
        ),
        (
            "4:memory:/of/the/host\n1:cpu:/of/the/host",  # the container's own is at the root
            {"memory/memory.limit_in_bytes": f"{WHOLE}"}
            | {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            None,
            8,
        ),
    ],
)
def test_a_container_s_limits_are_what_there_is(
    own: str,
    files: dict[str, str],
    memory: int | None,
    allowed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host's memory and cores would be taken for the container's, which is killed then."""
    monkeypatch.setattr(cores, "GROUPS", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    whole = physical_memory()
    monkeypatch.setattr(cores, "GROUPS", tmp_path)
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(f"{own}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert physical_memory() == (memory or whole)
    assert cores.available_cores() == allowed
