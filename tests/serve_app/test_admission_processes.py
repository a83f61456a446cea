"""Limits hold over all API processes together, and one that is killed takes nothing along."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lexshard.serve_app.admission import Admission
from lexshard.serve_app.api_processes.accounts import CLIENTS_WITHOUT_SEQUENCES
from lexshard.serve_app.api_processes.seats import LOCK_SECONDS, SPARE_SEATS, Seats
from lexshard.serve_app.openai.errors import ApiError
from tests.support.admitting import PER_CLIENT, PROCESSES, SEQUENCES, WAITING, admission
from tests.support.paths import ROOT


def start(folder: Path, *task: object) -> subprocess.Popen[str]:
    """A process of `tests.support.admitting`, which has said its first word."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.admitting", str(folder), *map(str, task)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() in ("ready\n", "held\n")
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def held_at_once(lines: Iterator[str]) -> Iterator[tuple[Counter[str], int, int]]:
    """Requests by client, sequences and tokens after every time a client came in."""
    moments: list[tuple[int, int, str, int, int]] = []
    for line in lines:
        began, ended, client, sequences, tokens = line.split()
        moments.append((int(began), 1, client, int(sequences), int(tokens)))
        moments.append((int(ended), -1, client, int(sequences), int(tokens)))
    requests: Counter[str] = Counter()
    places = waiting = 0
    for _, way, client, sequences, tokens in sorted(moments):
        requests[client] += way * max(1, sequences)
        places += way * sequences
        waiting += way * tokens
        yield requests, places, waiting


def test_no_limit_is_ever_passed_and_nothing_is_left(tmp_path: Path) -> None:
    workers = [start(tmp_path, "hammer", seed, 1.0) for seed in range(PROCESSES)]
    for worker in workers:
        go(worker)
    outputs = [worker.communicate(timeout=60)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * PROCESSES
    lines = [output.splitlines() for output in outputs]
    assert all(len(own) > 100 for own in lines), "each of them got in again and again"
    most_places = most_waiting = 0
    for requests, places, waiting in held_at_once(itertools.chain(*lines)):
        assert max(requests.values()) <= PER_CLIENT
        most_places, most_waiting = max(most_places, places), max(most_waiting, waiting)
    assert SEQUENCES - 2 < most_places <= SEQUENCES
    assert WAITING - 50 < most_waiting <= WAITING
    left = admission(tmp_path)
    assert (left.sequences, left.waiting_tokens) == (0, 0)


def test_who_is_killed_while_counting_leaves_every_place_to_others(tmp_path: Path) -> None:
    draw = random.Random(5)
    survivor = admission(tmp_path, per_client=None)
    deadline = time.monotonic() + 60
    for seed in range(4):
        worker = start(tmp_path, "hammer", seed, 60)
        go(worker)
        while not survivor.sequences:
            assert time.monotonic() < deadline
        time.sleep(draw.random() / 50)
        worker.kill()
        worker.communicate()
        survivor.forget_the_dead()
        assert (survivor.sequences, survivor.waiting_tokens) == (0, 0)
        survivor.admit("a", SEQUENCES, WAITING).release()


def test_what_a_dead_process_held_refuses_nobody(tmp_path: Path) -> None:
    """Its death need not be noticed first: the request that would be refused does."""
    own = admission(tmp_path)
    kept = own.admit("mine", 2, 20)
    other = start(tmp_path, "hold", "theirs", PER_CLIENT, 100)
    assert (own.sequences, own.waiting_tokens) == (2 + PER_CLIENT, 120)
    with pytest.raises(ApiError, match=f"you have {PER_CLIENT} of the {PER_CLIENT} requests"):
        own.admit("theirs", 1, 0)
    with pytest.raises(ApiError, match="120 prompt tokens are waiting"):
        own.admit("third", 1, 81)
    other.kill()
    other.communicate()
    own.admit("theirs", PER_CLIENT, 100).release()
    assert (own.sequences, own.waiting_tokens) == (2, 20)
    kept.release()
    assert (own.sequences, own.waiting_tokens) == (0, 0)


def test_processes_refuse_what_one_would_refuse(tmp_path: Path) -> None:
    """The same requests, at one process and spread over three: the same answers, word for word."""
    draw = random.Random(17)
    one = Admission(SEQUENCES, WAITING, PER_CLIENT)
    many = [admission(tmp_path) for _ in range(PROCESSES)]
    held = []
    refusals = set()
    for _ in range(2000):
        if held and draw.random() < 0.45:
            for ticket in held.pop(draw.randrange(len(held))):
                ticket.release()
        elif held and draw.random() < 0.2:
            tokens = draw.randrange(60)
            for ticket in draw.choice(held):
                ticket.set_waiting(tokens)
        else:
            asked = draw.choice("abcdef"), draw.randrange(7), draw.randrange(130)
            answers = []
            for each in (one, draw.choice(many)):
                try:
                    answers.append(each.admit(*asked))
                except ApiError as error:
                    answers.append((error.status, error.message))
            if isinstance(answers[0], tuple):
                assert answers[0] == answers[1]
                refusals.add(answers[0][0])
            else:
                held.append(answers)
        for each in many:
            assert (each.sequences, each.waiting_tokens) == (one.sequences, one.waiting_tokens)
    assert refusals == {400, 429, 503}


def test_more_clients_than_can_be_counted_are_told_to_come_back(tmp_path: Path) -> None:
    own = admission(tmp_path)
    room = CLIENTS_WITHOUT_SEQUENCES + SEQUENCES
    tickets = [own.admit(f"client {index}", 0, 0) for index in range(room)]
    with pytest.raises(ApiError, match=f"{room} clients have requests open") as refused:
        own.admit("one more", 0, 0)
    assert refused.value.status == 503
    assert "Retry-After" in refused.value.headers
    own.admit("client 7", 1, 1).release()
    tickets[7].release()
    own.admit("one more", 0, 0)


def test_a_process_that_stops_while_it_counts_holds_up_nobody_for_long(tmp_path: Path) -> None:
    stopped = Seats(tmp_path, PROCESSES)
    own = admission(tmp_path)
    ticket = own.admit("a", 1, 1)
    with stopped.alone():
        began = time.monotonic()
        with pytest.raises(ApiError, match="does not run at the moment") as refused:
            own.admit("a", 1, 1)
        ticket.release()  # waits for no other process
        assert time.monotonic() - began < 20 * LOCK_SECONDS
    assert refused.value.status == 503
    own.admit("a", 1, 1)


def test_a_seat_is_free_again_when_its_process_has_gone(tmp_path: Path) -> None:
    first = start(tmp_path, "hold", "a", 1, 1)
    others = [Seats(tmp_path, PROCESSES) for _ in range(PROCESSES + SPARE_SEATS - 1)]
    assert [each.own for each in others] == [*range(1, PROCESSES + SPARE_SEATS)]
    with pytest.raises(RuntimeError, match="seats for API processes are taken"):
        Seats(tmp_path, PROCESSES)
    first.kill()
    first.communicate()
    assert Seats(tmp_path, PROCESSES).own == 0


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="files there may be sparse")
def test_what_processes_share_has_its_room_on_the_disk_from_the_first(tmp_path: Path) -> None:
    """Written to where there is none later, it would end them with SIGBUS."""
    size = Seats(tmp_path, 64).memory("counters", 1000, np.float64).nbytes
    assert 512 * (tmp_path / "counters").stat().st_blocks >= size
