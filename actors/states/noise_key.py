"""The random key of a sequence, from its request's seed and its index among the ``n`` choices.

Choice 0 draws with the seed itself. Choice ``c > 0`` draws with

    mix(mix(seed) + c * STEP)    all of it mod 2**64

where ``mix`` is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
number generators") and ``STEP`` its increment, so that choices 1, 2, ... of seed 0 are the
published stream of SplitMix64 from state 0. ``mix`` is a bijection and ``STEP`` is odd: two seeds
never share the key of a choice, and no two choices above 0 of one seed share theirs. Between
different choices of different seeds there is no relation: neighbouring seeds have nothing in
common, as they would with ``seed + choice``.
"""

from __future__ import annotations

STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


def noise_key(seed: int, choice: int) -> int:
    """The key (0 to 2**64 - 1) of a choice; a negative ``seed`` counts mod 2**64."""
    seed &= _MASK
    return seed if choice == 0 else _mix(_mix(seed) + choice * STEP & _MASK)


def _mix(z: int) -> int:
    """The finaliser of SplitMix64, a bijection of 64 bits."""
    z = (z ^ z >> 30) * _FIRST & _MASK
    z = (z ^ z >> 27) * _SECOND & _MASK
    return z ^ z >> 31
