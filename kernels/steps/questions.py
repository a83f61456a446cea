"""What a call of several steps asks its caller: see `kernels.steps.Caller`."""

from __future__ import annotations

MASKS, FOLLOWING = range(2)
