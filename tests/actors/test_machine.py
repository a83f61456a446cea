"""What loading took and gave back is the system's again before a process serves."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

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
