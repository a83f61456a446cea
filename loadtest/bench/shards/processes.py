"""Processes that are shards of a head under measurement; this one is the root of all their groups.

Plain processes over gloo on this machine, without Ray: what is measured is the head's exchange.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lexshard.actors.collective import Collective, SingleProcess
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.head.sharded.part import ShardPart, build_shard
from lexshard.cluster.collective.gloo_links import open_store
from lexshard.cluster.collective.join import GroupPlan, join
from lexshard.loadtest.bench.shards.recorded_shard import recorded

HOST = "127.0.0.1"
PATIENCE = 300.0  # kernels may have to be compiled first


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Of every case: steps that shards compute, and steps that repeat what they said."""

    computed: int
    repeated: int


@dataclass(frozen=True, slots=True)
class ServerOrder:
    """What a server is told, as a line of JSON: to be ``rank`` of a group with the shard in
    ``part`` (a pickled `ShardPart`)."""

    plan: GroupPlan
    rank: int
    part: str
    rhythm: Rhythm


class ShardProcesses:
    """``count`` servers, pinned in turn to ``cores``, of which the first is the root's."""

    def __init__(self, count: int, cores: Sequence[int], folder: Path) -> None:
        self._folder = folder
        self._groups = 0
        self._store = open_store(HOST, 0, PATIENCE, root=True)
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "lexshard.loadtest.bench.shards.server",
                    str(self._store.port),
                    str(cores[rank % len(cores)]),
                ],
                stdin=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, count + 1)
        ]

    @contextmanager
    def head(self, parts: Sequence[ShardPart], rhythm: Rhythm) -> Iterator[CollectiveHead]:
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
        for rank in range(1, len(parts)):
            self._order(rank, parts[rank], plan, rhythm)
        own = recorded(build_shard(parts[0]), rhythm.computed, rhythm.repeated)
        group: Collective = SingleProcess()
        if len(parts) > 1:
            group = join(plan, 0, store=self._store)
        head = CollectiveHead(own, parts[0].owned.ids, group)
        try:
            yield head
        finally:
            head.close()

    def _order(self, rank: int, part: ShardPart, plan: GroupPlan, rhythm: Rhythm) -> None:
        path = self._folder / f"part-{rank}"
        path.write_bytes(pickle.dumps(part))
        stdin = self._processes[rank - 1].stdin
        assert stdin is not None
        stdin.write(json.dumps(asdict(ServerOrder(plan, rank, str(path), rhythm))) + "\n")
        stdin.flush()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@contextmanager
def shard_processes(count: int, cores: Sequence[int]) -> Iterator[ShardProcesses]:
    """``count`` servers that end with the block."""
    with tempfile.TemporaryDirectory() as folder:
        processes = ShardProcesses(count, cores, Path(folder))
        try:
            yield processes
        finally:
            processes.close()
