"""Shards of the head at the ranks of the body: the same text without processes of their own, and
hidden states that do not travel."""

from __future__ import annotations

import os
import signal
import socket
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lexshard.actors.body.batch import Batch
from lexshard.actors.body.parallel.messages import (
    GroupMember,
    RankPart,
    ShardMessage,
    decode_rank_message,
)
from lexshard.actors.body.parallel.parallel_body import ParallelBody
from lexshard.actors.body.parallel.sums import RankLostError
from lexshard.actors.collective import CollectiveLostError
from lexshard.actors.messages import Request
from lexshard.actors.packed_arrays import encode
from lexshard.cluster.config import ServeConfig
from lexshard.cluster.link import Link
from lexshard.cluster.ranks.gang import RankGang
from lexshard.cluster.ranks.server import NOT_MET
from lexshard.cluster.ranks.shard_group import RankCollective, ShardLinks
from tests.support.paths import DEMO, DEMO_DRAFT
from tests.support.processes import gone
from tests.support.rank_digests import Tokens, tokens_of, told, told_while_ranks_are_lost
from tests.support.rank_engines import STREAMS, engine_of


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 2, "draft": str(DEMO_DRAFT), "draft_length": "fixed"},
        pytest.param({"ranks": 2, "head": "certified"}, marks=pytest.mark.slow),
        pytest.param({"ranks": 4, "samplers": 2}, marks=pytest.mark.slow),
        pytest.param({"ranks": 2, "shard_assignment": "blocks-contiguous"}, marks=pytest.mark.slow),
    ],
    ids=["two, with drafts", "two, certified", "four, with samplers", "two, side by side"],
)
def test_tokens_and_log_probabilities_are_those_of_one_process(
    of_one_rank: str, requests: list[Request], changes: dict[str, Any]
) -> None:
    engine = engine_of(**changes, shards=changes["ranks"])
    shards = [role for role in engine.roles() if role.name == "shard"]
    ranks = [role for role in engine.roles() if role.name == "body"]
    assert [each.place for each in shards] == [each.place for each in ranks]
    assert told(engine, requests) == of_one_rank


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_lost_rank_is_replaced_with_its_shard(
    tokens_of_one_rank: Tokens, requests: list[Request], ranks: int, number: signal.Signals
) -> None:
    engine = engine_of(ranks, shards=ranks)
    found = told_while_ranks_are_lost(engine, requests[:STREAMS], number)
    assert found == tokens_of_one_rank


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_so_is_one_that_only_the_head_misses(
    tokens_of_one_rank: Tokens,
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    """Twice, between the body's part of a step and the head's."""
    engine = engine_of(2, shards=2)
    body, head = engine.model.body, engine.steps._head
    assert isinstance(body, ParallelBody)
    compute, steps = body.forward, 0

    def losing(batch: Batch) -> torch.Tensor:
        nonlocal steps
        hidden = compute(batch)
        steps += 1
        if steps in (6, 14):
            os.kill(body.roles()[0].place.process_id, number)
        return hidden

    monkeypatch.setattr(body, "forward", losing)
    assert tokens_of(engine, requests[:STREAMS]) == tokens_of_one_rank
    assert (body.ranks_lost, head.counters.regroupings) == (2, 2)


def test_an_engine_ends_as_ever_where_a_rank_was_lost_at_rest() -> None:
    engine = engine_of(2, shards=2)
    body = engine.model.body
    assert isinstance(body, ParallelBody)
    process_id = body.roles()[0].place.process_id
    os.kill(process_id, signal.SIGKILL)
    assert gone(process_id, 10)
    engine.close()  # raised, and left the processes of all that it had not closed yet


class Saying(RankGang):
    """Of one rank that says what is written down, whatever it is asked."""

    def __init__(self, *said: GroupMember | ShardMessage) -> None:
        self._replies, self._questions = iter(said), count(1)
        self._places = {}
        self._members = [Mock(link=Mock(receive=lambda seconds: encode(next(self._replies))))]

    def _start(self, part: RankPart) -> Any: ...

    def _leave(self) -> None: ...

    def _meet(self) -> Any: ...


def test_what_was_said_to_an_earlier_question_answers_no_later_one() -> None:
    """As where a group was not formed, since another rank was lost."""
    late = GroupMember(3, ("here", 1)), ShardMessage(b""), GroupMember(4)
    assert Saying(*late, GroupMember(5, ("there", 2))).answer(0, 5) == GroupMember(5, ("there", 2))


def test_a_rank_that_has_not_met_the_others_ends_the_group() -> None:
    with pytest.raises(RankLostError, match="rank 1 has not met the others"):
        Saying(GroupMember(1, NOT_MET))._meet_by(Mock(form=lambda: ("here", 1)))


def pair(latest: torch.Tensor, seconds: float) -> tuple[RankCollective, RankCollective]:
    """Root and another, each with the same hidden states in memory of its own."""

    def member(rank: int, end: Link) -> RankCollective:
        def heard(other: int, seconds: float) -> bytes:
            message = decode_rank_message(end.receive(seconds))
            assert isinstance(message, ShardMessage)
            return message.content

        own = latest if rank == 0 else latest.clone()
        return RankCollective(ShardLinks(rank, 2, lambda other: end, heard), seconds, lambda: own)

    root, other = (Link(end) for end in socket.socketpair())
    return member(0, root), member(1, other)


def test_rows_of_the_last_step_are_named_and_others_are_sent() -> None:
    latest = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    root, other = pair(latest, 5.0)
    for hidden, sent in ((latest, 8), (latest[2:5], 8), (latest[[1, 3]], 8 + 32)):
        before = root.traffic["hidden"].bytes_sent
        root.broadcast_hidden(hidden, *hidden.shape)
        found = other.broadcast_hidden(None, *hidden.shape)
        assert torch.equal(found, hidden)
        assert root.traffic["hidden"].bytes_sent - before == sent


def test_a_shard_that_says_nothing_in_time_is_lost() -> None:
    root, _ = pair(torch.zeros(1, 4), 0.05)
    with pytest.raises(CollectiveLostError, match="has not answered"):
        root.gather(b"")


def test_shards_at_ranks_need_no_ray() -> None:
    def needs(**changes: Any) -> tuple[str, ...]:
        return ServeConfig(model=str(DEMO), tensor_parallel=2, **changes).needs_ray

    assert needs(shards=2) == ()
    assert needs(shards=4) == needs(shards=2, shard_spares=1) == ("--shards",)
