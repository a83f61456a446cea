"""The log normaliser in numpy, summed in order."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lexshard.kernels.exponential.double_precision import exponential_array


def log_normalizer(logits: npt.NDArray[np.float32]) -> float:
    largest = float(logits.max())
    if math.isinf(largest):
        return largest
    weights = exponential_array(logits.astype(np.float64) - largest)
    return largest + math.log(float(np.add.accumulate(weights)[-1]))
