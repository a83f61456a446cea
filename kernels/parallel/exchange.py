"""Adding up what ranks have, in nopython code: every rank gets the sum of all, in one fixed order.

In round r a rank and the one whose number differs in bit r swap what they have, and both add it to
their own. After the first round pairs have the same sum, then fours, then all: a binary tree over
the ranks. An addition of two numbers has one result whichever comes first, so all have equal bits.

Waiting for a partner in memory is looking, then giving up the core, then sleeping a little; for one
behind a socket it is the system's to wake the rank.
"""

from __future__ import annotations

import socket as socket_module
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

from lexshard.kernels.parallel import APART, STOPPED
from lexshard.kernels.team.atomics import load, pause, store
from lexshard.kernels.team.clock import let_others, now, sleep_microseconds

Array = npt.NDArray[Any]

_LOOKS = 1000  # before the core may be needed for just what is waited for
_YIELDING = 2_000_000  # nanoseconds, before a wait sleeps
_NAP = np.uint32(50)  # microseconds
_PIECE = 32 * 1024  # bytes that two send each other at once: a socket takes them unread
# A lost partner is told, not deadly; Python's processes ignore that signal in any case.
_WITHOUT_SIGNAL = int(getattr(socket_module, "MSG_NOSIGNAL", 0))

_send = types.ExternalFunction(
    "send", types.int64(types.int32, types.int64, types.int64, types.int32)
)
_receive = types.ExternalFunction(
    "recv", types.int64(types.int32, types.int64, types.int64, types.int32)
)


@njit(nogil=True, cache=True)
def _wait_for(words: Array, rank: int, count: int, limit: int) -> bool:
    """Whether ``rank`` has counted as far before the ``limit``, and before all were stopped."""
    place = (rank + 1) * APART
    for _ in range(_LOOKS):
        if load(words, place) >= count:
            return True
        pause()
    began = now()
    while load(words, place) < count:
        waited = now() - began
        if load(words, STOPPED) != 0 or waited > limit:
            return False
        if waited < _YIELDING:
            let_others()
        else:
            sleep_microseconds(_NAP)
    return True


@njit(nogil=True, cache=True)
def _moved(sends: bool, socket: int, address: int, size: int) -> bool:
    """Whether all of ``size`` bytes went over a blocking socket that gives up in time."""
    done = 0
    while done < size:
        if sends:
            count = _send(socket, address + done, size - done, _WITHOUT_SIGNAL)
        else:
            count = _receive(socket, address + done, size - done, 0)
        if count <= 0:
            return False
        done += count
    return True


@njit(nogil=True, cache=True)
def _swap(socket: int, own: Array, theirs: Array, size: int) -> bool:
    """Sends ``size`` bytes of ``own`` and takes as many of ``theirs``, in pieces."""
    place = 0
    while place < size:
        piece = min(_PIECE, size - place)
        if not _moved(True, socket, own.ctypes.data + place, piece):
            return False
        if not _moved(False, socket, theirs.ctypes.data + place, piece):
            return False
        place += piece
    return True


@njit(nogil=True, cache=True)
def add_up(exchange: Any, values: Array) -> bool:
    """``values [n]`` float32 become the sum of all ranks' in place, n at most that of a slot.
    Whether they did: not where a partner has gone, or is late."""
    rank, rounds = exchange.rank, exchange.rounds
    number = exchange.counted[0]
    exchange.counted[0] = number + 1
    for turn in range(rounds):
        partner = rank ^ (1 << turn)
        if exchange.sockets.shape[0] > 0:
            theirs = exchange.slots[0, 0]
            if not _swap(exchange.sockets[turn], values, theirs, 4 * values.shape[0]):
                return False
        else:
            slot = (number % 2) * rounds + turn
            own = exchange.slots[rank, slot]
            for place in range(values.shape[0]):
                own[place] = values[place]
            count = number * rounds + turn + 1
            store(exchange.words, (rank + 1) * APART, count)
            if not _wait_for(exchange.words, partner, count, exchange.limit):
                return False
            theirs = exchange.slots[partner, slot]
        for place in range(values.shape[0]):
            values[place] += theirs[place]
    return True
