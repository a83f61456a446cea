"""Shards of the head as Ray actors: the same text from any number of them, whoever is lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from lexshard.actors.engine.completion import Completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.messages import Request
from tests.support.paths import DEMO_DRAFT, ROOT
from tests.support.rank_digests import through_losses
from tests.support.speculation_cases import drafting_engine, requests_of, run_and_close
from tests.support.thread_shards import sharded_engine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

TRACE = ROOT / "loadtest" / "data" / "a_kidnapped_santa_claus.txt"
DRAFT: dict[str, Any] = {"draft": str(DEMO_DRAFT)}


@pytest.fixture(scope="module")
def requests(prompt_ids: list[tuple[int, ...]]) -> list[Request]:
    return requests_of(prompt_ids, 40)


@pytest.fixture(scope="module")
def plain(requests: list[Request]) -> list[Completion]:
    return run_and_close(drafting_engine(), requests)


def engine_of(**changes: Any) -> Engine:
    from lexshard.cluster.shards.gang import RayShards

    return sharded_engine(RayShards, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": 4, **DRAFT},
        {"shards": 2, "head": "dense", "samplers": 2, "sampler_placement": "ray"},
        {"shards": 3, "shard_assignment": "blocks-contiguous", "verify": "greedy", **DRAFT},
        {"shards": 2, "shard_assignment": "blocks-hotness", "shard_trace": str(TRACE)},
        {"shards": 8, "samplers": 4},
    ],
    ids=[
        "four, with drafts",
        "dense, with sampler actors",
        "side by side",
        "by hotness",
        "eight, with four samplers",
    ],
)
def test_the_text_is_that_of_one_process(
    plain: list[Completion], requests: list[Request], changes: dict[str, Any]
) -> None:
    """Every kind of sampling, prompt scores and certificates asked for."""
    found = run_and_close(engine_of(**changes), requests)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in plain]


@pytest.mark.parametrize("head", ["certified", "paper"])
def test_so_it_is_where_shards_own_clusters(
    plain: list[Completion], requests: list[Request], index: str, head: str
) -> None:
    """Near clusters together: any tokens, whose noise is drawn one by one; by the ladder and by
    CSV-Decode's exchange."""
    changes = {"shards": 2, "shard_assignment": "clusters-semantic", "index": index}
    found = run_and_close(engine_of(head=head, **changes), requests)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]


@pytest.mark.parametrize("spares", [0, 1, "stopped"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_shard_is_replaced_in_the_midst_of_a_step(
    plain: list[Completion], requests: list[Request], number: signal.Signals, spares: int | str
) -> None:
    """One that was killed is noticed at once, one that was stopped when the time is up; so is a
    spare, which is not waited for then."""
    import ray

    engine = engine_of(shards=3, shard_seconds=2, shard_spares=int(spares != 0))
    head: Any = engine.steps._head
    if spares == "stopped":
        os.kill(ray.get(head._gang._spares[0].actor.place.remote()).process_id, signal.SIGSTOP)
    tokens, _ = through_losses(
        engine, requests, lambda: os.kill(head.roles()[2].place.process_id, number)
    )
    assert head.counters.regroupings == 2
    print(f"{number.name}, {spares} spares: {head.counters.seconds / 2:.1f} s for a lost shard")
    assert head.counters.seconds < 120.0
    engine.close()
    assert tokens == [each.token_ids for each in plain]
