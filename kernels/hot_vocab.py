"""How many hot tokens pay: the cost model of SIMPLE (section 5.4) with the first scan counted.

A decision looks at its ``H`` hot tokens, and then at what is left of the other ``V - H``:

    F(H) = c0 + c1 [H > 0] + c [H + (1 - a(H)) (V - H)]        seconds per row

``a(H)``, the *skip rate*, is the share of the tail that need not be visited, as
`kernels.decision.decide_dense` counts it; ``c1`` is what looking in two goes costs by itself. The
minimum lies where ``a(H) = (V - H) a'(H)``, or at an end. Equations 10-12 of the paper leave the
first scan out where the hot tokens are rejected.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Sizes = npt.NDArray[np.int64]


class Cost(NamedTuple):
    """Seconds per row: ``fixed`` (c0), ``per_token`` (c) for every token visited, and ``two_goes``
    (c1) more where any token is hot."""

    fixed: float
    per_token: float
    two_goes: float = 0.0


class Curve(NamedTuple):
    """The skip rate, between 0 and 1, at some sizes of the hot set in rising order."""

    sizes: Sizes  # [m]
    skip_rate: Floats  # [m]


def skip_rate(sizes: Sizes, visited: Floats, vocabulary_size: int) -> Floats:
    """``a(H)`` [m] from tail tokens visited per row [m]; 1 where there is no tail."""
    tail = vocabulary_size - sizes
    return np.where(tail == 0, 1.0, 1.0 - visited / np.maximum(tail, 1))


def fit_cost(sizes: Sizes, visited: Floats, seconds: Floats) -> Cost:
    """Least squares of ``seconds`` [n] per row, without terms that would be below 0.

    ``sizes`` [n] are those of the hot set, ``visited`` [n] the tail tokens visited per row.
    """
    tokens = np.asarray(sizes + visited, np.float64)
    terms = np.stack([np.ones_like(tokens), tokens, (sizes > 0).astype(np.float64)], axis=1)
    scale = np.maximum(terms.max(axis=0), 1.0)
    used = np.array([0, 1, 2])
    found = np.linalg.lstsq(terms / scale, seconds, rcond=None)[0]
    while (found < 0).any():
        used = np.delete(used, np.argmin(found))
        found = np.linalg.lstsq((terms / scale)[:, used], seconds, rcond=None)[0]
    cost = np.zeros(3)
    cost[used] = found
    return Cost(*(cost / scale).tolist())


def expected_cost(sizes: Sizes, rates: Floats, cost: Cost, vocabulary_size: int) -> Floats:
    """``F(H)`` [n], seconds per row, at ``sizes`` [n] with their skip ``rates`` [n]."""
    visited = sizes + (1.0 - rates) * (vocabulary_size - sizes)
    return cost.fixed + cost.two_goes * (sizes > 0) + cost.per_token * visited


def interpolate(curve: Curve, sizes: Sizes) -> Floats:
    """The skip rate [n] at any ``sizes`` [n], never falling, constant beyond the ends: straight in
    ``log(1 + H)``, where curves of Zipf-like vocabularies are nearly so."""
    rising = np.maximum.accumulate(curve.skip_rate)
    found: Floats = np.interp(np.log1p(sizes), np.log1p(curve.sizes), rising)
    return found


def best_size(curve: Curve, cost: Cost, vocabulary_size: int) -> int:
    """The size, of all from 0 (off) to ``vocabulary_size``, with the least expected cost; the
    smallest of equals."""
    sizes = np.arange(vocabulary_size + 1, dtype=np.int64)
    costs = expected_cost(sizes, interpolate(curve, sizes), cost, vocabulary_size)
    return int(np.argmin(costs))
