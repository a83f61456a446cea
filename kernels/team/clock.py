"""Time, and leaving it to others, in nopython code."""

from __future__ import annotations

import time

import numpy as np
from numba import njit, types

from lexshard.kernels.team.atomics import address_of

let_others = types.ExternalFunction("sched_yield", types.int32())
sleep_microseconds = types.ExternalFunction("usleep", types.int32(types.uint32))
_read_clock = types.ExternalFunction("clock_gettime", types.int32(types.int64, types.int64))
_CLOCK = time.CLOCK_MONOTONIC


@njit(nogil=True, cache=True)
def now():  # type: ignore[no-untyped-def]
    """Nanoseconds."""
    reading = np.zeros(2, np.int64)
    _read_clock(_CLOCK, address_of(reading, 0))
    return reading[0] * 1_000_000_000 + reading[1]
