"""A process that serves shards: one after the other, as its owner's lines of JSON say.

``python -m tests.support.shard_process PORT`` prints a line for every end of service: ``done``, or
the error's class, its rank and what it said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch

from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.head.sharded.shard_server import ShardServer
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.cluster.collective.gloo_links import GlooLinks, open_store
from lexshard.cluster.collective.star import StarCollective
from tests.support.paths import ROOT
from tests.support.sharded_cases import HeadCase

HOST = "127.0.0.1"
EOS_IDS = (0,)
FORMING_SECONDS = 60.0
PATIENCE = 300.0  # kernels may have to be compiled first


class ShardProcesses:
    """Processes of shards, this one being the root of every group they form."""

    def __init__(self, count: int) -> None:
        self.store = open_store(HOST, 0, FORMING_SECONDS, root=True)
        command = (sys.executable, "-m", "tests.support.shard_process", str(self.store.port))
        self.processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            for _ in range(count)
        ]
        self._groups = 0

    def head(self, case: HeadCase, seconds: float = PATIENCE) -> CollectiveHead:
        """The head of ``case``, its first shard here, the others in as many processes."""
        self._groups += 1
        name = f"group-{os.getpid()}-{self._groups}"
        for rank in range(1, case.shards):
            order = {"name": name, "rank": rank, "seconds": seconds, "case": asdict(case)}
            stdin = self.processes[rank - 1].stdin
            assert stdin is not None
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()
        own = case.parts()[0]
        links = GlooLinks(self.store, name, 0, case.shards, forming_seconds=FORMING_SECONDS)
        return CollectiveHead(case.shard(own), own.ids, StarCollective(links, seconds))

    def end_of_service(self, rank: int) -> str:
        """How the last group ended for ``rank``; waits for it."""
        stdout = self.processes[rank - 1].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def shard_processes(count: int) -> Iterator[ShardProcesses]:
    processes = ShardProcesses(count)
    try:
        yield processes
    finally:
        processes.close()


def main() -> None:
    torch.set_num_threads(1)
    store = open_store(HOST, int(sys.argv[1]), FORMING_SECONDS, root=False)
    for line in sys.stdin:
        order = json.loads(line)
        order["case"]["screens"] = tuple(order["case"]["screens"])
        case = HeadCase(**order["case"])
        own = case.parts()[order["rank"]]
        links = GlooLinks(
            store, order["name"], order["rank"], case.shards, forming_seconds=FORMING_SECONDS
        )
        try:
            ShardServer(
                case.shard(own),
                own.ids,
                SequenceStates(case.size, EOS_IDS, 1),
                StarCollective(links, order["seconds"]),
            ).run()
        except Exception as error:
            print(type(error).__name__, getattr(error, "rank", None), error, flush=True)
        else:
            print("done", flush=True)


if __name__ == "__main__":
    main()
