"""Shards of a head as threads of one process: all of a group but the connections and processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lexshard.actors.body.batch import Body
from lexshard.actors.collective import CollectiveError, CollectiveLostError, CollectiveTimeoutError
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.sharded.part import ShardPart, build_shard
from lexshard.actors.head.sharded.recovering_head import ShardStarter
from lexshard.actors.head.sharded.shard_server import ShardServer
from lexshard.actors.role import RunningRole
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.cluster.collective.star import StarCollective
from lexshard.cluster.samplers.start import start_sampler
from lexshard.cluster.topology.configured import configured_assignment
from tests.support.paths import DEMO

PATIENCE = 300.0  # kernels may have to be compiled first
Letters = queue.SimpleQueue[torch.Tensor | None]  # None: the sender has left


class Arrived:
    """What has been copied is on its way no more."""

    def wait(self, seconds: float | None) -> None:
        pass


class Awaited:
    """A message that ``rank`` is to send."""

    def __init__(self, letters: Letters, into: torch.Tensor, rank: int) -> None:
        self._letters, self._into, self._rank = letters, into, rank

    def wait(self, seconds: float | None) -> None:
        try:
            found = self._letters.get(timeout=seconds)
        except queue.Empty as error:
            raise CollectiveTimeoutError(f"rank {self._rank} is late", self._rank) from error
        if found is None:
            self._letters.put(None)
            raise CollectiveLostError(f"rank {self._rank} has gone", self._rank)
        self._into.copy_(found)


class ThreadLinks:
    """Thread ``rank`` of a group (`cluster.collective.star.Links`)."""

    def __init__(self, letters: dict[tuple[int, int], Letters], rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._letters = letters
        self._open = True

    def send(self, data: torch.Tensor, rank: int) -> Arrived:
        if not self._open:
            raise CollectiveError("this thread has left its group")
        self._letters[self.rank, rank].put(data.clone())
        return Arrived()

    def receive(self, into: torch.Tensor, rank: int) -> Awaited:
        return Awaited(self._letters[rank, self.rank], into, rank)

    def close(self) -> None:
        self._open = False
        for rank in range(self.size):
            if rank != self.rank:
                self._letters[self.rank, rank].put(None)


def thread_group(size: int) -> list[StarCollective]:
    """The members of a group of threads in order of rank."""
    letters: dict[tuple[int, int], Letters] = {
        (here, there): queue.SimpleQueue() for here in range(size) for there in range(size)
    }
    return [StarCollective(ThreadLinks(letters, rank, size), PATIENCE) for rank in range(size)]


class ThreadGang:
    """A thread for each of ``parts`` while a group lasts (`actors.head.sharded.recovering_head`).

    They take the first of their tiers: what is timed beside other threads is timed wrong.
    """

    def __init__(self, parts: Sequence[ShardPart]) -> None:
        self._parts = parts
        self._shards = [build_shard(replace(part, samples=None)) for part in parts]
        self._threads: list[threading.Thread] = []

    def form(self) -> StarCollective:
        root, *others = thread_group(len(self._parts) + 1)
        self._threads = [
            threading.Thread(target=self._serve, args=(number, member), daemon=True)
            for number, member in enumerate(others)
        ]
        for thread in self._threads:
            thread.start()
        return root

    def _serve(self, number: int, member: StarCollective) -> None:
        part = self._parts[number]
        states = SequenceStates(part.owned.vocabulary_size, part.eos_ids, part.largest)
        ShardServer(self._shards[number], part.owned.ids, states, member).run()

    def roles(self) -> list[RunningRole]:
        return []

    def close(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE)


class ThreadShards:
    """What ``configuration`` asks for, in threads (`cluster.shards.gang.RayShards`)."""

    def __init__(self, configuration: EngineConfiguration) -> None:
        self._configuration = configuration

    def assign(self, vocabulary_size: int) -> list[OwnedRows]:
        return list(configured_assignment(self._configuration, vocabulary_size).owned)

    def start(self, parts: Sequence[ShardPart], body: Body) -> ThreadGang:
        return ThreadGang(parts)


def sharded_engine(
    starter: Callable[[EngineConfiguration], ShardStarter] = ThreadShards, **changes: Any
) -> Engine:
    """Of the demo in 128 tokens of context, in float32, with shards as ``starter`` makes them."""
    settings = {"max_model_len": 128, "draft_length": "fixed", "shard_seconds": 60, **changes}
    configuration = EngineConfiguration(
        str(DEMO), dtype="float32", device="cpu", threads=1, **settings
    )
    return Engine(configuration, start_sampler, shard_starter=starter(configuration))
