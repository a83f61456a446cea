"""A drafter's distribution for a thin link: few tokens of it, in whole parts of ``l``.

Sparse quantise-and-sample (Conformal Sparse Quantize-and-Sample, sections 2, 3 and A.1): keep the
likeliest tokens (`sparsify`), round what they have to multiples of 1 / l (`quantise`), draw the
guess from *that* (`draw`), so that the verifier who is told it tests by what the guess was drawn
from. `codec` makes bits of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lexshard.kernels.lattice.codec import (
    decode,
    encode,
    lattice_bits,
    least_bits,
    size_bits,
)
from lexshard.kernels.lattice.types import Kept, Lattice
from lexshard.kernels.noise import gumbel_noise
from lexshard.kernels.truncate import truncate

__all__ = [
    "Kept",
    "Lattice",
    "decode",
    "draw",
    "encode",
    "lattice_bits",
    "least_bits",
    "log_counts",
    "quantise",
    "size_bits",
    "sparsify",
]


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
    keep = truncate(
        logits,
        inverse_temperature=inverse_temperature,
        top_k=most,
        min_p=min(1.0, threshold * total),
    )
    kept = weights[keep]
    mass = float(kept.sum())
    return Kept(ids[keep], kept / mass, max(0.0, 1.0 - mass / total))


def quantise(kept: Kept, resolution: int) -> Lattice:
    """Counts that sum to ``resolution``, nearest to the probabilities: whole parts, and one more
    for those with the largest remainders (of equal ones, the first)."""
    exact = kept.probabilities * resolution
    counts = np.floor(exact).astype(np.int64)
    missing = resolution - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return Lattice(kept.ids, counts)


def draw(lattice: Lattice, key: int, position: int) -> int:
    """A token of ``softmax(log_counts(lattice))``, drawn with the noise of (key, position)."""
    ids, logits = log_counts(lattice)
    noise = gumbel_noise(key, position, ids)
    return int(ids[np.argmax(logits.astype(np.float64) + noise)])


def log_counts(lattice: Lattice) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The tokens that can be drawn, and what to draw them from and to test them by: the logarithms
    of their counts as fp32, in which both ends have them."""
    some = np.flatnonzero(lattice.counts)
    return lattice.ids[some], np.log(lattice.counts[some].astype(np.float64)).astype(np.float32)
