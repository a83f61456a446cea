"""Types of command-line arguments that several commands take."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path


def file_path(text: str) -> Path:
    """Shells leave the ``~`` of ``--out=~/FILE``."""
    return Path(os.path.expanduser(text))


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that is not below ``least``; argparse says so otherwise."""

    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return whole_number
