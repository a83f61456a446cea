"""Ranks of a body in processes of their own: the same text from any number of them, and
after any is lost."""

from __future__ import annotations

import signal
import socket
import threading
import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from lexshard.actors.body.parallel import messages
from lexshard.actors.body.parallel.messages import GroupMember, RankPart
from lexshard.actors.body.parallel.sums import RankLostError
from lexshard.actors.collective import CollectiveLostError
from lexshard.actors.engine.completion import run_to_completion
from lexshard.actors.messages import Request
from lexshard.actors.packed_arrays import encode
from lexshard.cluster.link import Link, PeerLostError
from lexshard.cluster.ranks import sockets
from lexshard.cluster.ranks.meeting import first_part
from lexshard.cluster.ranks.processes import RankProcesses
from lexshard.cluster.ranks.server import NOT_MET, serve_rank
from tests.support.paths import DEMO_DRAFT
from tests.support.rank_digests import Tokens, told, told_while_ranks_are_lost
from tests.support.rank_engines import STREAMS, engine_of

TCP_REPAIR = 19  # of Linux: such a socket is closed without a word to the other end


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
    tokens_of_one_rank: Tokens, requests: list[Request], ranks: int, number: signal.Signals
) -> None:
    """Twice, under streams that go on with the same text."""
    found = told_while_ranks_are_lost(engine_of(ranks), requests[:STREAMS], number)
    assert found == tokens_of_one_rank


@pytest.mark.slow
def test_decoders_of_torch_tell_the_same_whatever_is_beside_and_whoever_is_lost(
    requests: list[Request],
) -> None:
    """`--body general`: as ranks on GPUs are, but for gloo, which adds here."""
    some = requests[:STREAMS]
    engine = engine_of(2, body="general", max_running=7)
    expected = [each.token_ids for each in run_to_completion(engine, some[::-1])]
    assert told_while_ranks_are_lost(engine, some, signal.SIGKILL) == expected[::-1]


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


@pytest.mark.parametrize(
    ("shards", "lacking", "error", "told"),
    [
        (1, {"folder": "/no"}, RankLostError, "rank 1 cannot be made: WeightsError: /no"),
        (2, {"head_name": "no.name"}, CollectiveLostError, r"cannot be made: KeyError: .no\.name"),
    ],
    ids=["rank", "shard"],
)
def test_a_rank_or_shard_that_cannot_be_made_says_why(
    shards: int,
    lacking: dict[str, Any],
    error: type[Exception],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what it lacks, to the caller that starts the engine."""
    from lexshard.actors.body.parallel import loading

    def part(*given: Any) -> RankPart:
        whole = RankPart(*given)
        return replace(whole, **lacking) if whole.rank else whole

    monkeypatch.setattr(loading, "RankPart", part)
    with pytest.raises(error, match=told):
        engine_of(2, shards=shards)


def test_a_rank_that_did_not_meet_the_others_is_there_for_the_next_group() -> None:
    """Where one of these was lost meanwhile: this one has nothing to load anew."""
    meet = Mock(side_effect=[PeerLostError("one has gone"), None])
    meeting = Mock(form=lambda: ("here", 1), meet=meet)
    first, end = (Link(each) for each in socket.socketpair())
    rank = threading.Thread(target=serve_rank, args=(end, Mock(), meeting), daemon=True)
    rank.start()
    for question, expected in ((1, GroupMember(2, NOT_MET)), (3, GroupMember(4))):
        first.send(encode(messages.FormGroup(question)))
        assert messages.decode_rank_reply(first.receive(30)) == GroupMember(question, ("here", 1))
        first.send(encode(messages.MeetGroup((), b"", question + 1)))
        assert messages.decode_rank_reply(first.receive(30)) == expected
    meeting.leave.assert_called_once()
    first.close()
    rank.join(30)
    assert not rank.is_alive()


def test_a_machine_that_vanishes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word, as where its power fails while it loads and is asked for nothing."""
    monkeypatch.setattr(sockets, "KEEPALIVE", dict.fromkeys(sockets.KEEPALIVE, 1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        end, _ = listener.accept()
    sockets.notice_loss(end)
    try:
        there.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    except OSError as error:
        pytest.skip(f"no connection can be dropped without a word here: {error}")
    there.close()
    with pytest.raises(PeerLostError, match="has gone"):
        Link(end).receive(30)
