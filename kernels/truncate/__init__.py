"""Truncation before the draw: min-p, then top-k, then top-p, in linear time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lexshard.kernels.truncate import cpu

__all__ = ["best_ids", "truncate"]


def truncate(
    logits: npt.NDArray[np.float32],
    *,
    inverse_temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
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
    log_min_p = math.log(min_p) if min_p > 0 else -math.inf
    keep = np.empty(len(logits), np.bool_)
    cpu.truncate_row(logits, inverse_temperature, top_k, top_p, log_min_p, keep)
    return keep


def best_ids(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """The places of the ``count`` largest logits, largest first, ties to the lower place."""
    if count == 0:
        return np.empty(0, np.int64)
    places = cpu.best(logits, count)
    return places[np.argsort(-logits[places], kind="stable")]
