"""The tests that need a GPU, run by pytest in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "@pytest.mark.gpu"


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """How the tests ended; ``finished`` is False where time ran out."""

    passed: int
    failed: int
    skipped: int
    finished: bool
    log: str

    @property
    def sound(self) -> bool:
        return self.finished and self.failed == 0 and self.passed > 0


def gpu_test_files() -> list[Path]:
    """The test modules with a test marked ``gpu``. The others may need what is not installed."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return [path for path in files if MARK in path.read_text(encoding="utf-8")]


def run_tests(seconds: float) -> TestOutcome:
    """Runs every test marked ``gpu``, for at most ``seconds``."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    command.append("--continue-on-collection-errors")
    command += [str(path.relative_to(ROOT)) for path in gpu_test_files()]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return read_outcome(text, finished=False)
    return read_outcome(done.stdout + done.stderr, finished=done.returncode in (0, 1))


def read_outcome(log: str, *, finished: bool) -> TestOutcome:
    """Counts from pytest's last line; tests that cannot be collected count as failed."""
    found = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", log)
    }
    failed = found.get("failed", 0) + found.get("error", 0)
    return TestOutcome(found.get("passed", 0), failed, found.get("skipped", 0), finished, log)
