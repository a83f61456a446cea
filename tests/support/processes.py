"""What processes hold, and whether they have gone."""

from __future__ import annotations

import os
import time
from pathlib import Path


def holders(inode: int) -> list[int]:
    """Processes that map or hold the memory of ``inode``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            mapped = any(
                entry.split()[4] == str(inode) and "lexshard" in entry
                for entry in (folder / "maps").read_text().splitlines()
            )
            held = any(
                "lexshard" in os.readlink(each) and each.stat().st_ino == inode
                for each in (folder / "fd").iterdir()
            )
        except OSError:  # it has ended meanwhile
            continue
        if mapped or held:
            found.append(int(folder.name))
    return found


def gone(process_id: int, seconds: float) -> bool:
    """Whether a process ends in time (a zombie counts)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{process_id}/stat").read_text()
        except OSError:
            return True
        if status.rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.005)
    return False
