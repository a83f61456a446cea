"""Shards of the head as Ray actors: the same text from any number of them, whoever is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lexshard.actors.body.loading import load
from lexshard.actors.configuration import EngineConfiguration
from lexshard.actors.engine.completion import Completion
from lexshard.actors.engine.engine import Engine
from lexshard.actors.index.automatic import open_or_build
from lexshard.actors.messages import Request
from lexshard.cluster.samplers.start import start_sampler
from tests.support.paths import DEMO, DEMO_DRAFT, ROOT
from tests.support.speculation_cases import drafting_engine, requests_of, run_and_close

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

TRACE = ROOT / "loadtest" / "data" / "a_kidnapped_santa_claus.txt"
DRAFT: dict[str, Any] = {"draft": str(DEMO_DRAFT)}


@pytest.fixture(scope="module")
def requests(prompt_ids: list[tuple[int, ...]]) -> list[Request]:
    return requests_of(prompt_ids, 40)


@pytest.fixture(scope="module")
def plain(requests: list[Request]) -> list[Completion]:
    return run_and_close(drafting_engine(), requests)


def sharded_engine(**changes: Any) -> Engine:
    from lexshard.cluster.shards.gang import RayShards

    settings = {"max_model_len": 128, "draft_length": "fixed", "shard_seconds": 60, **changes}
    configuration = EngineConfiguration(
        str(DEMO), dtype="float32", device="cpu", threads=1, **settings
    )
    return Engine(configuration, start_sampler, shard_starter=RayShards(configuration))


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": 2},
        {"shards": 4, **DRAFT},
        {"shards": 2, "head": "dense", "samplers": 2, "sampler_placement": "ray"},
        {"shards": 3, "shard_assignment": "blocks-contiguous", "verify": "greedy", **DRAFT},
        {"shards": 2, "shard_assignment": "blocks-hotness", "shard_trace": str(TRACE)},
        {"shards": 8, "samplers": 4},
    ],
    ids=[
        "two",
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
    found = run_and_close(sharded_engine(**changes), requests)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in plain]


@pytest.mark.parametrize("head", ["certified", "paper"])
def test_so_it_is_where_shards_own_clusters(
    plain: list[Completion], requests: list[Request], tmp_path: Path, head: str
) -> None:
    """Near clusters together: any tokens, whose noise is drawn one by one; by the ladder and by
    CSV-Decode's exchange."""
    index = tmp_path / "index"
    open_or_build(DEMO, load(DEMO, "float32", device="cpu"), index, clusters=True)
    changes = {"shards": 2, "shard_assignment": "clusters-semantic", "index": str(index)}
    engine = sharded_engine(head=head, **changes)
    found = run_and_close(engine, requests)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_shard_is_replaced_in_the_midst_of_a_step(
    plain: list[Completion], requests: list[Request], number: signal.Signals, spares: int
) -> None:
    """One that was killed is noticed at once, one that was stopped when the time is up."""
    engine = sharded_engine(shards=3, shard_seconds=2, shard_spares=spares)
    head: Any = engine.steps._head
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        assert engine.submit(request) is None
    left, steps = len(requests), 0
    while left:
        for event in engine.step():
            tokens[event.request_id].extend(event.token_ids)
            left -= event.finish_reason is not None
        steps += 1
        if steps in (5, 15):
            os.kill(head.roles()[1 + steps % 2].place.process_id, number)
    assert head.counters.regroupings == 2
    print(f"{number.name}, {spares} spares: {head.counters.seconds / 2:.1f} s for a lost shard")
    assert head.counters.seconds < 120.0
    engine.check_idle()
    engine.close()
    assert [tuple(tokens[request.request_id]) for request in requests] == [
        tuple(each.token_ids) for each in plain
    ]
