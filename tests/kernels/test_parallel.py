"""Sums of several ranks are one tree over eight leaves, however many ranks there are."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lexshard.kernels.linear import Arithmetic, pack
from lexshard.kernels.linear.reference import rounded
from lexshard.kernels.parallel import (
    APART,
    LEAVES,
    ROWS_AT_ONCE,
    STOPPED,
    Exchange,
    alone,
    reference,
    rounds_of,
    slots_shape,
    words_of_board,
)
from lexshard.kernels.parallel.cpu import subtree as subtree_of
from lexshard.kernels.parallel.exchange import add_up

HIDDEN = 32
NO_SOCKETS = np.zeros(0, np.int64)


def on_a_board(ranks: int, seconds: float = 10.0) -> list[Exchange]:
    """Exchanges of ranks that share memory."""
    words = np.zeros(words_of_board(ranks), np.int64)
    slots = np.zeros(slots_shape(ranks, HIDDEN), np.float32)
    rounds, limit = rounds_of(ranks), int(seconds * 1e9)
    return [
        Exchange(rank, rounds, limit, np.zeros(1, np.int64), words, slots, NO_SOCKETS)
        for rank in range(ranks)
    ]


def by_sockets(ranks: int) -> tuple[list[Exchange], list[socket.socket]]:
    """Exchanges of ranks that share nothing, and their ends."""
    ends: dict[tuple[int, int], socket.socket] = {}
    for rank in range(ranks):
        for turn in range(rounds_of(ranks)):
            partner = rank ^ (1 << turn)
            if rank < partner:
                ends[rank, turn], ends[partner, turn] = socket.socketpair()
    exchanges = []
    for rank in range(ranks):
        own = [ends[rank, turn].fileno() for turn in range(rounds_of(ranks))]
        scratch = np.zeros((1, 1, ROWS_AT_ONCE * HIDDEN), np.float32)
        count = np.zeros(1, np.int64)
        exchanges.append(Exchange(rank, len(own), 0, count, count, scratch, np.array(own)))
    return exchanges, list(ends.values())


def in_threads(works: Sequence[Callable[[], object]]) -> list[object]:
    """What each of ``works`` returns, all at the same time."""
    found: list[object] = [None] * len(works)

    def do(place: int) -> None:
        found[place] = works[place]()

    threads = [threading.Thread(target=do, args=[place]) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def added(
    exchanges: Sequence[Exchange], steps: Sequence[Sequence[npt.NDArray[np.float32]]]
) -> list[list[npt.NDArray[np.float32]]]:
    """What every rank has after each of its ``steps``."""

    def rank(number: int) -> list[npt.NDArray[np.float32]]:
        sums = []
        for step in steps:
            own = step[number].copy()
            assert add_up(exchanges[number], own)
            sums.append(own)
        return sums

    return in_threads([lambda number=number: rank(number) for number in range(len(exchanges))])  # type: ignore[misc,return-value]


def values(ranks: int, count: int, seed: int) -> list[npt.NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(count).astype(np.float32) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("way", ["memory", "sockets"])
def test_all_ranks_have_the_bits_of_one_tree(ranks: int, way: str) -> None:
    """Over many exchanges of other sizes, in which none waits for all."""
    steps = [values(ranks, 1 + 37 * step % (ROWS_AT_ONCE * HIDDEN), step) for step in range(60)]
    ends: list[socket.socket] = []
    if way == "memory":
        exchanges = on_a_board(ranks)
    else:
        exchanges, ends = by_sockets(ranks)
    found = added(exchanges, steps)
    for end in ends:
        end.close()
    for own in found:
        for sums, step in zip(own, steps, strict=True):
            assert np.array_equal(sums.view(np.uint32), reference.tree_sum(step).view(np.uint32))


def test_minus_zero_leaves_every_bit_of_a_number() -> None:
    special = np.array([0.0, -0.0, 1e-45, -3.5, np.inf, -np.inf], np.float32)
    nothing = np.full(len(special), -0.0, np.float32)
    for step in ([special, nothing], [nothing, special]):
        for own in added(on_a_board(2), [step]):
            assert np.array_equal(own[0].view(np.uint32), special.view(np.uint32))


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3, 11])
def test_a_rank_adds_its_own_leaves_as_the_tree_does(arithmetic: Arithmetic, rows: int) -> None:
    """Two ranks' halves, added, are all leaves of one, and near the product in float64."""
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, 22 * LEAVES)).astype(np.float32)
    weight = torch.from_numpy(random.standard_normal((HIDDEN, x.shape[1])).astype(np.float32))
    weight = weight.bfloat16()

    def subtree(first: int, leaves: int) -> npt.NDArray[np.float32]:
        own = slice(22 * first, 22 * (first + leaves))
        packed = [
            pack(each, half=True, arithmetic=arithmetic).panels
            for each in weight[:, own].chunk(leaves, 1)
        ]
        sums = np.empty((leaves, rows, HIDDEN), np.float32)
        part = np.ascontiguousarray(x[:, own])
        subtree_of(part, np.stack(packed), np.empty((rows, 22), np.float32), sums)
        return sums[0]

    whole = subtree(0, LEAVES)
    assert np.array_equal(whole, reference.tree_sum([subtree(0, 4), subtree(4, 4)]))
    eighths = [subtree(leaf, 1) for leaf in range(LEAVES)]
    assert np.array_equal(whole, reference.tree_sum(eighths))
    taken = rounded(torch.from_numpy(x)).numpy() if arithmetic == "bfloat16" else x
    expected = reference.product(taken, weight.float().numpy())
    assert np.abs(whole - expected).max() < 1e-5 * np.abs(expected).max()


def test_who_waits_for_a_lost_rank_is_told_in_time() -> None:
    """One that does not come, one that all are told to leave for, a socket that has been closed."""
    own = np.zeros(4, np.float32)
    assert not add_up(on_a_board(2, seconds=0.05)[0], own)
    left = on_a_board(2)
    left[0].words[STOPPED] = 1
    assert not add_up(left[0], own)
    assert left[0].words[APART] == 1  # it had come itself
    exchanges, ends = by_sockets(2)
    ends[1].close()
    assert not add_up(exchanges[0], own)
    ends[0].close()


def test_only_what_divides_the_leaves_is_a_number_of_ranks() -> None:
    assert [rounds_of(ranks) for ranks in (1, 2, 4, 8)] == [0, 1, 2, 3]
    for ranks in (0, 3, 5, 6, 16):
        with pytest.raises(ValueError, match="cannot share 8 leaves"):
            rounds_of(ranks)
    own = np.ones(3, np.float32)
    assert add_up(alone(), own)
    assert np.array_equal(own, np.ones(3, np.float32))
