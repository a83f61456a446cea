"""What a clone of this repository holds, elsewhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.paths import ROOT


def tracked_files(*folders: str) -> list[str]:
    told = subprocess.check_output(["git", "ls-files", "-z", *folders], cwd=ROOT, text=True)
    return [name for name in told.split("\0") if name and (ROOT / name).is_file()]


def copy_checkout(folder: Path) -> Path:
    """Every tracked file, as it is now, below ``folder``."""
    for name in tracked_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder
