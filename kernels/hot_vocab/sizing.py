"""How many hot tokens pay: the cost model of SIMPLE (section 5.4) with the first scan counted.

A decision looks at its ``H`` hot tokens, and then at what is left of the other ``V - H``:

    F(H) = c0 + c [H + (1 - a(H)) (V - H)]        seconds per row

Looking in two goes costs something by itself: with any hot tokens ``c0`` is larger than without.

``a(H)``, the *skip rate*, is the expected share of the tail that need not be visited. For the
draw that is served it is ``1 - visited / (V - H)`` as `kernels.decision.decide_dense` counts; for
the paper's mixture it is the *hot mass* (the whole tail is visited when the hot side is rejected).
The minimum lies where ``a(H) = (V - H) a'(H)``, or at an end. Equations 10-12 of the paper leave
the first scan out when the hot side is rejected.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Cost(NamedTuple):
    """Seconds per row: ``fixed`` (c0), ``per_token`` (c) for every token visited, and ``two_goes``
    more where any token is hot."""

    fixed: float
    per_token: float
    two_goes: float = 0.0


class Curve(NamedTuple):
    """The skip rate, between 0 and 1, at some hot-vocabulary sizes in rising order."""

    sizes: npt.NDArray[np.int64]  # [m]
    skip_rate: Floats  # [m]


def skip_rate(sizes: npt.NDArray[np.int64], visited: Floats, vocabulary_size: int) -> Floats:
    """``a(H)`` [m] from tail tokens visited per row [m]; 1 where there is no tail."""
    tail = vocabulary_size - sizes
    rates: Floats = 1.0 - visited / np.maximum(tail, 1)
    rates[tail == 0] = 1.0
    return rates


def fit_cost(
    sizes: Floats | npt.NDArray[np.int64],
    visited: Floats,
    seconds: Floats,
    weights: Floats | None = None,
) -> Cost:
    """Least squares of ``seconds`` [n] per row, with no term below 0.

    ``sizes`` [n] are those of the hot set, ``visited`` [n] the tail tokens visited per row;
    ``weights`` [n] count observations, one each by default. Raises ValueError without two
    different numbers of tokens.
    """
    hot = np.asarray(sizes, np.float64)
    tokens, y = hot + np.asarray(visited, np.float64), np.asarray(seconds, np.float64)
    if len(tokens) < 2 or tokens.min() == tokens.max():
        raise ValueError("a cost needs timings at two different numbers of visited tokens")
    terms = np.stack([np.ones_like(tokens), tokens, (hot > 0).astype(np.float64)], axis=1)
    scale = np.maximum(terms.max(axis=0), 1.0)
    terms /= scale
    weighted = terms.T if weights is None else terms.T * weights
    found = _not_negative(weighted @ terms, weighted @ y) / scale
    return Cost(*found.tolist())


def _not_negative(gram: Floats, products: Floats) -> Floats:
    """The least-squares coefficients [k] without negative ones.

    ``gram`` [k, k] and ``products`` [k] are those of the normal equations. The optimum is the plain
    solution on the terms it uses. Where it uses all, that is it; else the other choices are tried.
    """
    count = len(gram)
    plain = np.asarray(np.linalg.lstsq(gram, products, rcond=None)[0], np.float64)
    if (plain >= 0).all():
        return plain
    best, least = np.zeros(count), 0.0
    for choice in range(1, 2**count - 1):
        used = [term for term in range(count) if choice >> term & 1]
        some = np.linalg.lstsq(gram[np.ix_(used, used)], products[used], rcond=None)[0]
        residual = -float(some @ products[used])  # more than with no terms at all
        if (some >= 0).all() and residual < least:
            best, least = np.zeros(count), residual
            best[used] = some
    return best


def expected_cost(
    sizes: npt.NDArray[np.int64], rates: Floats, cost: Cost, vocabulary_size: int
) -> Floats:
    """``F(H)`` [n], seconds per row, at ``sizes`` [n] with their skip ``rates`` [n]."""
    visited = sizes + (1.0 - rates) * (vocabulary_size - sizes)
    return cost.fixed + cost.two_goes * (sizes > 0) + cost.per_token * visited


def rising(values: Floats, weights: Floats | None = None) -> Floats:
    """The nearest sequence [m] to ``values`` that never falls (weighted least squares).

    By pooling adjacent violators.
    """
    w = np.ones(len(values)) if weights is None else weights
    means: list[float] = []
    masses: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values.tolist(), w.tolist(), strict=True):
        means.append(value)
        masses.append(weight)
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mass = masses[-2] + masses[-1]
            means[-2:] = [(means[-2] * masses[-2] + means[-1] * masses[-1]) / mass]
            masses[-2:] = [mass]
            counts[-2:] = [counts[-2] + counts[-1]]
    return np.repeat(means, counts)


def interpolate(curve: Curve, sizes: npt.NDArray[np.int64] | Floats) -> Floats:
    """The skip rate [n] at any ``sizes`` [n]: monotone, smooth, constant beyond the ends.

    Cubic in ``log(1 + H)``, where curves of Zipf-like vocabularies are nearly straight, with the
    slopes of Fritsch and Butland: between two measured sizes it never leaves their values.
    """
    at = np.log1p(np.asarray(sizes, np.float64))
    x, y = np.log1p(curve.sizes.astype(np.float64)), rising(np.asarray(curve.skip_rate))
    if len(x) == 1:
        return np.full(len(at), y[0])
    slopes = _slopes(x, y)
    at = np.clip(at, x[0], x[-1])
    left = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
    width = x[left + 1] - x[left]
    t = (at - x[left]) / width
    rise = (y[left + 1] - y[left]) * (3 * t**2 - 2 * t**3)
    bend = slopes[left] * t * (1 - t) ** 2 + slopes[left + 1] * t**2 * (t - 1)
    return y[left] + rise + width * bend


def _slopes(x: Floats, y: Floats) -> Floats:
    """At inner points the weighted harmonic mean of both secants, at the ends the three-point
    slope, but between 0 and three secants, beyond which a cubic would overshoot."""
    widths, secants = np.diff(x), np.diff(y) / np.diff(x)
    slopes = np.empty_like(x)
    if len(x) == 2:
        slopes[:] = secants[0]
        return slopes
    before, after = 2 * widths[1:] + widths[:-1], widths[1:] + 2 * widths[:-1]
    flat = (secants[:-1] <= 0) | (secants[1:] <= 0)
    with np.errstate(divide="ignore"):
        mean = (before + after) / (before / secants[:-1] + after / secants[1:])
    slopes[1:-1] = np.where(flat, 0.0, mean)
    for end, near, far in ((0, 0, 1), (-1, -1, -2)):
        first, second = widths[near], widths[far]
        slope = ((2 * first + second) * secants[near] - first * secants[far]) / (first + second)
        slopes[end] = min(max(slope, 0.0), 3 * secants[near])
    return slopes


def best_size(curve: Curve, cost: Cost, vocabulary_size: int) -> int:
    """The size, of all from 0 (off) to ``vocabulary_size``, with the least expected cost.

    The smallest of equals. Among sizes above 0 it depends on the curve alone.
    """
    sizes = np.arange(vocabulary_size + 1, dtype=np.int64)
    costs = expected_cost(sizes, interpolate(curve, sizes), cost, vocabulary_size)
    return int(np.argmin(costs))
