"""Processes that are shards of a head under measurement; this one is the root of all their groups.

Plain processes over gloo on this machine, without Ray: what is measured is the head's exchange.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from lexshard.actors.collective import Collective, SingleProcess
from lexshard.actors.head.exchange import MassShard
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.head.sharded.part import ShardPart, build_shard
from lexshard.actors.head.sharded.shard_server import ShardServer
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.cluster.collective.gloo_links import open_store
from lexshard.cluster.collective.join import GroupPlan, join
from lexshard.cluster.process_tree import die_with_parent
from lexshard.kernels import pool

HOST = "127.0.0.1"
TIMED = ("screen", "mass_rows", "outline_masses", "bound_masses", "rescore")
PATIENCE = 300.0  # kernels may have to be compiled first


class TimedShard:
    """A `MassShard` with a watch: ``milliseconds`` of its screen, bounds and rescoring since it was
    last set to 0."""

    def __init__(self, shard: Any) -> None:
        self.milliseconds = 0.0
        self._shard = shard

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._shard, name)
        if name not in TIMED:
            return found

        def watched(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = found(*arguments, **named)
            self.milliseconds += 1e3 * (time.perf_counter() - started)
            return result

        return watched


class RecordedShard:
    """A `MassShard` that computes ``computed`` steps and then, for ``repeated`` steps, says again
    what it said in them, call by call and without computing; then both again.

    Steps that are repeated must be asked as they were, so the exchange has the same messages.
    """

    def __init__(self, shard: MassShard, computed: int, repeated: int) -> None:
        self._shard = shard
        self._computed = computed
        self._period = computed + repeated
        self._number = -1
        self._steps: list[list[Any]] = []
        self._call = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._shard, name)
        return self._recorded(name, found) if callable(found) else found

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def answered(*arguments: Any, **named: Any) -> Any:
            if name == "screen":
                self._begin()
            step = self._steps[self._number % self._computed]
            if self._number < self._computed:
                step.append(method(*arguments, **named))
            self._call += 1
            return step[self._call - 1]

        return answered

    def _begin(self) -> None:
        self._call = 0
        self._number = (self._number + 1) % self._period
        if self._number == 0:
            self._steps = []
        if self._number < self._computed:
            self._steps.append([])


def recorded(part: ShardPart, computed: int, repeated: int) -> Any:
    """The shard of a part, recorded."""
    return RecordedShard(cast(MassShard, build_shard(part)), computed, repeated)


class ShardProcesses:
    """``count`` servers, pinned in turn to ``cores``, of which the first is the root's."""

    def __init__(self, count: int, cores: Sequence[int]) -> None:
        self._groups = 0
        self._store = open_store(HOST, 0, PATIENCE, root=True)
        self._servers: list[tuple[Any, Connection]] = []
        context = get_context("spawn")
        for rank in range(1, count + 1):
            heard, told = context.Pipe(duplex=False)
            where = (self._store.port, cores[rank % len(cores)])
            process = context.Process(target=_serve, args=(heard, *where), daemon=True)
            process.start()
            heard.close()
            self._servers.append((process, told))

    @contextmanager
    def head(
        self, parts: Sequence[ShardPart], computed: int, repeated: int
    ) -> Iterator[CollectiveHead]:
        """A head of ``parts``, the first of them here, the others in as many processes.

        Raises `CollectiveError` where a process does not come or goes.
        """
        self._groups += 1
        plan = GroupPlan(
            f"bench-{os.getpid()}-{self._groups}",
            len(parts),
            HOST,
            self._store.port,
            seconds=PATIENCE,
            forming_seconds=PATIENCE,
        )
        for rank, ((_, told), part) in enumerate(zip(self._servers, parts[1:], strict=False), 1):
            told.send_bytes(pickle.dumps((plan, rank, part, computed, repeated)))
        own = recorded(parts[0], computed, repeated)
        group: Collective = SingleProcess()
        if len(parts) > 1:
            group = join(plan, 0, store=self._store)
        head = CollectiveHead(own, parts[0].owned.ids, group)
        try:
            yield head
        finally:
            head.close()

    def close(self) -> None:
        for process, _ in self._servers:
            process.kill()
            process.join()


@contextmanager
def shard_processes(count: int, cores: Sequence[int]) -> Iterator[ShardProcesses]:
    """``count`` servers that end with the block."""
    processes = ShardProcesses(count, cores)
    try:
        yield processes
    finally:
        processes.close()


def _serve(orders: Connection, port: int, core: int) -> None:
    """One shard after the other on a core, as it is told."""
    die_with_parent()
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    pool.set_threads(1)
    store = open_store(HOST, port, PATIENCE, root=False)
    while True:
        plan, rank, part, computed, repeated = pickle.loads(orders.recv_bytes())
        ShardServer(
            recorded(part, computed, repeated),
            part.owned.ids,
            SequenceStates(part.owned.vocabulary_size, part.eos_ids, 1),
            join(plan, rank, store=store),
        ).run()
