"""The mass of tokens whose logits are only known within bounds.

What the certificates of top-p and epsilon need: `outside_mass` bounds all tokens outside of a list,
`plan` says how many of the best tokens such a list should hold. `adjusted_bounds` gives the bounds
themselves.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kernels.mass import cpu, reference
from kernels.mass.types import OutsideMass
from kernels.penalties import Adjustments
from kernels.search import Estimates, Needs

Implementation = Literal["reference", "cpu"]

__all__ = ["OutsideMass", "adjusted_bounds", "outside_mass", "plan"]


def adjusted_bounds(
    estimates: Estimates,
    vocabulary_size: int,
    adjustments: Adjustments,
    *,
    implementation: Implementation | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Lower and upper bounds [V] of the adjusted logits of one row, rounded outward."""
    return _module(implementation).adjusted_bounds(estimates, vocabulary_size, adjustments)


def outside_mass(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    *,
    implementation: Implementation | None = None,
) -> OutsideMass:
    """Bounds on the tempered mass of all tokens but a row's ``ids`` (ragged, as elsewhere)."""
    module = _module(implementation)
    return module.outside_mass(estimates, vocabulary_size, needs, adjustments, ids, offsets)


def plan(
    estimates: Estimates,
    vocabulary_size: int,
    needs: Needs,
    adjustments: Adjustments,
    top_p: npt.NDArray[np.float64],
    epsilon: npt.NDArray[np.float64],
    *,
    implementation: Implementation | None = None,
) -> npt.NDArray[np.int64]:
    """How many of the best tokens [N] to compute exactly, so that a certificate is likely.

    For rows with ``epsilon`` [N] above 0: so many that at most epsilon of the mass is outside. For
    the others the nucleus of ``top_p`` [N] and as many more as it takes until the uncertainty of
    what is left is below half the mass of the nucleus' last token. A guess from estimates: what it
    leads to is certified afterwards.
    """
    module = _module(implementation)
    return module.plan(estimates, vocabulary_size, needs, adjustments, top_p, epsilon)


def _module(implementation: Implementation | None) -> Any:
    return reference if implementation == "reference" else cpu
