"""A ring of fixed-size slots from one process to another, without locks.

The producer owns the counter of published slots, the consumer that of released ones; both only
grow. Slots between them are the consumer's to read, all others the producer's to write: data cross
once and are used where they lie. A full ring makes the producer wait (back-pressure).

Counters stand on cache lines of their own, so that the two processors do not fight for one line.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from lexshard.cluster.shared_memory.atomic import load_acquire, store_release
from lexshard.cluster.shared_memory.doorbell import Doorbell, PeerLostError
from lexshard.cluster.shared_memory.segment import Segment

Slot = npt.NDArray[np.uint8]

# Two cache lines: processors fetch lines in pairs.
_SPACING = 128
_PUBLISHED, _RELEASED = 0, _SPACING
_PAGE = 4096


class _End:
    """What both ends have: the counters, the slots and the doorbell."""

    def __init__(self, segment: Segment, doorbell: Doorbell, slots: int) -> None:
        self._segment = segment
        self._doorbell = doorbell
        self._published = _counter(segment, _PUBLISHED)
        self._released = _counter(segment, _RELEASED)
        self._slots = segment.memory[_PAGE:].reshape(slots, -1)

    def fileno(self) -> int:
        """Readable when the other end may have moved on, or is gone."""
        return self._doorbell.fileno()

    @property
    def slots(self) -> int:
        return self._slots.shape[0]

    @property
    def slot_bytes(self) -> int:
        return self._slots.shape[1]

    def close(self) -> None:
        """Leaves the ring; the other end then finds its peer lost. Slots in hand stay valid."""
        self._segment.close()
        self._doorbell.close()


class RingProducer(_End):
    """The writing end, for one thread at a time."""

    def __init__(self, segment: Segment, doorbell: Doorbell, slots: int) -> None:
        super().__init__(segment, doorbell, slots)
        self._count = 0  # published
        self._free_until = slots  # the released count as last seen, plus the slots

    def reserve(self, timeout: float | None = None) -> Slot | None:
        """The next slot [slot_bytes] to write, the same until `publish`; waits while all are full.

        None after ``timeout`` seconds (0: does not wait). Raises `PeerLostError` where the
        consumer is gone.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._has_room():
            left = None if deadline is None else deadline - time.monotonic()
            if not self._doorbell.wait(left):
                return self._next() if self._has_room() else None
        return self._next()

    def publish(self) -> None:
        """Hands the slot reserved to the consumer. Raises `PeerLostError` where it is gone."""
        self._count += 1
        store_release(self._published, self._count)
        self._doorbell.ring()

    def _has_room(self) -> bool:
        if self._count == self._free_until:
            self._free_until = load_acquire(self._released) + self.slots
        return self._count < self._free_until

    def _next(self) -> Slot:
        return self._slots[self._count % self.slots]


class RingConsumer(_End):
    """The reading end, for one thread at a time."""

    def __init__(self, segment: Segment, doorbell: Doorbell, slots: int) -> None:
        super().__init__(segment, doorbell, slots)
        self._count = 0  # released
        self._full_until = 0  # the published count as last seen

    def take(self, timeout: float | None = None) -> Slot | None:
        """The oldest slot published [slot_bytes], the same until `release`; waits for one.

        None after ``timeout`` seconds (0: does not wait). What a producer published before it
        died is still handed out; then this raises `PeerLostError`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._has_slot():
            left = None if deadline is None else deadline - time.monotonic()
            try:
                heard = self._doorbell.wait(left)
            except PeerLostError:
                if self._has_slot():
                    break
                raise
            if not heard:
                return self._next() if self._has_slot() else None
        return self._next()

    def release(self) -> None:
        """Gives the slot taken back to the producer; its contents may change from now on."""
        self._count += 1
        store_release(self._released, self._count)
        with suppress(PeerLostError):  # `take` says so once nothing is left to take
            self._doorbell.ring()

    def _has_slot(self) -> bool:
        if self._count == self._full_until:
            self._full_until = load_acquire(self._published)
        return self._count < self._full_until

    def _next(self) -> Slot:
        return self._slots[self._count % self.slots]


def create_ring(slots: int, slot_bytes: int) -> tuple[RingProducer, tuple[int, int]]:
    """A new ring: the producer, and the descriptors (memory, doorbell) of the consumer's end.

    Pass the descriptors on to the consumer's process, then close the doorbell's here: as long as
    it is open here, the consumer's death goes unnoticed. The memory's is the producer's own.
    Slots are rounded up to whole pages. Raises ValueError for sizes below 1.
    """
    if slots < 1 or slot_bytes < 1:
        raise ValueError(f"a ring of {slots} slots of {slot_bytes} bytes cannot hold anything")
    pages = -(-slot_bytes // _PAGE)
    segment = Segment.create(_PAGE + slots * pages * _PAGE)
    own, other = socket.socketpair()
    return RingProducer(segment, Doorbell(own), slots), (segment.descriptor, other.detach())


def open_ring(descriptors: tuple[int, int], slots: int) -> RingConsumer:
    """The consumer's end of a ring of ``slots``, which owns ``descriptors`` from now on."""
    memory, doorbell = descriptors
    return RingConsumer(Segment(memory), Doorbell(socket.socket(fileno=doorbell)), slots)


def _counter(segment: Segment, offset: int) -> npt.NDArray[np.int64]:
    return segment.memory[offset : offset + 8].view(np.int64)
