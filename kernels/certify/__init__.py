"""Certificates: what is known exactly, what bounds the rest, and what follows about all of it.

Every function takes the logits of one row as sampling sees them, after bias, post-processing and
penalties: ``known`` [M] fp32 exactly (excluded tokens are ``-inf``), all other tokens by upper
bounds. Masses are tempered: ``exp(l s)`` with the inverse temperature ``s`` above 0. They stay in
logarithms, because a raw bound overflows, and are rounded outward. None of the certificates is ever
given where it does not hold; on equality it is refused.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lexshard.kernels.certify import cpu
from lexshard.kernels.certify.reference import LARGEST_VOCABULARY, LOG_ROUNDING

Float32s = npt.NDArray[np.float32]

__all__ = [
    "epsilon_certificate",
    "known_log_mass",
    "log_odds",
    "nucleus_certificate",
    "within_odds",
]


def known_log_mass(known: Float32s, inverse_temperature: float) -> float:
    """``Z_S = log sum exp(known * s)``, rounded down; ``-inf`` where all are excluded."""
    _check_temperature(inverse_temperature)
    return float(cpu.known_log_mass(_row(known), inverse_temperature))


def epsilon_certificate(
    known: Float32s, inverse_temperature: float, epsilon: float, outside_log_mass_upper: float
) -> bool:
    """Whether the softmax over ``known`` is within ``epsilon`` of the full one in total variation.

    ``log R <= Z_S + ln(epsilon / (1 - epsilon))`` (CSV-Decode eq. 25 in logarithms), where ``log
    R`` is at most ``outside_log_mass_upper``. Raises `ValueError` unless ``0 <= epsilon < 1``.
    """
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon {epsilon} is not between 0 and 1")
    inside = known_log_mass(known, inverse_temperature)
    return within_odds(inside, outside_log_mass_upper, log_odds(epsilon))


def nucleus_certificate(
    known: Float32s,
    inverse_temperature: float,
    top_p: float,
    outside_log_mass_upper: float,
    outside_log_mass_lower: float,
    outside_upper: float,
    *,
    outside_count: int = LARGEST_VOCABULARY,
) -> int:
    """The size m of the top-p set where it is certain that the m best of ``known`` are that set.

    -1 where it is not. The set is the one that `kernels.truncate.truncate` keeps of the whole row
    (without top-k and min-p): its integer masses are computed for ``known``, and those of the
    ``outside_count`` other tokens (at most) lie between the two log masses, give or take half a
    unit for each and the rounding of the exponential. m is certain if both ends of the interval
    give the same m and ``outside_upper``, the largest bound of any other token, is below the m-th
    logit. ``outside_log_mass_lower`` may be ``-inf``. Raises `ValueError` unless
    ``0 <= top_p < 1``.
    """
    _check_temperature(inverse_temperature)
    if not 0 <= top_p < 1:
        raise ValueError(f"top_p {top_p} truncates nothing or is negative")
    return int(
        cpu.nucleus_size(
            _row(known),
            inverse_temperature,
            top_p,
            outside_log_mass_upper,
            outside_log_mass_lower,
            outside_upper,
            outside_count,
        )
    )


def log_odds(epsilon: float) -> float:
    """``ln(epsilon / (1 - epsilon))``"""
    return (math.log(epsilon) if epsilon > 0 else -math.inf) - math.log1p(-epsilon)


def within_odds(inside: float, outside: float, odds: float) -> bool:
    """Whether ``outside <= inside + odds`` for certain; both are logarithms of masses."""
    if outside == -math.inf:
        return True
    if math.isinf(outside) or inside == -math.inf or odds == -math.inf:
        return False
    slack = LOG_ROUNDING * (abs(inside) + abs(odds) + 1.0) if math.isfinite(inside) else 0.0
    return outside <= inside + odds - slack


def _row(values: Float32s) -> Float32s:
    return np.ascontiguousarray(values, np.float32)


def _check_temperature(inverse_temperature: float) -> None:
    if not 0 < inverse_temperature < math.inf:
        raise ValueError(f"inverse temperature {inverse_temperature} is not positive and finite")
