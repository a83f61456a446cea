"""Ranks of a body as Ray actors, with shards of the head or beside them: the same text as of one
process."""

from __future__ import annotations

import os
import signal
from itertools import product
from typing import Any

import pytest

from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request
from tests.support import rank_engines
from tests.support.rank_digests import Tokens, tokens_of, told, told_while_ranks_are_lost
from tests.support.rank_engines import STREAMS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


def engine_of(ranks: int, **changes: Any) -> Engine:
    from lexshard.cluster.ranks.actors import RayRanks
    from lexshard.cluster.shards.gang import RayShards

    settings = {"threads": None, "shard_seconds": 60, **changes}
    start = RayRanks(float(settings["shard_seconds"]))
    return rank_engines.engine_of(ranks, start, RayShards, **settings)


@pytest.mark.parametrize(
    ("ranks", "shards"), [each for each in product((1, 2, 4), repeat=2) if each != (1, 1)]
)
def test_tokens_and_log_probabilities_are_those_of_one_rank_and_shard(
    of_one_rank: str, requests: list[Request], ranks: int, shards: int
) -> None:
    assert told(engine_of(ranks, shards=shards), requests) == of_one_rank


def test_decoders_of_torch_are_actors_too(requests: list[Request]) -> None:
    """They meet by a store, and add by gloo without a GPU; one that is killed is replaced."""
    some = requests[:STREAMS]
    expected = tokens_of(engine_of(2, body="general"), some)
    engine = engine_of(2, body="general", shards=2)
    assert told_while_ranks_are_lost(engine, some, signal.SIGKILL) == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_lost_actor_is_replaced_in_the_midst_of_a_step(
    tokens_of_one_rank: Tokens, requests: list[Request], shards: int, number: signal.Signals
) -> None:
    """Under streams that go on with the same text, with the time that ranks have by default."""
    engine = engine_of(2, shards=shards, shard_seconds=10)
    found = told_while_ranks_are_lost(engine, requests[:STREAMS], number)
    assert found == tokens_of_one_rank


def test_one_that_is_stopped_while_it_loads_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it was asked into the first group, before there is a step that could wait for it."""
    from lexshard.cluster.ranks.actors import ActorRank

    answers, stopped = ActorRank.answers, list[int]()

    def stopping(rank: ActorRank) -> bool:
        if stopped:
            return answers(rank)
        stopped.append(rank.place.process_id)
        os.kill(rank.place.process_id, signal.SIGSTOP)
        return True

    monkeypatch.setattr(ActorRank, "answers", stopping)
    engine = engine_of(2)
    [rank] = [role for role in engine.roles() if role.name == "body" and role.index]
    assert [rank.place.process_id] != stopped
    engine.close()
