"""The tests that need a GPU, run by pytest, every module in a process of its own.

A fault in one kernel ends the CUDA context of its process, and must not end the other tests. With
cold caches nearly all of a module's time is its compiler's, so several run beside each other.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from lexshard.loadtest.gpu.timing import Budget

ROOT = Path(__file__).resolve().parents[2]
MARK = "@pytest.mark.gpu"
# What takes longest begins first.
FIRST = ("test_engine_on_gpu.py", "test_device_search.py")
MODULES_AT_ONCE = 6
MODULE_SECONDS = 150.0
PROCESSES_OF_FIRST = 4  # where pytest-xdist is installed


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """How tests ended; ``left_out`` are the modules whose time ran out."""

    passed: int
    failed: int
    skipped: int
    log: str
    left_out: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        return not self.left_out and self.failed == 0 and self.passed > 0


def gpu_test_files() -> list[Path]:
    """The test modules with a test marked ``gpu``. The others may need what is not installed."""
    files = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if MARK in path.read_text(encoding="utf-8")
    ]
    return sorted(files, key=lambda path: (path.name not in FIRST, path.name))


def run_tests(budget: Budget) -> TestOutcome:
    """Runs every test marked ``gpu`` that the budget allows, each module for a while at most."""
    at_once = max(1, min(MODULES_AT_ONCE, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(at_once) as pool:
        return joined(pool.map(partial(_run_module, budget=budget), gpu_test_files()))


def joined(outcomes: Iterable[TestOutcome]) -> TestOutcome:
    """The outcomes of several modules as one."""
    every = list(outcomes)
    return TestOutcome(
        passed=sum(each.passed for each in every),
        failed=sum(each.failed for each in every),
        skipped=sum(each.skipped for each in every),
        log="\n".join(each.log for each in every),
        left_out=tuple(name for each in every for name in each.left_out),
    )


def read_outcome(log: str) -> TestOutcome:
    """Counts from pytest's last line; tests that cannot be collected count as failed."""
    found = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", log)
    }
    failed = found.get("failed", 0) + found.get("error", 0)
    return TestOutcome(found.get("passed", 0), failed, found.get("skipped", 0), log)


def _run_module(path: Path, budget: Budget) -> TestOutcome:
    name = str(path.relative_to(ROOT))
    if budget.spent:
        return TestOutcome(0, 0, 0, f"{name}: no time left", (name,))
    own = budget.part(MODULE_SECONDS)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", name]
    if path.name in FIRST and find_spec("xdist"):
        command += ["--numprocesses", str(PROCESSES_OF_FIRST)]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=own.left,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TestOutcome(0, 0, 0, f"{name}: stopped when its time was over", (name,))
    log = f"{name}\n{done.stdout}{done.stderr}"
    outcome = read_outcome(log)
    if done.returncode not in (0, 1) and not outcome.failed:
        # Pytest itself did not come to an end, or not to one with tests in it.
        return TestOutcome(outcome.passed, 1, outcome.skipped, log)
    return outcome
