"""What is known of a row that tests a guess, and what that tells."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
