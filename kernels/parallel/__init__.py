"""The decoder layers of the Llama family on several ranks, each with its part of every weight.

A rank has some heads of the attention and some columns of what is inside the gated MLP, so that the
products that lead there need nothing of the others. The two products that lead back to the hidden
states are sums over what all ranks have. Their columns are cut into `LEAVES` equal leaves, however
many ranks there are: every leaf is one chain of multiply-adds, and leaves are added in one fixed
binary tree. A rank of ``LEAVES / ranks`` leaves has one subtree, and adds those of others as it
gets them, neighbours first (`kernels.parallel.exchange`). So 1, 2, 4 and 8 ranks give the same
bits. They are not those of the undivided stack (`kernels.llama`), which has one chain per output.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEAVES = 8
ROWS_AT_ONCE = 48  # that are exchanged together
APART = 16  # words between two that different ranks write: two lines of memory
STOPPED = 0  # the word that ends every wait; rank r counts in the word (r + 1) * `APART`


class Exchange(NamedTuple):
    """What one of several ranks adds others' sums by, as compiled code takes it.

    Of ranks that share memory, ``words`` count what each has written to ``slots``. Those that do
    not have a socket to the partner of every round. ``counted`` is how many exchanges there were,
    and ``limit`` how many nanoseconds a partner may take.
    """

    rank: int
    rounds: int
    limit: int
    counted: npt.NDArray[np.int64]  # [1]
    words: npt.NDArray[np.int64]  # [(ranks + 1) * APART]
    slots: npt.NDArray[
        np.float32
    ]  # [ranks, 2 * rounds, ROWS_AT_ONCE * d], or [1, 1, ...] by socket
    sockets: npt.NDArray[np.int64]  # [rounds], or [0] where memory is shared


def words_of_board(ranks: int) -> int:
    """How many words ranks that share memory have between them."""
    return (ranks + 1) * APART


def rounds_of(ranks: int) -> int:
    """How often a rank adds another's sum to its own until it has that of all.

    Raises ValueError for a number of ranks that does not divide the leaves.
    """
    if ranks < 1 or LEAVES % ranks:
        raise ValueError(f"{ranks} ranks cannot share {LEAVES} leaves: take 1, 2, 4 or 8")
    return ranks.bit_length() - 1


def slots_shape(ranks: int, hidden: int) -> tuple[int, int, int]:
    """Of the slots of ranks that share memory. Two for every round: a rank that has begun the next
    exchange but one may write where its partner has read."""
    return ranks, 2 * rounds_of(ranks), ROWS_AT_ONCE * hidden


def alone() -> Exchange:
    """Of a single rank, whose sum is that of all."""
    return Exchange(
        0,
        0,
        0,
        np.zeros(1, np.int64),
        np.zeros(words_of_board(1), np.int64),
        np.zeros((1, 0, 0), np.float32),
        np.zeros(0, np.int64),
    )
