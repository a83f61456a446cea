"""What a guess was drawn from, for verification by distributions (`kernels.verify`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lexshard.actors.messages import DraftDistribution


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A guess was drawn from ``softmax(f64(logits) * inverse_temperature)`` over ``ids``."""

    ids: npt.NDArray[np.int32]  # [H] distinct
    logits: npt.NDArray[np.float32]  # [H] -inf where the drafter excluded a token
    inverse_temperature: float

    @classmethod
    def of(cls, told: DraftDistribution) -> Proposal:
        """The same, from outside."""
        return cls(np.array(told.ids, np.int32), np.array(told.logits, np.float32), 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class GuessTest:
    """A row tests whether the guess at its token stands; its drafter was certain of a guess
    without a ``proposal``. It is tested ``exactly`` or by sigmoids, which need one."""

    token_id: int
    proposal: Proposal | None = None
    exactly: bool = True


NO_TESTS: Mapping[int, GuessTest] = {}  # by row
