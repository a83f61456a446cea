"""Shared memory and the ring in it: nothing lost, torn, reordered or left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from lexshard.cluster.link import PeerLostError
from lexshard.cluster.shared_memory import atomic
from lexshard.cluster.shared_memory.ring import RingConsumer, RingProducer, create_ring, open_ring
from lexshard.cluster.shared_memory.segment import Segment
from tests.support.paths import ROOT, SUPPORT
from tests.support.ring_peer import WORDS, fill, room

PEER = SUPPORT / "ring_peer.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def peer(what: str, slots: int) -> tuple[RingProducer, subprocess.Popen[str]]:
    """A ring to another process that does ``what`` (see ring_peer.py)."""
    ring, inherited = create_ring(slots, 8 * WORDS)
    process = subprocess.Popen(
        (sys.executable, PEER, what, *map(str, inherited), str(slots)),
        pass_fds=inherited,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    os.close(inherited[1])
    return ring, process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def both_ends(slots: int, slot_bytes: int = 64) -> tuple[RingProducer, RingConsumer]:
    producer, (memory, doorbell) = create_ring(slots, slot_bytes)
    return producer, open_ring((os.dup(memory), doorbell), slots)


# -- memory ---------------------------------------------------------------------------------------


def test_who_has_the_descriptor_has_the_memory() -> None:
    segment = Segment.create(5000)
    assert segment.memory.shape == (5000,)
    assert not segment.memory.any()
    here, there = socket.socketpair()
    socket.send_fds(here, [b"."], [segment.descriptor])
    (received,) = socket.recv_fds(there, 1, 1)[1]
    other = Segment(received)
    segment.memory[4999] = 7
    assert other.memory[4999] == 7
    view = other.memory[4990:]
    segment.close()
    other.close()
    view[9] = 8  # arrays keep the memory they are made of
    assert view[9] == 8
    here.close()
    there.close()


def test_without_memfd_an_unlinked_file_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    segment = Segment.create(5000)
    other = Segment(os.dup(segment.descriptor))
    segment.memory[4999] = 7
    assert other.memory[4999] == 7
    assert list(tmp_path.iterdir()) == []
    segment.close()
    other.close()


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        Segment.create(0)
    with pytest.raises(ValueError, match="0 slots"):
        create_ring(0, 10)


# -- counters -------------------------------------------------------------------------------------


def test_counters_are_read_and_written_atomically_and_in_order() -> None:
    load = njit("int64(int64[::1])")(atomic._load_acquire.py_func)
    store = njit("void(int64[::1], int64)")(atomic._store_release.py_func)
    assert "load atomic i64" in (text := "".join(load.inspect_llvm().values()))
    assert " acquire, align 8" in text
    assert "store atomic i64" in (text := "".join(store.inspect_llvm().values()))
    assert " release, align 8" in text
    counter = np.zeros(1, np.int64)
    atomic.store_release(counter, 2**62 + 1)
    assert atomic.load_acquire(counter) == counter[0] == 2**62 + 1


# -- the ring -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(slots=st.integers(1, 4), seed=st.integers(0, 2**32), steps=st.integers(1, 150))
def test_the_ring_is_a_bounded_queue(slots: int, seed: int, steps: int) -> None:
    random = np.random.default_rng(seed)
    producer, consumer = both_ends(slots)
    queue: deque[int] = deque()
    number = 0
    for _ in range(steps):
        if random.random() < 0.5:
            slot = producer.reserve()
            assert (slot is None) == (len(queue) == slots)
            if slot is not None:
                slot[:8].view(np.int64)[0] = number
                if random.random() < 0.9:  # otherwise it is reserved again
                    producer.publish()
                    queue.append(number)
                    number += 1
        else:
            assert consumer.has_slot() == bool(queue)
            if queue:
                assert consumer.take()[:8].view(np.int64)[0] == queue[0]
                if random.random() < 0.9:
                    consumer.release()
                    queue.popleft()
    producer.close()
    consumer.close()


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_messages_arrive_whole_and_in_order(count: int) -> None:
    ring, process = peer("consume", 3)
    random_numbers = np.random.default_rng(0)
    for number in range(count):
        fill(room(ring), number, random_numbers)
        ring.publish()
    ring.close()
    assert line(process) == str(count)
    assert process.wait() == 0


def test_a_deaf_peer_never_blocks_the_one_that_rings() -> None:
    """Far more rings than a socket holds, and none of them heard."""
    producer, consumer = both_ends(2)
    for number in range(20_000):
        room(producer)[:8].view(np.int64)[0] = number
        producer.publish()
        assert consumer.take()[:8].view(np.int64)[0] == number
        consumer.release()
    assert not consumer.has_slot()
    producer.close()
    consumer.close()


def test_the_death_of_the_consumer_ends_the_producers_wait() -> None:
    """A full ring makes it wait, without spinning."""
    ring, process = peer("hold", 2)
    random_numbers = np.random.default_rng(0)
    for number in range(2):
        fill(room(ring), number, random_numbers)
        ring.publish()
    assert line(process) == "held"
    killing = threading.Timer(0.4, os.kill, (process.pid, signal.SIGKILL))
    killing.start()
    started, used = time.monotonic(), time.thread_time()
    with pytest.raises(PeerLostError):
        room(ring)
    assert 0.3 < time.monotonic() - started < 5
    assert time.thread_time() - used < 0.05
    process.wait()
    with pytest.raises(PeerLostError):
        ring.publish()
    ring.close()


def test_what_a_dead_producer_published_is_still_consumed_and_nothing_else() -> None:
    """kill -9 between two slots: five whole messages are checked, the sixth is never seen."""
    process = subprocess.Popen(
        (sys.executable, PEER, "produce"), stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    consumer = int(line(process))
    os.kill(process.pid, signal.SIGKILL)
    assert line(process) == "5"  # the consumer's own word, through the pipe it inherited
    process.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{consumer}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{consumer}").exists()
