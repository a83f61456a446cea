"""What verification takes and gives: rows of the target, drafts, where the drafts came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class DraftedRows(NamedTuple):
    """N sequences with their drafts. Sequence ``n`` has ``gamma_n >= 0`` drafts and owns the rows
    ``offsets[n]:offsets[n + 1]`` of the target's logits, one more than it has drafts. R rows and
    D = R - N drafts in all. Where there is no ``bonus`` it owns one row for each of its drafts, at
    least one, so that D = R, and they stand at ``offsets[n]``."""

    offsets: npt.NDArray[np.int64]  # [N + 1]
    drafts: Any  # [D] int64; those of sequence n stand at offsets[n] - n; may be on the device
    inverse_temperature: npt.NDArray[np.float64]  # [N] fp32 values; 0 is greedy
    key: npt.NDArray[np.uint64]  # [N]
    position: npt.NDArray[np.uint64]  # [N] of the token that the sequence's first row draws
    bonus: bool = True  # whether each sequence has a row after its drafts, that draws a token


@dataclass(frozen=True, slots=True, eq=False)
class DenseProposals:
    """Drafts drawn from ``softmax(f64(logits) * inverse_temperature)``."""

    logits: Any  # [D, V] fp32, -inf where the drafter excluded a token
    inverse_temperature: npt.NDArray[np.float64]  # [N] fp32 values above 0


@dataclass(frozen=True, slots=True, eq=False)
class SparseProposals:
    """Drafts drawn from a few tokens. Draft ``d`` owns ``offsets[d]:offsets[d + 1]``."""

    ids: npt.NDArray[np.int32]  # [total] sorted and distinct within a draft
    probabilities: npt.NDArray[np.float64]  # [total] their sum is 1 within a draft
    offsets: npt.NDArray[np.int64]  # [D + 1]


Proposals = DenseProposals | SparseProposals | None


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What became of the drafts: sequence ``n`` emits ``accepted[n] + 1`` tokens, which stand at
    ``tokens[offsets[n]]`` and after; the last one is not a draft (without a ``bonus`` there is none
    where all stand). It is -1 where a row excludes every token, and so are the places behind it.
    ``logits_read`` counts, once each, the logits of target and proposals that had to be read, where
    the implementation says.
    """

    accepted: Any  # [N] int64
    tokens: Any  # [R] int64
    logits_read: Any = None  # [N] int64
