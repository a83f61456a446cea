"""When requests arrive: open loops, in which nobody waits for an answer before the next one asks.

A closed loop (so many users, each of whom waits) slows down with the server and hides its queue.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ARRIVALS = ("poisson", "gamma", "constant")


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
