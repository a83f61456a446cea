"""The k-th largest fp32 value in linear time, by digits of the values read as integers."""

from __future__ import annotations

import numpy as np
from numba import njit

SIGN = 0x80000000
ALL = 0xFFFFFFFF


@njit(nogil=True, cache=True, inline="always")
def order_key(value):  # type: ignore[no-untyped-def]
    """An int64 in 0 .. 2**32 - 1 that orders like the fp32 ``value`` (0.0 and -0.0 are equal)."""
    # Adding zero turns -0.0 into 0.0 and leaves every other value alone.
    bits = np.int64(np.float32(value + np.float32(0.0)).view(np.int32))
    return (~bits) & ALL if bits < 0 else bits | SIGN


@njit(nogil=True, cache=True, inline="always")
def key_value(key):  # type: ignore[no-untyped-def]
    """The fp32 value of an order key."""
    bits = key & ~SIGN if key & SIGN else (~key) & ALL
    return np.int32(bits).view(np.float32)


@njit(nogil=True, cache=True)
def kth_largest_key(keys, count, k):  # type: ignore[no-untyped-def]
    """The k-th largest (1-based) of ``keys[:count]``, which is used as scratch. 1 <= k <= count."""
    tally = np.empty(256, np.int64)
    wanted = k
    shift = 24
    while shift >= 0:
        tally[:] = 0
        for index in range(count):
            tally[(keys[index] >> shift) & 255] += 1
        digit = 255
        while tally[digit] < wanted:
            wanted -= tally[digit]
            digit -= 1
        if tally[digit] < count:
            kept = 0
            for index in range(count):
                if (keys[index] >> shift) & 255 == digit:
                    keys[kept] = keys[index]
                    kept += 1
            count = kept
        shift -= 8
    return keys[0]
