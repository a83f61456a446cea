"""What verification takes and gives: rows that test a draft each, where drafts came from, and what
bounds tell of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class DraftedRows(NamedTuple):
    """R rows of the target's logits, each with the draft that it tests."""

    drafts: npt.NDArray[np.int64]  # [R]
    inverse_temperature: npt.NDArray[np.float64]  # [R] fp32 values above 0
    key: npt.NDArray[np.uint64]  # [R]
    position: npt.NDArray[np.uint64]  # [R] of the draft


@dataclass(frozen=True, slots=True, eq=False)
class DenseProposals:
    """Drafts drawn from ``softmax(f64(logits) * inverse_temperature)``."""

    logits: npt.NDArray[np.float32]  # [R, V], -inf where the drafter excluded a token
    inverse_temperature: npt.NDArray[np.float64]  # [R] fp32 values above 0


Proposals = DenseProposals | None
# Alpha and beta of the sigmoids in the place of softmaxes.
Limits = tuple[float, float]


class Verdict(NamedTuple):
    """The token that each row emits: its draft where that stands, else what replaces it; -1 where
    the row excludes every token. ``logits_read`` counts, once each, the logits of target and
    proposal that had to be read."""

    tokens: npt.NDArray[np.int64]  # [R]
    logits_read: npt.NDArray[np.int64]  # [R]


# What bounds can say of a guess: nothing, that it stands, or that another token takes its place.
OPEN, STANDS, REPLACED = -1, 0, 1


class BoundedRow(NamedTuple):
    """Logits of a row before temperature, none of them known but the guess's."""

    lower: npt.NDArray[np.float32]  # [V]
    upper: npt.NDArray[np.float32]  # [V], -inf where a token is excluded
    inverse_temperature: float  # an fp32 value above 0


class ProposedGuess(NamedTuple):
    """A guess ``token``, drawn from ``exp(logits inverse_temperature - log_total)``; its drafter
    was certain of it where ``logits`` are none. ``key`` and ``position`` name the noise."""

    token: int
    logits: npt.NDArray[np.float32]  # [V] or [0], -inf where the drafter excluded a token
    inverse_temperature: float
    log_total: float
    key: int
    position: int


class Finding(NamedTuple):
    """``outcome``: OPEN, STANDS or REPLACED. The log of the row's mass, sum(exp(logit times inverse
    temperature)), is between ``log_mass``. Of a guess that is REPLACED, one of ``ids`` takes its
    place."""

    outcome: int
    log_mass: tuple[float, float]
    ids: npt.NDArray[np.int32]  # [K] ascending
