"""What drafting reads and writes: a draft model's output rows by cluster, and its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Router(NamedTuple):
    """Which clusters a draft step looks at: ``W2 silu(W1 [embedding ; hidden before] + b1) + b2``
    (DynaSpec, section 4). ``kernels.linear.pack`` packs both matrices; h is a multiple of 16, and
    the outputs are padded to one."""

    inner: Floats  # [h / 16, 2 d, 16]
    inner_bias: Floats  # [h]
    outer: Floats  # [ceil(M / 16), h, 16]
    outer_bias: Floats  # [M]
    budgets: npt.NDArray[np.int32]  # [steps] clusters for draft step t; the last one from there on


class DraftHead(NamedTuple):
    """Output rows of a draft model in M clusters, each of whole panels of 16 rows, P in all.

    The rows of a cluster stand in the order of their ids. Full and static heads are one cluster.
    With a ``router`` a step looks at the clusters ``always`` and at the router's best of the
    others; without one, at all.
    """

    panels: npt.NDArray[np.float32] | npt.NDArray[np.uint16]  # [P, d, 16] as `kernels.linear.pack`
    ids: npt.NDArray[np.int32]  # [16 P] vocabulary ids; -1 where a row only fills a panel up
    offsets: npt.NDArray[np.int32]  # [M + 1] in panels
    always: npt.NDArray[np.int32]  # [A] clusters, ascending
    router: Router | None = None


class PendingTokens(NamedTuple):
    """The tokens of S sequences that the draft model's cache lacks, T in all, and what is wanted.

    Sequence ``s`` owns ``tokens[offsets[s]:offsets[s + 1]]``, at least one; the first of them
    stands at position ``start[s]`` of prompt + output. Its block table has room for them and for
    all of its guesses but the last. A guess is drawn with the noise of (key, its own position) and
    truncated by top-k, top-p and min-p, as the target draws in the same place.
    """

    tokens: npt.NDArray[np.int32]  # [T]
    offsets: npt.NDArray[np.int64]  # [S + 1]
    start: npt.NDArray[np.int32]  # [S]
    block_tables: npt.NDArray[np.int32]  # [S, max_blocks]
    most: npt.NDArray[np.int32]  # [S] guesses wanted; 0 puts the tokens into the cache alone
    key: npt.NDArray[np.uint64]  # [S]
    inverse_temperature: npt.NDArray[np.float64]  # [S] fp32 values; 0 is greedy
    top_k: npt.NDArray[np.int64]  # [S] 0 is off
    top_p: npt.NDArray[np.float64]  # [S] 1 is off
    log_min_p: npt.NDArray[np.float64]  # [S] -inf is off
    state_before: Floats  # [S, d] of position start - 1, for the router; zeros where not known
    record: bool = False  # whether the logits that are drawn from are wanted


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """What was guessed. ``states[s, t]`` is the hidden state of sequence ``s`` after its last
    pending token and ``t`` guesses; there is none behind those that were needed. ``logits[s, t]``,
    where they are recorded, are those that guess ``t`` was drawn from, in the order of the head's
    rows: ``-inf`` where a row was not looked at, is no token or was truncated."""

    guesses: npt.NDArray[np.int32]  # [S, longest]; -1 behind the last
    states: Floats  # [S, max(1, longest), d]
    rows: npt.NDArray[np.int64]  # [S] vocabulary rows that were looked at
    logits: Floats  # [S, longest, 16 P], or empty
