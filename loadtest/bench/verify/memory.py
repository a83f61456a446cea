"""How much memory a call takes for a moment, beyond what was there before it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(call: Callable[[], object]) -> float | None:
    """Bytes of the process's resident memory at their highest during ``call``, less those before
    it; None where the system does not tell (it takes Linux).

    Freed memory that the C library keeps would hide what is allocated, so it is given back first.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _RESET.write_text("5")  # the highest is from now on
        before = _kibibytes("VmRSS")
        call()
        return 1024.0 * max(_kibibytes("VmHWM") - before, 0)
    except (OSError, AttributeError):
        return None


def _kibibytes(name: str) -> int:
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"{_STATUS} has no {name}")
