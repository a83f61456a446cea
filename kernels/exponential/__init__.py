"""Exponentials of plain arithmetic, and the log of the softmax denominator made of them.

In double precision they have the same bits on every machine.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from lexshard.kernels.exponential import cpu, reference

Implementation = Literal["reference", "cpu"]


def log_normalizer(
    logits: npt.NDArray[np.float32], *, implementation: Implementation | None = None
) -> float:
    """``log(sum(exp(logits)))`` of fp32 logits [n], float64; ``-inf`` where all are ``-inf``.

    The exponentials are those of `double_precision`, added one after the other in the order given.
    """
    module = reference if implementation == "reference" else cpu
    return module.log_normalizer(logits)
