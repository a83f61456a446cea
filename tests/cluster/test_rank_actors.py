"""Ranks of a body as Ray actors, with shards of the head or beside them: the same text as of one
process."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request
from lexshard.cluster.samplers.start import start_sampler
from lexshard.loadtest.token_digest import LONGEST, seeded_requests
from tests.support.paths import DEMO
from tests.support.rank_digests import tokens_of, told, told_while_ranks_are_lost

STREAMS = 24
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


@pytest.fixture(scope="module")
def requests(demo_tokenizer: Any) -> list[Request]:
    return seeded_requests(demo_tokenizer, 200, 1)


def engine_of(ranks: int, **changes: Any) -> Engine:
    from lexshard.cluster.ranks.actors import RayRanks
    from lexshard.cluster.ranks.shards import RankShards
    from lexshard.cluster.shards.gang import RayShards

    settings = {"max_model_len": LONGEST, "shard_seconds": 60, **changes}
    configuration = EngineConfiguration(str(DEMO), device="cpu", tensor_parallel=ranks, **settings)
    seconds, at_ranks = float(configuration.shard_seconds), configuration.shards_at_ranks
    return Engine(
        configuration,
        start_sampler,
        shard_starter=(RankShards if at_ranks else RayShards)(configuration),
        start_ranks=RayRanks(seconds),
    )


@pytest.fixture(scope="module")
def of_one(requests: list[Request]) -> str:
    return told(engine_of(1), requests)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tokens_and_log_probabilities_are_those_of_one_rank_and_shard(
    of_one: str, requests: list[Request], ranks: int, shards: int
) -> None:
    assert told(engine_of(ranks, shards=shards), requests) == of_one


def test_decoders_of_torch_are_actors_too(requests: list[Request]) -> None:
    """They meet by a store, and add by gloo without a GPU; one that is killed is replaced."""
    some = requests[:STREAMS]
    expected = tokens_of(engine_of(2, body="general"), some)
    engine = engine_of(2, body="general", shards=2)
    assert told_while_ranks_are_lost(engine, some, signal.SIGKILL) == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_lost_actor_is_replaced_in_the_midst_of_a_step(
    requests: list[Request], shards: int, number: signal.Signals
) -> None:
    """Under streams that go on with the same text, with the time that ranks have by default."""
    some = requests[:STREAMS]
    expected = tokens_of(engine_of(1), some)
    engine = engine_of(2, shards=shards, shard_seconds=10)
    assert told_while_ranks_are_lost(engine, some, number) == expected
