"""No process outlives the one that owns it, and no folder outlives its owner."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lexshard.cluster.private_folder import PrivateFolder, remove_abandoned_folders
from tests.support.paths import ROOT

# Starts a child that starts a grandchild, and tells their process ids.
FAMILY = """
import subprocess, sys, time
from lexshard.cluster.process_tree import adopt_orphans, die_with_parent, end_descendants
{first}
inner = "import time; {grandchild}; print('up', flush=True); time.sleep(600)"
outer = (
    "import subprocess, sys, time;"
    f"g = subprocess.Popen([sys.executable, '-c', {{inner!r}}], stdout=subprocess.PIPE);"
    "g.stdout.readline(); print(g.pid, flush=True); time.sleep(600)"
)
child = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
{then}
"""


def family(first: str, grandchild: str, then: str) -> tuple[subprocess.Popen[str], int, int]:
    """The eldest and the process ids of its child and grandchild."""
    program = FAMILY.format(first=first, grandchild=grandchild, then=then)
    eldest = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert eldest.stdout is not None
    child, other = map(int, eldest.stdout.readline().split())
    return eldest, child, other


def gone(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def soon(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's process control")
def test_an_owner_ends_orphans_and_those_who_do_not_listen() -> None:
    """The child is killed first, so the grandchild is an orphan; and it ignores SIGTERM."""
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    then = "child.kill(); child.wait(); end_descendants(); print('done', flush=True)"
    eldest, child, grandchild = family("adopt_orphans()", deaf, then)
    assert eldest.stdout is not None
    assert eldest.stdout.readline() == "done\n"
    assert gone(child)
    assert gone(grandchild)
    assert eldest.wait(10) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's process control")
def test_who_is_to_die_with_its_parent_does() -> None:
    promise = "from lexshard.cluster.process_tree import die_with_parent; die_with_parent()"
    eldest, child, grandchild = family("", promise, "sys.stdin.read()")
    try:
        os.kill(child, signal.SIGKILL)
        assert soon(lambda: gone(grandchild))
    finally:
        eldest.kill()
        eldest.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's process control")
def test_who_is_to_die_with_a_parent_that_is_gone_ends_at_once() -> None:
    """As where a server is killed right after it started what it stands behind."""
    program = "from lexshard.cluster.process_tree import die_with_parent; die_with_parent({})"
    for parent, code in ((os.getpid(), 0), (subprocess.Popen(["true"]).pid, 1)):
        command = [sys.executable, "-c", program.format(parent)]
        assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == code


def test_folders_without_an_owner_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = PrivateFolder()
    (tmp_path / "lexshard-of-another").mkdir()
    program = (
        "import os, signal, tempfile; from lexshard.cluster.private_folder import PrivateFolder;"
        f"tempfile.tempdir = {str(tmp_path)!r}; folder = PrivateFolder();"
        "(folder.path / 'commands').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert len(list(tmp_path.iterdir())) == 3
    assert remove_abandoned_folders() == 1
    assert {path.name for path in tmp_path.iterdir()} == {mine.path.name, "lexshard-of-another"}
    assert mine.path.stat().st_mode & 0o077 == 0
    folder = os.open(mine.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):  # systemd-tmpfiles leaves such a folder alone
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
    mine.remove()
    mine.remove()
    assert not mine.path.exists()
