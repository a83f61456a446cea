"""A checkout that nothing was installed of: its folders by the names they are imported by."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path


def import_from_checkout() -> None:
    """Makes ``lexshard.kernels`` and so on importable, here and in every child process."""
    if find_spec("lexshard") is not None:
        return
    folder = tempfile.mkdtemp(prefix="lexshard-")
    atexit.register(shutil.rmtree, folder)
    (Path(folder) / "lexshard").symlink_to(Path(__file__).resolve().parents[1])
    sys.path.insert(0, folder)
    paths = filter(None, (folder, os.environ.get("PYTHONPATH")))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
