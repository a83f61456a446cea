"""Random processors of a row."""

from __future__ import annotations

import numpy as np

from lexshard.actors.states.need import Adjustment
from tests.support.search_cases import random_tables


def random_adjustment(random: np.random.Generator, size: int) -> Adjustment:
    def some(share: float) -> np.ndarray:
        return np.flatnonzero(random.random(size) < share).astype(np.int32)

    tables, bias = random_tables(random, size, 0.4), some(0.2)
    return Adjustment(
        repetition=float(random.choice([1.0, 1.3, 0.7])),
        frequency=float(random.choice([0.0, 0.5, -0.3])),
        presence=float(random.choice([0.0, 0.9, -1.1])),
        tables=tables,
        table=int(random.integers(-1, len(tables))),
        bias_ids=bias,
        bias_values=random.choice([-100.0, -1.5, 0.3, 100.0], len(bias)).astype(np.float32),
        banned=some(0.1),
        allowed=some(0.7) if random.random() < 0.3 else None,
    )
