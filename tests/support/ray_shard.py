"""A shard as a Ray actor of tests, root or server, joined by `ray.util.collective`."""

from __future__ import annotations

import os
import time

import numpy as np

from lexshard.actors.collective import CollectiveError
from lexshard.actors.head.shard_group import ShardGroup
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.head.sharded.shard_server import ShardServer
from lexshard.actors.states.need import Need
from lexshard.actors.states.sequence_state import SequenceStates
from lexshard.cluster.collective.gloo_links import open_store
from lexshard.cluster.collective.join import GroupPlan, join
from tests.support.shard_process import EOS_IDS, FORMING_SECONDS, HOST
from tests.support.sharded_cases import HeadCase, hidden_states, same_candidates


class RayShard:
    """Shard ``rank`` of ``case``, which meets the others at ``port``."""

    def __init__(self, case: HeadCase, rank: int, port: int, seconds: float) -> None:
        self._case = case
        self._rank = rank
        self._plan = GroupPlan("ray", case.shards, HOST, port, seconds, FORMING_SECONDS, "ray")
        self._own = case.parts()[rank]

    def join(self) -> None:
        # The store is the test's own: nobody here opens it.
        store = open_store(HOST, self._plan.port, FORMING_SECONDS, root=False)
        self._shard = self._case.shard(self._own)
        warm = [Need("top1"), Need("topk", k=5)]
        self._shard.rescore(self._shard.screen(np.ones((2, self._case.columns), np.float32), warm))
        self._collective = join(self._plan, self._rank, store=store)

    def process_id(self) -> int:
        return os.getpid()

    def serve(self) -> None:
        states = SequenceStates(self._case.size, EOS_IDS, 1)
        ShardServer(self._shard, self._own.ids, states, self._collective).run()

    def compare(self, seed: int) -> bool:
        """Whether rows of some kinds get from all shards what they get in one process."""
        case, random = self._case, np.random.default_rng(seed)
        self._head = CollectiveHead(self._shard, self._own.ids, self._collective)
        parts = case.parts()
        group = ShardGroup([case.shard(part) for part in parts], [part.ids for part in parts])
        needs = [Need("top1"), Need("topk", k=5)] * 4
        hidden = hidden_states(random, len(needs), case.columns)
        found = self._head.rescore(self._head.screen(hidden, needs))
        same_candidates(found, group.rescore(group.screen(hidden, needs)))
        return True

    def fail(self) -> tuple[str, int | None, float]:
        """Which error a step ends with, and after how many seconds."""
        started = time.monotonic()
        try:
            self._head.screen(np.ones((1, self._case.columns), np.float32), [Need("top1")])
        except CollectiveError as error:
            return type(error).__name__, error.rank, time.monotonic() - started
        return "", None, 0.0
