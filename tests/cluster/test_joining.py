"""Groups form within their time or say that they did not."""

from __future__ import annotations

import threading
import time

import numpy as np
import psutil
import pytest
import torch

from lexshard.actors.collective import ROOT, Collective, CollectiveTimeoutError
from lexshard.cluster.collective.gloo_links import open_store
from lexshard.cluster.collective.join import GroupPlan, join
from lexshard.cluster.collective.star import FRAME_BYTES

HOST = "127.0.0.1"


def three() -> list[Collective]:
    """A group of three in threads of this process, by gloo all the same."""
    store = open_store(HOST, 0, 30.0, root=True)
    plan = GroupPlan("three", 3, HOST, store.port, seconds=20.0)
    joined: list[Collective | None] = [None] * 3

    def come(rank: int) -> None:
        joined[rank] = join(plan, rank, store=store if rank == ROOT else None)

    run_together([lambda rank=rank: come(rank) for rank in range(3)])  # type: ignore[misc]
    return [each for each in joined if each is not None]


def run_together(jobs: list) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
        assert not each.is_alive()


def test_what_one_sends_arrives_whole_at_any_length() -> None:
    """Shorter than a frame, as long as one to the byte, and longer."""
    group = three()
    sizes = [0, 1, FRAME_BYTES - 9, FRAME_BYTES - 8, FRAME_BYTES - 7, FRAME_BYTES, 100_000]
    messages = [np.random.default_rng(size).bytes(size) for size in sizes]
    received: list[list] = [[] for _ in group]

    def talk(rank: int) -> None:
        own, heard = group[rank], received[rank]
        for message in messages:
            heard.append(own.broadcast(message if rank == ROOT else None))
            heard.append(own.gather(message[rank:]))
        heard.append(own.all_reduce_max(np.array([rank, -np.inf, -rank, np.inf])).tolist())
        states = torch.arange(6.0).reshape(2, 3) if rank == ROOT else None
        heard.append(own.broadcast_hidden(states, 2, 3).tolist())
        own.barrier()

    run_together([lambda rank=rank: talk(rank) for rank in range(3)])  # type: ignore[misc]
    for rank in range(3):
        assert received[rank][:-2:2] == messages
        assert received[rank][-2] == [2.0, -np.inf, 0.0, np.inf]
        assert received[rank][-1] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    expected = [tuple(message[each:] for each in range(3)) for message in messages]
    assert received[ROOT][1:-2:2] == expected
    assert received[1][1:-2:2] == [()] * len(messages)
    sent = [sum(each.bytes_sent for each in own.traffic.values()) for own in group]
    heard = [sum(each.bytes_received for each in own.traffic.values()) for own in group]
    assert sum(sent) == sum(heard) > 0
    assert all(each.calls > 0 and each.microseconds > 0 for each in group[1].traffic.values())


def test_who_does_not_come_is_waited_for_no_longer_than_allowed() -> None:
    store = open_store(HOST, 0, 30.0, root=True)
    plan = GroupPlan("alone", 2, HOST, store.port, seconds=1.0, forming_seconds=1.0)
    started = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="group alone of 2 did not form within 1 s"):
        join(plan, ROOT, store=store)
    assert time.monotonic() - started < 10


def test_the_meeting_place_is_open_to_its_own_address_alone() -> None:
    store = open_store(HOST, 0, 30.0, root=True)
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if not each.raddr]
    assert [each.ip for each in listening if each.port == store.port] == [HOST]
    with pytest.raises(OSError, match="in use"):
        open_store(HOST, store.port, 30.0, root=True)


def test_a_root_that_is_not_there_is_named() -> None:
    closed = open_store(HOST, 0, 30.0, root=True)
    port = closed.port
    del closed
    plan = GroupPlan("alone", 2, HOST, port, seconds=1.0, forming_seconds=1.0)
    with pytest.raises(CollectiveTimeoutError, match="cannot reach the root") as missing:
        join(plan, 1)
    assert missing.value.rank == ROOT
