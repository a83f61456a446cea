"""Shards that go by their own thresholds, as those on GPUs do, exchange candidates alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from lexshard.actors.collective import CollectiveError
from lexshard.actors.head.output_head import Hidden, Thresholds
from lexshard.actors.head.owned_rows import OwnedRows
from lexshard.actors.head.shard import Shard
from lexshard.actors.head.sharded.collective_head import CollectiveHead
from lexshard.actors.head.sharded.shard_server import ShardServer
from lexshard.actors.states.row_table import RowTable
from lexshard.actors.states.sequence_state import SequenceStates
from tests.support.sharded_cases import HeadCase, drawn, hidden_states, random_needs
from tests.support.thread_shards import thread_group

CASE = HeadCase(3, "tokens", ("int8",))


class ShardAlone:
    """A `Shard` with the manners of one on a GPU."""

    def __init__(self, shard: Shard, *, asks_others: bool = False) -> None:
        self.asks_others = asks_others
        self.vocabulary_size = shard.vocabulary_size
        self._shard = shard

    def screen(self, hidden: Hidden, rows: RowTable) -> Thresholds:
        return self._shard.screen(hidden, rows)

    def rescore(self, thresholds: Thresholds) -> Any:
        return self._shard.rescore(thresholds)

    def mass_rows(self, thresholds: Thresholds) -> list[int]:
        return []


def head_of(shards: Sequence[ShardAlone], parts: Sequence[OwnedRows]) -> CollectiveHead:
    root, *others = thread_group(len(shards))

    def serve(rank: int) -> None:
        states = SequenceStates(CASE.size, (), 2)
        with suppress(CollectiveError):
            ShardServer(shards[rank], parts[rank].ids, states, others[rank - 1]).run()

    for rank in range(1, len(shards)):
        threading.Thread(target=serve, args=(rank,), daemon=True).start()
    return CollectiveHead(shards[0], parts[0].ids, root)


def test_tokens_are_those_of_one_shard_and_thresholds_stay_at_home() -> None:
    parts = CASE.parts()
    head = head_of([ShardAlone(CASE.shard(part)) for part in parts], parts)
    whole = CASE.shard(OwnedRows.every(CASE.size))
    random = np.random.default_rng(3)
    for rows in (1, 24, 7):
        needs = [need for need in random_needs(random, CASE.size, rows) if need.kind != "epsilon"]
        needs = [need for need in needs if need.adjustment is None]
        hidden = hidden_states(random, len(needs), CASE.columns)
        table = RowTable.of(needs)
        found = head.candidates(torch.from_numpy(hidden), table)
        assert drawn(found, needs) == drawn(whole.rescore(whole.screen(hidden, table)), needs)
    assert head.traffic["maximum"].calls == 0
    assert head.traffic["gather"].calls == 1 + 3  # introductions, then one a step
    head.close()


def test_a_head_of_both_kinds_is_refused() -> None:
    parts = CASE.parts()
    kinds = (False, True, False)
    shards = [
        ShardAlone(CASE.shard(part), asks_others=kind)
        for part, kind in zip(parts, kinds, strict=True)
    ]
    with pytest.raises(ValueError, match="all on GPUs or none"):
        head_of(shards, parts)
