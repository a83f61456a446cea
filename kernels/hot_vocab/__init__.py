"""A hot vocabulary: how many tokens to look at first, and the paper's draw from two urns.

`sizing.py` is the cost model that chooses the number. `mixture_draw` is SIMPLE's speculative
hot-vocab sampling (section 5.3) with its hot mass taken from the distribution that is really drawn
from. It is for benchmarks: what is served visits hot tokens first (`kernels.decision`), which
changes the order of looking and nothing else.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from lexshard.kernels.hot_vocab import cpu, reference
from lexshard.kernels.hot_vocab.sizing import (
    Cost,
    Curve,
    best_size,
    expected_cost,
    fit_cost,
    interpolate,
    rising,
    skip_rate,
)
from lexshard.kernels.truncate import truncate

Implementation = Literal["reference", "cpu"]

__all__ = [
    "Cost",
    "Curve",
    "best_size",
    "expected_cost",
    "fit_cost",
    "interpolate",
    "mixture_draw",
    "rising",
    "skip_rate",
    "target_distribution",
]


def target_distribution(
    logits: npt.NDArray[np.float32],
    *,
    inverse_temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> npt.NDArray[np.float64]:
    """The filtered, tempered distribution [V] that a token is drawn from; sums to 1.

    ``logits`` [V] fp32, adjusted; the controls as for `kernels.truncate.truncate`. All zeros where
    every token is excluded. The sum over the ``H`` hot tokens is their hot mass, the paper's
    ``alpha`` (equation 7, which takes it before filters and temperature).
    """
    keep = truncate(
        logits, inverse_temperature=inverse_temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    result = np.zeros(len(logits))
    if keep.any():
        scaled = logits[keep].astype(np.float64) * inverse_temperature
        weights = np.exp(scaled - scaled.max())
        result[keep] = weights / weights.sum()
    return result


def mixture_draw(
    logits: npt.NDArray[np.float32],
    hot_ids: npt.NDArray[np.int32],
    uniforms: npt.NDArray[np.float64],
    *,
    inverse_temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    implementation: Implementation | None = None,
) -> npt.NDArray[np.int64]:
    """Token ids [n] drawn from one row: hot with probability ``alpha``, else from the tail.

    ``logits`` [V] fp32, adjusted, any strides; ``hot_ids`` [H] sorted and distinct; ``uniforms``
    [n, 2] in [0, 1), one pair per draw: the first accepts the hot side, the second picks within a
    side. ``alpha`` is the hot share of the kept tokens' mass. -1 where every token is excluded.
    The numba version looks at the hot tokens alone where they certainly hold all that top-k or
    min-p keep (no tail logit reaches the last one kept), and at every token otherwise.

    Raises ValueError for a temperature without an inverse, or hot ids that are not sorted and
    distinct ids of the vocabulary.
    """
    if not 0 < inverse_temperature < math.inf:
        raise ValueError("the mixture draws: give an inverse temperature above 0")
    if len(hot_ids) and (
        hot_ids[0] < 0 or hot_ids[-1] >= len(logits) or (np.diff(hot_ids) <= 0).any()
    ):
        raise ValueError(f"hot ids must be sorted, distinct and below {len(logits)}")
    module = reference if implementation == "reference" else cpu
    log_min_p = math.log(min_p) if min_p > 0 else -math.inf
    return module.mixture_draw(
        logits, hot_ids, uniforms, inverse_temperature, top_k, top_p, log_min_p
    )
