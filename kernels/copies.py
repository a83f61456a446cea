"""Copies in compiled code. numba's own, ``target[:] = source``, bring the code of an error message
with them, a second of compiling for every kernel that is compiled alone."""

from __future__ import annotations

from numba import njit


@njit(nogil=True, cache=True)
def copy_into(target, source):  # type: ignore[no-untyped-def]
    """``target[: len(source)] = source``, of one dimension each; the caller sees that it fits."""
    for index in range(source.size):
        target[index] = source[index]
