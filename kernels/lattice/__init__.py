"""A drafter's distribution for a thin link (Conformal Sparse Quantize-and-Sample, sections 2, 3 and
A.1): keep its likeliest tokens (`sparsify`), round what they have to multiples of 1 / l
(`quantise`), draw the guess from *that* (`draw`), so that the verifier who is told it tests by what
the guess was drawn from. `actors.edge.lattice` makes bits of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lexshard.kernels.noise import gumbel_noise
from lexshard.kernels.truncate import truncate


class Kept(NamedTuple):
    """The tokens that are kept of a distribution, renormalised, and the mass that is not."""

    ids: npt.NDArray[np.int32]  # [K] in order
    probabilities: npt.NDArray[np.float64]  # [K] their sum is 1
    dropped: float


def sparsify(
    ids: npt.NDArray[np.int32],
    logits: npt.NDArray[np.float32],
    *,
    inverse_temperature: float,
    most: int = 0,
    threshold: float = 0.0,
) -> Kept:
    """The tokens of ``softmax(logits * inverse_temperature)`` over ``ids``, in order, that have at
    least ``threshold`` (C-SQS, equation 6), and of them the ``most`` likely ones (K-SQS; 0: all).

    The likeliest token is always kept, a token of logit ``-inf`` never. Raises ValueError where
    every token is excluded.
    """
    scaled = logits.astype(np.float64) * inverse_temperature
    top = float(scaled.max(initial=-np.inf))
    if top == -np.inf:
        raise ValueError("every token is excluded")
    weights = np.exp(scaled - top)
    total = float(weights.sum())
    least = min(1.0, threshold * total)  # of the likeliest one's weight, 1
    keep = truncate(logits, inverse_temperature=inverse_temperature, top_k=most, min_p=least)
    mass = float(weights[keep].sum())
    return Kept(ids[keep], weights[keep] / mass, max(0.0, 1.0 - mass / total))


def quantise(probabilities: npt.NDArray[np.float64], resolution: int) -> npt.NDArray[np.int64]:
    """Counts that sum to ``resolution``, nearest to the probabilities: whole parts, and one more
    for those with the largest remainders (of equal ones, the first)."""
    exact = probabilities * resolution
    counts = np.floor(exact).astype(np.int64)
    missing = resolution - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts


def draw(
    ids: npt.NDArray[np.int32], logits: npt.NDArray[np.float32], key: int, position: int
) -> int:
    """One of ``ids`` from ``softmax(logits)``, by the noise of (key, position)."""
    return int(ids[np.argmax(logits.astype(np.float64) + gumbel_noise(key, position, ids))])
