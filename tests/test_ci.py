"""`make test` and `make prove`: what fails in one part keeps no other from running."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import llvmlite.binding
import psutil
import pytest

from tests.support.paths import ROOT

# In the place of Python: notes what it is asked to run, and fails where that is to fail.
STAND_IN = """#!/bin/sh
trap 'exit 2' INT  # as pytest does
[ "$1" = -c ] && exit  # kernels are compiled
echo "${LEXSHARD_CPU:-here} $*" >>calls
while [ -n "$WAITING" ]; do sleep 0.05; done
case "$*" in *"$FAILING"*) exit 1 ;; esac
"""
WITHOUT_SERVERS = "here -m pytest --numprocesses 2"
ALONE = "here -m pytest -m timed"
WITH_SERVERS = "--ignore=tests/actors --ignore=tests/kernels --ignore=tests/loadtest"


def start(script: str, folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    """A script of `.ci` that runs in a group of its own, with the stand-in."""
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", **variables}
    return subprocess.Popen(
        ["bash", f".ci/{script}"],
        cwd=folder,
        env=environment,
        start_new_session=True,
        # In the background it may be ignored, and shells trap no such signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(script: str, failing: str, folder: Path) -> tuple[int, list[str]]:
    """The exit status of a script of `.ci`, and what it ran."""
    status = start(script, folder, FAILING=failing).wait()
    return status, calls_in(folder)


def calls_in(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("script", ["test", "prove"])
@pytest.mark.parametrize("failing", ["nothing", "--numprocesses 2", WITH_SERVERS, "-m timed"])
def test_every_part_runs_and_any_failure_is_told(script: str, failing: str, tmp_path: Path) -> None:
    status, calls = run(script, failing, tmp_path)
    assert status == (failing != "nothing")
    with_servers = [call for call in calls if WITH_SERVERS in call]
    without = [
        call for call in calls if call.startswith(WITHOUT_SERVERS) and call not in with_servers
    ]
    assert (len(with_servers), len(without)) == (1, 1)
    for call in with_servers + without:
        assert "-m not timed" in call
    assert calls[-1].startswith(ALONE), "what a neighbour would slow has none"
    for call in (*with_servers, *without, calls[-1]):
        assert ("and not slow" in call) == (script == "test")


@pytest.mark.skipif(
    not llvmlite.binding.get_host_cpu_features().get("avx512f"), reason="has no AVX-512 anyway"
)
@pytest.mark.parametrize("script", ["test", "prove"])
def test_kernels_run_again_as_without_avx512(script: str, tmp_path: Path) -> None:
    status, calls = run(script, "vectors", tmp_path)
    assert status == 1
    again = [call for call in calls if call.startswith("avx2")]
    assert len(again) == 1
    assert again[0].endswith("tests/kernels tests/actors/body")


@pytest.mark.parametrize("script", ["test", "prove"])
def test_an_interrupt_of_one_part_interrupts_all(script: str, tmp_path: Path) -> None:
    running = start(script, tmp_path, FAILING="nothing", WAITING="yes")
    while not (tmp_path / "calls").exists() or len(calls_in(tmp_path)) < 2:
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait() == 130
    beside = [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(tmp_path)]
    psutil.wait_procs(beside, timeout=60)
    assert not any(each.is_running() for each in beside)
    assert len(calls_in(tmp_path)) == 2
