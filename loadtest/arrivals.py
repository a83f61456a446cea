"""When requests arrive, and how many users there are.

Open loops send a request whether or not those before it are answered.
A closed loop (so many users, each of whom waits) slows down with the server and hides its queue.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ARRIVALS = ("poisson", "gamma", "constant")
SHAPES = ("constant", "ramp", "spike")
_CALM_SHARE = 0.2  # of the users between spikes
_SPIKE_SHARE = 0.25  # of a period


def arrival_seconds(
    kind: str, rate: float, count: int, seed: int, burstiness: float = 1.0
) -> npt.NDArray[np.float64]:
    """The seconds, from the first of them, at which ``count`` requests arrive  # [count]

    Gaps have a mean of 1 / ``rate``. Those of ``gamma`` are gamma-distributed with ``burstiness``
    as their shape, as in ``vllm bench serve``: their coefficient of variation is
    1 / sqrt(burstiness), so below 1 requests come in bursts, at 1 as a Poisson process, above it
    more evenly.

    Raises:
        ValueError: an unknown kind, or a number that is not positive.
    """
    if kind not in ARRIVALS:
        raise ValueError(f"arrivals {kind!r}: choose one of {', '.join(ARRIVALS)}")
    for name, value in (("rate", rate), ("burstiness", burstiness), ("number of requests", count)):
        if not 0 < value < float("inf"):
            raise ValueError(f"the {name} is {value}: give a positive number")
    generator = np.random.default_rng(seed)
    if kind == "poisson":
        gaps = generator.exponential(1 / rate, count)
    elif kind == "gamma":
        gaps = generator.gamma(burstiness, 1 / (rate * burstiness), count)
    else:
        gaps = np.full(count, 1 / rate)
    return np.cumsum(gaps) - gaps[0]


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
