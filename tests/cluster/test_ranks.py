"""Ranks of a body in processes of their own: the same text from any number of them, and
after any is lost."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from lexshard.actors.body.parallel.messages import RankPart
from lexshard.actors.body.parallel.sums import RankLostError
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.messages import Request
from lexshard.cluster.ranks.meeting import first_part
from lexshard.cluster.ranks.processes import RankProcesses
from lexshard.loadtest.token_digest import seeded_requests
from tests.support.paths import DEMO_DRAFT
from tests.support.rank_digests import tokens_of, told, told_while_ranks_are_lost
from tests.support.rank_engines import STREAMS, engine_of


@pytest.fixture(scope="module")
def requests(demo_tokenizer: Any) -> list[Request]:
    """Every kind of sampling, log-probabilities, several choices, common beginnings."""
    return seeded_requests(demo_tokenizer, 200, 1)


@pytest.fixture(scope="module")
def of_one_rank(requests: list[Request]) -> str:
    return told(engine_of(1), requests)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"ranks": 2}, marks=pytest.mark.slow),
        pytest.param({"ranks": 4, "prefix_cache": False}, marks=pytest.mark.slow),
        pytest.param(
            {"ranks": 2, "samplers": 2, "kv_cache_bytes": 60 * 16 * 2048}, marks=pytest.mark.slow
        ),
        {"ranks": 2, "draft": str(DEMO_DRAFT), "draft_length": "fixed"},
    ],
    ids=["two", "four", "two, little room and samplers", "two, with drafts"],
)
def test_tokens_and_log_probabilities_are_those_of_one_rank(
    of_one_rank: str, requests: list[Request], changes: dict[str, Any]
) -> None:
    assert told(engine_of(**changes), requests) == of_one_rank


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_lost_rank_is_replaced_in_the_midst_of_a_step(
    requests: list[Request], ranks: int, number: signal.Signals
) -> None:
    """Twice, under streams that go on with the same text."""
    some = requests[:STREAMS]
    expected = tokens_of(engine_of(1), some)
    assert told_while_ranks_are_lost(engine_of(ranks), some, number) == expected


@pytest.mark.slow
def test_decoders_of_torch_tell_the_same_whatever_is_beside_and_whoever_is_lost(
    requests: list[Request],
) -> None:
    """`--body general`: as ranks on GPUs are, but for gloo, which adds here."""
    some = requests[:STREAMS]
    engine = engine_of(2, body="general", max_running=7)
    completions = run_to_completion(engine, some[::-1])
    expected = {(each.request_id, each.choice): list(each.token_ids) for each in completions}
    assert told_while_ranks_are_lost(engine, some, signal.SIGKILL) == expected


def test_the_first_rank_has_the_gpu_before_the_others() -> None:
    parts = [
        RankPart("f", "bfloat16", Mock(), rank, 4, 10, "h", f"cuda:{rank + 2}") for rank in (1, 2)
    ]
    first = first_part(parts)
    assert (first.rank, first.device) == (0, "cuda:2")
    assert first_part([replace(parts[0], device="cpu")]).device == "cpu"


def test_ranks_that_would_share_a_gpu_are_refused() -> None:
    """NCCL would refuse them later, and in other words."""
    part = RankPart("folder", "bfloat16", Mock(), 1, 2, 1000, "head", "cuda:1")
    with pytest.raises(ValueError, match="needs 2 GPUs and this machine has 0"):
        RankProcesses([part], seconds=1.0)


@pytest.mark.slow
def test_ranks_at_rest_take_nothing_and_end_with_the_engine() -> None:
    engine = engine_of(2)
    ranks = [psutil.Process(role.place.process_id) for role in engine.roles() if role.index]
    assert len(ranks) == 1
    time.sleep(1.0)  # for what it was told last
    before = [sum(rank.cpu_times()[:2]) for rank in ranks]
    time.sleep(2.0)
    after = [sum(rank.cpu_times()[:2]) for rank in ranks]
    assert after == before
    engine.close()
    assert not any(rank.is_running() for rank in ranks)


def test_a_rank_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it lacks, to the caller that starts the engine."""
    from lexshard.actors.body.parallel import loading

    whole = loading.RankPart

    def elsewhere(folder: str, *rest: Any) -> Any:
        return whole(folder if rest[2] == 0 else "/nowhere", *rest)

    monkeypatch.setattr(loading, "RankPart", elsewhere)
    with pytest.raises(RankLostError, match="rank 1 cannot be made: WeightsError: /nowhere"):
        engine_of(2)
