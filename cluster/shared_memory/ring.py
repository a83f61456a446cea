"""A ring of fixed-size slots from one process to another, without locks.

The producer owns the counter of published slots, the consumer that of released ones; both only
grow. Slots between them are the consumer's to read, all others the producer's to write: data cross
once and are used where they lie. A full ring makes the producer wait (back-pressure).

Counters stand on cache lines of their own, so that the two processors do not fight for one line.
Each end has one of a socket pair, the doorbell: a byte says "look again", and the end of the stream
that the other process is gone, which the system tells also after kill -9.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from lexshard.cluster.link import PeerLostError
from lexshard.cluster.shared_memory.atomic import load_acquire, store_release
from lexshard.cluster.shared_memory.segment import Segment

Slot = npt.NDArray[np.uint8]

# Two cache lines: processors fetch lines in pairs.
_SPACING = 128
_PUBLISHED, _RELEASED = 0, _SPACING
_PAGE = 4096
_RINGS_AT_ONCE = 4096


class _End:
    """What both ends have: the counters, the slots and the doorbell. One thread uses it."""

    def __init__(self, segment: Segment, doorbell: socket.socket, slots: int) -> None:
        doorbell.setblocking(False)
        self._segment = segment
        self._doorbell = doorbell
        self._published = _counter(segment, _PUBLISHED)
        self._released = _counter(segment, _RELEASED)
        self._slots = segment.memory[_PAGE:].reshape(slots, -1)
        self._count = 0  # that this end has published or released

    def fileno(self) -> int:
        """Readable when the other end may have moved on, or is gone."""
        return self._doorbell.fileno()

    def close(self) -> None:
        """Leaves the ring; the other end then finds its peer lost. Slots in hand stay valid."""
        self._segment.close()
        self._doorbell.close()

    def _next(self) -> Slot:
        return self._slots[self._count % len(self._slots)]

    def _advance(self, counter: npt.NDArray[np.int64]) -> None:
        """Tells the other end. Raises `PeerLostError` where it is gone."""
        self._count += 1
        store_release(counter, self._count)
        try:
            self._doorbell.send(b"\0")
        except BlockingIOError:
            pass  # it has not heard thousands of earlier rings yet: it will look
        except OSError as error:
            raise PeerLostError("the other process has gone") from error

    def _heard(self) -> None:
        """Forgets what has rung. Raises `PeerLostError` where the other end is gone."""
        try:
            heard = self._doorbell.recv(_RINGS_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if not heard:
            raise PeerLostError("the other process has gone")


class RingProducer(_End):
    """The writing end."""

    def __init__(self, segment: Segment, doorbell: socket.socket, slots: int) -> None:
        super().__init__(segment, doorbell, slots)
        self._free_until = slots  # the released count as last seen, plus the slots

    def reserve(self) -> Slot | None:
        """The next slot [slot_bytes] to write, the same until `publish`; None while all are full,
        which `fileno` tells the end of. Raises `PeerLostError` where the consumer is gone."""
        if not self._has_room():
            self._heard()
            if not self._has_room():
                return None
        return self._next()

    def publish(self) -> None:
        """Hands the slot reserved to the consumer. Raises `PeerLostError` where it is gone."""
        self._advance(self._published)

    def _has_room(self) -> bool:
        if self._count == self._free_until:
            self._free_until = load_acquire(self._released) + len(self._slots)
        return self._count < self._free_until


class RingConsumer(_End):
    """The reading end."""

    def __init__(self, segment: Segment, doorbell: socket.socket, slots: int) -> None:
        super().__init__(segment, doorbell, slots)
        self._full_until = 0  # the published count as last seen
        self._rung = select.poll()
        self._rung.register(doorbell, select.POLLIN)

    def take(self) -> Slot:
        """The oldest slot published [slot_bytes], the same until `release`; waits for one.

        What a producer published before it died is still handed out; then this raises
        `PeerLostError`.
        """
        while not self.has_slot():
            self._rung.poll()
            try:
                self._heard()
            except PeerLostError:
                if not self.has_slot():
                    raise
        return self._next()

    def release(self) -> None:
        """Gives the slot taken back to the producer; its contents may change from now on."""
        with suppress(PeerLostError):  # `take` says so once nothing is left to take
            self._advance(self._released)

    def has_slot(self) -> bool:
        """Whether `take` would not wait."""
        if self._count == self._full_until:
            self._full_until = load_acquire(self._published)
        return self._count < self._full_until


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
    return RingProducer(segment, own, slots), (segment.descriptor, other.detach())


def open_ring(descriptors: tuple[int, int], slots: int) -> RingConsumer:
    """The consumer's end of a ring of ``slots``, which owns ``descriptors`` from now on."""
    memory, doorbell = descriptors
    return RingConsumer(Segment(memory), socket.socket(fileno=doorbell), slots)


def _counter(segment: Segment, offset: int) -> npt.NDArray[np.int64]:
    return segment.memory[offset : offset + 8].view(np.int64)
