"""What processes hold."""

from __future__ import annotations

import os
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
