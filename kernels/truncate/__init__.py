"""Truncation before the draw: min-p, then top-k, then top-p, in linear time."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from lexshard.kernels.truncate import cpu, reference

Implementation = Literal["reference", "cpu"]

__all__ = ["best_ids", "truncate"]


def truncate(
    logits: npt.NDArray[np.float32],
    *,
    inverse_temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    implementation: Implementation | None = None,
) -> npt.NDArray[np.bool_]:
    """Which tokens stay in the draw, bool [n].

    ``logits`` [n] fp32, adjusted, in order of token id; ``inverse_temperature`` an fp32 value
    above 0, called ``s`` here. Excluded tokens (``-inf``) never stay. In this order:

    - min-p (0 is off): ``f64(l) s >= f64(l_max) s + ln(min_p)``;
    - top-k (0 is off): exactly the ``k`` best, ties to the lower id;
    - top-p (1 is off): the fewest best tokens (ties to the lower id) that hold ``top_p`` of the
      survivors' mass, at least one.

    Masses are integers, so that their sums do not depend on an order and every implementation
    agrees at the boundary: ``mass = round(2**42 exp(f64(l) s - f64(l_max) s))`` with the
    exponential of `kernels.exponential`, and the tokens kept hold at least
    ``ceil(top_p * f64(total))``, between 1 and the total. Vocabularies below 2**20 tokens.
    """
    module = reference if implementation == "reference" else cpu
    log_min_p = math.log(min_p) if min_p > 0 else -math.inf
    return module.truncate(logits, inverse_temperature, top_k, top_p, log_min_p)


def best_ids(
    logits: npt.NDArray[np.float32], count: int, *, implementation: Implementation | None = None
) -> npt.NDArray[np.int64]:
    """The places of the ``count`` largest logits, largest first, ties to the lower place."""
    module = reference if implementation == "reference" else cpu
    return module.best_ids(logits, count)
