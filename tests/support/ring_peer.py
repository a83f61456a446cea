"""The other process of the tests of shared memory: ``ring_peer.py WHAT MEMORY DOORBELL SLOTS``."""

from __future__ import annotations

import random
import select
import subprocess
import sys
import time
import zlib

import numpy as np

from lexshard.cluster.link import PeerLostError
from lexshard.cluster.shared_memory.ring import (
    RingConsumer,
    RingProducer,
    Slot,
    create_ring,
    open_ring,
)

WORDS = 32


def fill(slot: np.ndarray, number: int, random_numbers: np.random.Generator) -> None:
    """A message: its number, random words and a checksum of both."""
    words = slot[: 8 * WORDS].view(np.uint64)
    words[0] = number
    words[1:-1] = random_numbers.integers(0, 2**63, WORDS - 2)
    words[-1] = zlib.crc32(words[:-1])


def check(slot: np.ndarray, number: int) -> None:
    words = slot[: 8 * WORDS].view(np.uint64)
    assert words[0] == number, f"message {words[0]} came as number {number}"
    assert words[-1] == zlib.crc32(words[:-1]), f"message {number} is torn"


def room(ring: RingProducer) -> Slot:
    """The next slot to write, which is waited for."""
    while (slot := ring.reserve()) is None:
        assert select.select([ring], [], [], 30)[0]
    return slot


def consume(ring: RingConsumer) -> None:
    """Checks every message until the producer is gone; says how many there were."""
    pause = random.Random(1)
    number = 0
    try:
        while True:
            check(ring.take(), number)
            ring.release()
            number += 1
            if pause.random() < 0.001:
                time.sleep(0.001)
    except PeerLostError:
        print(number, flush=True)


def hold(ring: RingConsumer) -> None:
    """Takes one message and never gives it back."""
    ring.take()
    print("held", flush=True)
    time.sleep(600)


def produce_and_die() -> None:
    """A producer with a consumer of its own: five messages, then neither lives."""
    ring, inherited = create_ring(8, 8 * WORDS)
    consumer = subprocess.Popen(
        (sys.executable, __file__, "late", *map(str, inherited), "8"), pass_fds=inherited
    )
    random_numbers = np.random.default_rng(0)
    for number in range(5):
        fill(room(ring), number, random_numbers)
        ring.publish()
    room(ring)[:] = 255  # begun, never published
    print(consumer.pid, flush=True)
    time.sleep(600)


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "produce":
        produce_and_die()
        return
    memory, doorbell, slots = map(int, rest)
    ring = open_ring((memory, doorbell), slots)
    if what == "hold":
        hold(ring)
    if what == "late":
        time.sleep(0.3)
    consume(ring)


if __name__ == "__main__":
    main()
