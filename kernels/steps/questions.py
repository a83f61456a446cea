"""What a call of several steps asks its caller, and the answers: see `kernels.steps.Caller`."""

from __future__ import annotations

MASKS, FOLLOWING = range(2)
ENDS, GOES_ON, MASKS_COME = range(3)
NO_MASKS = ENDS
