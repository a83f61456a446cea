"""How many users there are from moment to moment."""

from __future__ import annotations

SHAPES = ("constant", "ramp", "spike")
_CALM_SHARE = 0.2  # of the users between spikes
_SPIKE_SHARE = 0.25  # of a period


def users_at(shape: str, seconds: float, most: int, period: float) -> int:
    """The number of users so many seconds after the start, from 1 to ``most``.

    ``constant``: always ``most``. ``ramp``: more and more for a ``period``, then ``most``.
    ``spike``: a fifth of them, and all in the middle quarter of every period.

    Raises:
        ValueError: there is no such shape, or the period is not positive.
    """
    if period <= 0:
        raise ValueError(f"a period of {period} s: give a positive number")
    if shape == "constant":
        return most
    if shape == "ramp":
        return max(1, min(most, round(most * seconds / period)))
    if shape == "spike":
        begin = (1 - _SPIKE_SHARE) / 2
        in_spike = begin <= seconds % period / period < begin + _SPIKE_SHARE
        return most if in_spike else max(1, round(most * _CALM_SHARE))
    raise ValueError(f"shape {shape!r}: choose one of {', '.join(SHAPES)}")
