"""Triton's interpreter, which is chosen when Triton is imported: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


def interpret(program: str) -> None:
    """Runs ``program``, whose kernels are interpreted; skips where there is no Triton."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=ROOT)
