"""What this machine has. Imported where nothing of an engine's is, so it needs nothing itself."""

from __future__ import annotations

import os


def physical_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
